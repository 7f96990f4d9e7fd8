"""Which entries of a weight cache are in use, known to every process on the folder.

A lock on one byte of one file says it: byte `key >> 2` of `.in-use`, shared by all who hold an entry. The kernel takes
a lock back when its process ends, however that ends. Locks belong to the open file (F_OFD_SETLK), so one Holds in a
process does not undo another's. Where the file system has no locks, only this process is known.
"""

import errno
import fcntl
import os
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = ".in-use"
_FLOCK = struct.Struct("@hhqqi0q")
_TURN = 1 << 62
"""The byte that is locked by who makes room: the first after those of all keys."""


class Holds:
    """The entries that this process holds, counted; and what others hold, asked of the kernel."""

    def __init__(self, folder: Path) -> None:
        self._held: Counter[int] = Counter()
        self._guard = threading.Lock()
        self._turn = threading.Lock()
        try:
            self._handle = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            self._handle = -1
        else:
            weakref.finalize(self, os.close, self._handle)

    def hold(self, key: int) -> None:
        """From now on nobody removes this entry to make room."""
        with self._guard:
            self._held[key >> 2] += 1
            if self._held[key >> 2] == 1:
                self._lock(fcntl.F_RDLCK, key >> 2, wait=True)

    def release(self, key: int) -> None:
        """One who held it does not any more."""
        with self._guard:
            self._held[key >> 2] -= 1
            if not self._held[key >> 2]:
                del self._held[key >> 2]
                self._lock(fcntl.F_UNLCK, key >> 2)

    @contextmanager
    def claimed(self, key: int) -> Iterator[bool]:
        """Whether nobody holds an entry; while this is entered, nobody begins to."""
        with self._guard:
            if self._held[key >> 2] or not self._lock(fcntl.F_WRLCK, key >> 2):
                yield False
                return
            try:
                yield True
            finally:
                self._lock(fcntl.F_UNLCK, key >> 2)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process, and one thread of it, at a time."""
        with self._turn:
            self._lock(fcntl.F_WRLCK, _TURN, wait=True)
            try:
                yield
            finally:
                self._lock(fcntl.F_UNLCK, _TURN)

    def _lock(self, kind: int, at: int, *, wait: bool = False) -> bool:
        """False if another process is in the way; True too where there are no locks."""
        if self._handle < 0:
            return True
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._handle, command, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True
