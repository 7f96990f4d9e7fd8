"""Weights on disk under their hash, so that a client need not send them twice: what is kept, and what is believed.

Every kind of damage, a full disk or a folder we may not write to is a miss, never an error for the client. Files are
the stock server's, so a folder may be shared with it, and between processes of one machine (`entry`, `holds`). The
FNV-1a hash is all that a client tells of the content, and it is not a cryptographic one: who may store tensors can
store wrong ones, so a folder is for clients that trust one another (decisions/0010).
"""

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from drover.errors import DroverError
from drover.hashing import Fnv1a, fnv1a
from drover.worker import entry
from drover.worker.holds import Holds

SHARE = 80
"""Percent of the room there is that a cache without a limit may take."""
_ABANDONED = 3600.0
"""Seconds after which a partial file counts as left behind."""

Verdict = Literal["sound", "new", "damaged", "shared", "busy", "gone"]
"""Of an entry: as it was stored; without a SHA-256 until now; damaged, and removed; two tensors have its key; being
written, or not for us to read; not there."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """An entry as it lies in the folder; `used` is when, in seconds since 1970."""

    used: float
    size: int
    key: int


class Store:
    """A folder of tensors; `limit` bounds its bytes, the least recently used going first, but none that is in use."""

    def __init__(self, folder: Path, limit: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """Without a limit it is a share of what is free now, its own entries counted as free.

        Raises DroverError if the folder cannot be used at all.
        """
        self.folder = folder
        self._clock = clock
        self._told: set[str] = set()
        self.evictions = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            system = os.statvfs(folder)
        except OSError as error:
            raise DroverError(f"weight cache {folder} is not writable: {error.strerror}") from error
        self._holds = Holds(folder)
        self._sweep()
        free = system.f_bavail * system.f_frsize
        self.limit = (free + self.used) * SHARE // 100 if limit is None else limit

    @property
    def used(self) -> int:
        """Bytes of all entries; 0 if the folder cannot be read."""
        with suppress(OSError):
            return sum(row.size for row in self.rows())
        return 0

    def rows(self) -> list[Row]:
        """All entries, the least recently used first."""
        found = []
        for file in os.scandir(self.folder):
            with suppress(OSError):
                if entry.NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    found.append(Row(status.st_mtime, status.st_size, int(file.name, 16)))
        return sorted(found)

    def shared_keys(self) -> list[int]:
        """The hashes that two tensors have: they name neither."""
        return sorted(key for key in self._described() if len(entry.known(self.folder, key)) > 1)

    def in_use(self, key: int) -> bool:
        """Whether a client of any worker on this folder has it."""
        with self._holds.claimed(key) as free:
            return not free

    def size(self, key: int) -> int | None:
        """Bytes stored under a hash, or None."""
        with suppress(OSError):
            status = os.stat(self._path(key))
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def use(self) -> "Use":
        """The store as one client has it."""
        return Use(self, self._holds)

    def get(self, key: int, out: memoryview) -> bool:
        """Read an entry of exactly `len(out)` bytes into `out`; False, and anything in `out`, if it is not intact.

        Intact is what has the SHA-256 that is known of it; where none is, what has this FNV-1a hash.
        """
        known = entry.known(self.folder, key)
        if len(known) > 1:
            return False
        try:
            with entry.opened(self._path(key)) as content:
                if content is None or content.size != len(out):
                    return False
                fnv, sha = Fnv1a(), hashlib.sha256()
                if content.copy(out, sha) if known else content.copy(out, fnv, sha):
                    if known == (sha.hexdigest(),):
                        content.touch()
                        return True
                    if not known and fnv.value == key:
                        self._remember(key, sha.hexdigest())
                        content.touch()
                        return True
                self._drop(key, content)
        except OSError as error:
            self._unreadable(key, error)
        return False

    def put(self, data: memoryview) -> bool:
        """Store bytes under their hash, if that is not done yet; whether they are there. A failure is logged once."""
        return self.keep(fnv1a(data), data)

    def keep(self, key: int, data: memoryview) -> bool:
        """The same with a hash that is computed already."""
        sha256 = hashlib.sha256(data).hexdigest()
        known = entry.known(self.folder, key)
        if len(known) > 1:
            return False
        try:
            if known == (sha256,) and self.size(key) == len(data):
                os.utime(self._path(key))
                return True
            return self._write(key, sha256, data) if self._replaceable(key, sha256) else self._has(key, sha256)
        except OSError as error:
            self._complain("weight cache is not written", error)
            return False

    def trim(self, limit: int) -> int:
        """Remove what was not used for longest until no more than `limit` bytes are left; how many went."""
        before = self.used
        try:
            with self._holds.alone():
                self._make_room(limit)
        except OSError as error:
            self._complain("weight cache is not trimmed", error)
        return before - self.used

    def check(self, key: int) -> Verdict:
        """Read an entry against all that is known of it; what is damaged goes, a SHA-256 that was missing comes."""
        known = entry.known(self.folder, key)
        if len(known) > 1:
            return "shared"
        try:
            with entry.opened(self._path(key)) as content:
                if content is None:
                    return "gone"
                found = content.digest()
                if found.fnv != key or known not in ((), (found.sha256,)):
                    return "damaged" if self._drop(key, content) else "busy"
        except OSError as error:
            return "damaged" if self._unreadable(key, error) else "busy"
        if not known:
            self._remember(key, found.sha256)
        return "sound" if known else "new"

    def _replaceable(self, key: int, sha256: str) -> bool:
        """Whether these bytes may take the place of what is there: nothing, or something damaged.

        An intact entry of other bytes with the same FNV-1a hash means that the hash does not tell them apart: from then
        on it names neither.
        """
        with entry.opened(self._path(key)) as content:
            if content is None:
                return True
            found = content.digest()
        if found.sha256 == sha256:
            self._remember(key, sha256)
            return False
        if found.fnv != key:
            entry.remove(self.folder, key)
            return True
        log.warning("two tensors share a hash; neither is kept", key=f"{key:016x}", sha256=[found.sha256, sha256])
        with self._holds.alone():
            entry.remember(self.folder, key, found.sha256, sha256)
            self._path(key).unlink(missing_ok=True)
        return False

    def _has(self, key: int, sha256: str) -> bool:
        return entry.known(self.folder, key) == (sha256,)

    def _write(self, key: int, sha256: str, data: memoryview) -> bool:
        """A reader sees the whole file or none: temporary file, sync, rename. False if there is no room for it."""
        if len(data) > self.limit:
            return False
        with self._holds.alone():
            if not self._make_room(self.limit - len(data)):
                return False
            handle, name = entry.partial(self.folder, f"{key:016x}", len(data))
        try:
            with open(handle, "wb", buffering=0) as file:
                done = 0
                while done < len(data):
                    done += file.write(data[done:])
                os.fsync(handle)
            return self._place(key, sha256, name)
        finally:
            with suppress(OSError):
                os.unlink(name)

    def _place(self, key: int, sha256: str, name: str) -> bool:
        """Give a whole file its name; but if somebody was faster, with other bytes, neither is kept."""
        try:
            os.link(name, self._path(key))
        except FileExistsError:
            if not self._replaceable(key, sha256):
                return self._has(key, sha256)
            os.replace(name, self._path(key))
        except OSError:  # no hard links here
            os.replace(name, self._path(key))
        self._remember(key, sha256)
        return True

    def _make_room(self, limit: int) -> bool:
        """Remove the least recently used until at most `limit` bytes are left; False if more than that is in use."""
        rows = self.rows()
        total = sum(row.size for row in rows) + self._being_written()
        for row in rows:
            if total <= limit:
                break
            with self._holds.claimed(row.key) as free:
                if free:
                    entry.remove(self.folder, row.key)
                    self.evictions += 1
                    total -= row.size
        return total <= limit

    def _being_written(self) -> int:
        """Bytes of entries that are not whole yet, of any process."""
        total = 0
        for path in self.folder.glob(f".*{entry.PARTIAL}"):
            if entry.BESIDE not in path.name:
                with suppress(OSError):
                    total += path.stat().st_size
        return total

    def _sweep(self) -> None:
        """Remove partial files whose writer died, and SHA-256s of what is not there any more."""
        with suppress(OSError):
            for path in self.folder.glob(f".*{entry.PARTIAL}"):
                if path.stat().st_mtime < self._clock() - _ABANDONED:
                    path.unlink(missing_ok=True)
        with suppress(OSError):
            for key in self._described():
                if self.size(key) is None and len(entry.known(self.folder, key)) < 2:
                    entry.remove(self.folder, key)

    def _described(self) -> list[int]:
        """The keys beside which something is written."""
        names = [path.name.removesuffix(entry.BESIDE) for path in self.folder.glob(f"*{entry.BESIDE}")]
        return [int(name, 16) for name in names if entry.NAME.fullmatch(name)]

    def _drop(self, key: int, content: entry.Content) -> bool:
        """Remove a damaged entry unless somebody has replaced it; False, and it stays, if somebody is writing it."""
        if content.being_written:
            return False
        log.warning("weight cache entry is damaged", file=str(self._path(key)))
        with suppress(OSError):
            if os.stat(self._path(key)).st_ino == content.inode:
                entry.remove(self.folder, key)
        return True

    def _unreadable(self, key: int, error: OSError) -> bool:
        """Remove what the disk does not give back; False, and it stays, if we may not read it: others may."""
        self._complain("weight cache entry is not readable", error)
        if isinstance(error, PermissionError):
            return False
        with suppress(OSError):
            entry.remove(self.folder, key)
        return True

    def _remember(self, key: int, sha256: str) -> None:
        """What cannot be written beside an entry is worked out again when it is read; a collision stays one."""
        with suppress(OSError), self._holds.alone():
            if len(entry.known(self.folder, key)) < 2:
                entry.remember(self.folder, key, sha256)

    def _complain(self, event: str, error: OSError) -> None:
        say = log.debug if event in self._told else log.warning
        self._told.add(event)
        say(event, folder=str(self.folder), why=error.strerror or str(error))

    def _path(self, key: int) -> Path:
        return entry.path_of(self.folder, key)


class Use:
    """What one client has of a store: what it read or stored stays there until it leaves."""

    def __init__(self, store: Store, holds: Holds) -> None:
        self._store = store
        self._holds = holds
        self._keys: set[int] = set()

    def size(self, key: int) -> int | None:
        """As of the store."""
        return self._store.size(key)

    def get(self, key: int, out: memoryview) -> bool:
        """As of the store."""
        self._hold(key)
        return self._store.get(key, out) or self._release(key)

    def put(self, data: memoryview) -> bool:
        """As of the store."""
        key = fnv1a(data)
        self._hold(key)
        return self._store.keep(key, data) or self._release(key)

    def close(self) -> None:
        """The client has left; safe to call twice."""
        while self._keys:
            self._holds.release(self._keys.pop())

    def _hold(self, key: int) -> None:
        if key not in self._keys:
            self._keys.add(key)
            self._holds.hold(key)

    def _release(self, key: int) -> Literal[False]:
        self._keys.discard(key)
        self._holds.release(key)
        return False
