"""Weights on disk under their hash, so that a client need not send them twice.

Every kind of damage, a full disk or a folder we may not write to is a miss, never an error for the client. Files are
the stock server's (`<16 hex digits of the FNV-1a hash>`, raw bytes; docs/protocol.md section 4.1), so a folder may be
shared with it and between processes of one machine. The hash is all that a client tells of the content, and it is not a
cryptographic one: who may store tensors can store wrong ones, so a folder is for clients that trust one another.
"""

import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import structlog

from drover.errors import DroverError
from drover.hashing import OFFSET_BASIS, fnv1a

_ENTRY = re.compile(r"[0-9a-f]{16}")
_SUFFIX = ".partial"
_CHUNK = 4 << 20
_ABANDONED = 3600.0
"""Seconds after which somebody else's partial file counts as left behind."""

log = structlog.get_logger()


class Store:
    """A folder of tensors; `limit` bounds its bytes, the least recently used going first."""

    def __init__(self, folder: Path, limit: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """Raises DroverError if the folder cannot be used at all."""
        self.folder = folder
        self._limit = limit
        self._clock = clock
        self._told = False
        self._making_room = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise DroverError(f"weight cache {folder} is not writable: {error.strerror}") from error
        self._sweep()

    @property
    def used(self) -> int:
        """Bytes of all entries; 0 if the folder cannot be read."""
        with suppress(OSError):
            return sum(size for _, size, _ in self._entries())
        return 0

    def size(self, key: int) -> int | None:
        """Bytes stored under a hash, or None."""
        with suppress(OSError):
            status = os.stat(self._path(key))
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def get(self, key: int, out: memoryview) -> bool:
        """Read an entry of exactly `len(out)` bytes into `out`; False, and anything in `out`, if it is not intact."""
        path = self._path(key)
        if self.size(key) != len(out):
            return False
        try:
            with path.open("rb", buffering=0) as file:
                intact = _read(file, out) == key
        except OSError as error:
            self._complain("weight cache entry is not readable", error)
            return False
        if not intact:
            log.warning("weight cache entry is damaged", file=str(path))
            with suppress(OSError):
                path.unlink()
            return False
        with suppress(OSError):
            os.utime(path)
        return True

    def put(self, data: memoryview) -> None:
        """Store bytes under their hash; a failure is logged once."""
        key = fnv1a(data)
        path = self._path(key)
        if self.size(key) == len(data):
            return
        try:
            if self._make_room(len(data)):
                self._write(path, data)
        except OSError as error:
            self._complain("weight cache is not written", error)

    def _write(self, path: Path, data: memoryview) -> None:
        """A reader sees the whole file or none: temporary file, sync, rename."""
        handle, name = tempfile.mkstemp(_SUFFIX, f".{path.name}-", self.folder)
        try:
            with open(handle, "wb", buffering=0) as file:
                os.fchmod(handle, 0o644)
                done = 0
                while done < len(data):
                    done += file.write(data[done:])
                os.fsync(handle)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _make_room(self, size: int) -> bool:
        """Remove what was not used for longest until `size` more bytes fit the limit; False if they never will."""
        if self._limit is None:
            return True
        if size > self._limit:
            return False
        with self._making_room:
            entries = sorted(self._entries())
            total = sum(entry[1] for entry in entries)
            for _, entry_size, path in entries:
                if total + size <= self._limit:
                    break
                path.unlink(missing_ok=True)
                total -= entry_size
        return True

    def _entries(self) -> list[tuple[float, int, Path]]:
        found = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):
                if _ENTRY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, Path(entry.path)))
        return found

    def _sweep(self) -> None:
        """Remove partial files whose writer died."""
        with suppress(OSError):
            for path in self.folder.glob(f".*{_SUFFIX}"):
                if path.stat().st_mtime < self._clock() - _ABANDONED:
                    path.unlink(missing_ok=True)

    def _complain(self, event: str, error: OSError) -> None:
        say = log.debug if self._told else log.warning
        self._told = True
        say(event, folder=str(self.folder), why=error.strerror or str(error))

    def _path(self, key: int) -> Path:
        return self.folder / f"{key:016x}"


def _read(file: FileIO, out: memoryview) -> int | None:
    """Fill `out` from a file and return its hash; None if the file ends early."""
    done, state = 0, OFFSET_BASIS
    while done < len(out):
        count = file.readinto(out[done : done + _CHUNK])
        if not count:
            return None
        state = fnv1a(out[done : done + count], state)
        done += count
    return state
