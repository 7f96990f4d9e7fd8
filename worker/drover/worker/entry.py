"""One entry of the weight cache: a file of raw bytes named by their FNV-1a hash, and their SHA-256 in a file beside it.

The first is the stock server's own (docs/protocol.md section 4.1), which neither writes nor minds the second:
`<name>.sha256`, a line of `sha256sum` (decisions/0010). Two lines in it mean that two tensors share the FNV-1a hash.
Nothing here decides what is kept.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import re
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drover.hashing import Fnv1a

NAME = re.compile(r"[0-9a-f]{16}")
BESIDE = ".sha256"
PARTIAL = ".partial"
PIECE = 1 << 20
"""Bytes copied before they are hashed, so that they are hashed where they still lie in the processor's cache."""
_LINE = re.compile(r"([0-9a-f]{64})  ([0-9a-f]{16})")
_MOST = 4096
"""Bytes of the file beside that are looked at."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ: read the pages now, and say so if the disk cannot (Linux 5.14)."""


@dataclass(frozen=True, slots=True)
class Digest:
    """What a pass over an entry found."""

    size: int
    fnv: int
    sha256: str


class Content:
    """An open entry. `shielded` while nobody can write to it: then, and only then, is it mapped."""

    def __init__(self, handle: int, status: os.stat_result) -> None:
        self.handle = handle
        self.size = status.st_size
        self.inode = status.st_ino
        self.being_written = False
        self._shielded = self._shield()

    def copy(self, out: memoryview, *hashes: "Fnv1a | hashlib._Hash") -> bool:
        """Fill `out` and hash what arrived there, in one pass; False if the content has another size."""
        if self.size != len(out):
            return False
        done = 0
        for piece in self._pieces():
            there = out[done : done + len(piece)]
            if len(there) < len(piece):
                return False
            np.copyto(np.frombuffer(there, np.uint8), np.frombuffer(piece, np.uint8))
            for digest in hashes:
                digest.update(there)
            done += len(piece)
        return done == len(out)

    def digest(self) -> Digest:
        """Both hashes of what is there."""
        fnv, sha, size = Fnv1a(), hashlib.sha256(), 0
        for piece in self._pieces():
            fnv.update(piece)
            sha.update(piece)
            size += len(piece)
        return Digest(size, fnv.value, sha.hexdigest())

    def touch(self) -> None:
        """It was used now."""
        with suppress(OSError):
            os.utime(self.handle)

    def _shield(self) -> bool:
        """A lease: who opens the file to write waits until it is closed here. Another's file, or NFS, has none.

        Without it a mapping of a file that is cut short would end the process.
        """
        try:
            fcntl.fcntl(self.handle, fcntl.F_SETSIG, signal.SIGURG)  # SIGIO, the default, would end us
            fcntl.fcntl(self.handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            self.being_written = error.errno == errno.EAGAIN
            return False
        return True

    def _pieces(self) -> Iterator[memoryview]:
        """The content in order; a piece is good until the next one is asked for."""
        if self.size and self._shielded:
            with mmap.mmap(self.handle, self.size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
                if _populated(mapped, 0, min(PIECE, self.size)):
                    for start in range(0, self.size, PIECE):
                        size = min(PIECE, self.size - start)
                        if start:
                            _populated(mapped, start, size)
                        with view[start : start + size] as piece:
                            yield piece
                    return
        room = memoryview(bytearray(min(PIECE, self.size + 1)))
        os.lseek(self.handle, 0, os.SEEK_SET)
        while count := os.readv(self.handle, [room]):
            yield room[:count]


@contextmanager
def opened(path: Path) -> Iterator[Content | None]:
    """An entry to read; None if there is no such file. OSError if it cannot be opened."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not keep us waiting
    except FileNotFoundError:
        yield None
        return
    try:
        status = os.fstat(handle)
        yield Content(handle, status) if stat.S_ISREG(status.st_mode) else None
    finally:
        os.close(handle)


def path_of(folder: Path, key: int) -> Path:
    """Where the bytes with an FNV-1a hash lie."""
    return folder / f"{key:016x}"


def known(folder: Path, key: int) -> tuple[str, ...]:
    """The SHA-256s that are written beside a key: none, one, or those of tensors that share the key."""
    path = path_of(folder, key)
    try:
        with path.with_name(path.name + BESIDE).open("rb", buffering=0) as file:
            text = file.read(_MOST).decode("ascii", "replace")
    except OSError:
        return ()
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    return tuple(line[1] for line in lines if line and line[2] == path.name) if all(lines) else ()


def remember(folder: Path, key: int, *sha256: str) -> None:
    """Write SHA-256s beside a key; OSError if that cannot be done."""
    path = path_of(folder, key)
    text = "".join(f"{digest}  {path.name}\n" for digest in sha256).encode()
    handle, name = partial(folder, path.name + BESIDE, len(text))
    try:
        with open(handle, "wb", buffering=0) as file:
            file.write(text)
        os.replace(name, path.with_name(path.name + BESIDE))
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def remove(folder: Path, key: int) -> None:
    """Forget an entry. What is beside goes first, so that no crash leaves it there alone."""
    path = path_of(folder, key)
    path.with_name(path.name + BESIDE).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def partial(folder: Path, name: str, size: int) -> tuple[int, str]:
    """A new file that becomes `name` once it is whole, of that size from the first: its handle and path."""
    handle, path = tempfile.mkstemp(PARTIAL, f".{name}-", folder)
    try:
        os.fchmod(handle, 0o644)
        os.truncate(handle, size)
    except BaseException:
        os.close(handle)
        os.unlink(path)
        raise
    return handle, path


def _populated(mapped: mmap.mmap, start: int, size: int) -> bool:
    """Read a part of a mapping from the disk; OSError if it cannot be read, False if the kernel does not know how."""
    try:
        mapped.madvise(_POPULATE_READ, start, size)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True
