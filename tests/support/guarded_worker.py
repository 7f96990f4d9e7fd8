"""A worker with every buffer of the host between fences: `python -m support.guarded_worker --port …`.

Before a buffer and behind its readable guard lie pages that nobody may touch: who does ends the process (SIGSEGV). The
guard and what is left of the first page are filled with a pattern; when it has changed, the process aborts. A buffer
ends as close to its fence as the alignment and the guard allow, and nobody may touch one that was freed.
"""

import ctypes
import faulthandler
import mmap
import os
import sys
import threading
import time
from collections import deque
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from drover.errors import DeviceError
from drover.worker.devices import host
from drover.worker.devices.device import Buffer
from drover.worker.devices.host import ALIGNMENT, HostBuffer, HostMemory

PAGE = mmap.PAGESIZE
PATTERN = 0xA5
QUARANTINE = 64
"""Freed buffers whose addresses are not used again yet."""
INTERVAL = 0.5
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class GuardedBuffer(HostBuffer):
    """`size` zeroed bytes, aligned, with `GUARD` readable bytes behind them and forbidden pages around."""

    def __init__(self, size: int) -> None:
        self.size = size
        room = _up(size, ALIGNMENT)
        body = _up(room + self.GUARD, PAGE)
        try:
            self._map = mmap.mmap(-1, body + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(f"cannot reserve {size} bytes of memory: {error}") from error
        whole: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._start, self._length = int(whole.ctypes.data), len(whole)
        first = PAGE + body - self.GUARD - room
        self.address = self._start + first
        self.array = whole[first : first + size]
        self._patterns = whole[PAGE:first], whole[first + size : PAGE + body]
        for pattern in self._patterns:
            pattern[:] = PATTERN
        _forbid(self._start, PAGE)
        _forbid(self._start + PAGE + body, PAGE)

    def check(self) -> None:
        """Abort if something has written around the buffer."""
        for pattern, place in zip(self._patterns, ("before", "behind"), strict=True):
            wrong = np.flatnonzero(pattern != PATTERN)
            if wrong.size:
                at = int(wrong[0]) if place == "behind" else int(wrong[-1]) - len(pattern)
                _die(f"{wrong.size} bytes were written {place} a buffer of {self.size} bytes, the nearest at {at}")

    def seal(self) -> None:
        """Nobody may touch it any more."""
        self._map.madvise(mmap.MADV_DONTNEED)
        _forbid(self._start, self._length)


class Fences:
    """The buffers of a process: checked when they are freed, and all of them from time to time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._living: dict[int, GuardedBuffer] = {}
        self._freed: deque[GuardedBuffer] = deque(maxlen=QUARANTINE)

    def put_up(self) -> None:
        """From now on every buffer of a device on the host is guarded."""
        alloc, free = HostMemory.alloc, HostMemory.free

        def guarded_alloc(memory: HostMemory, size: int) -> HostBuffer:
            buffer = alloc(memory, size)
            assert isinstance(buffer, GuardedBuffer)
            with self._guard:
                self._living[id(buffer)] = buffer
            return buffer

        def guarded_free(memory: HostMemory, buffer: Buffer) -> None:
            free(memory, buffer)
            assert isinstance(buffer, GuardedBuffer)
            with self._guard:
                del self._living[id(buffer)]
                buffer.check()
                buffer.seal()
                self._freed.append(buffer)

        host.HostBuffer = GuardedBuffer  # type: ignore[misc]
        HostMemory.alloc, HostMemory.free = guarded_alloc, guarded_free  # type: ignore[method-assign]
        threading.Thread(target=self._watch, name="fences", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(INTERVAL)
            with self._guard:
                for buffer in self._living.values():
                    buffer.check()


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _forbid(address: int, size: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), _PROT_NONE):
        raise DeviceError(f"cannot guard {size} bytes of memory: {os.strerror(ctypes.get_errno())}")


def _die(why: str) -> NoReturn:
    print(f"fence broken: {why}", file=sys.stderr, flush=True)
    os.abort()


def main() -> int:
    """The command of the worker, guarded."""
    from drover.worker.__main__ import main as command

    faulthandler.enable()
    Fences().put_up()
    return command()


if __name__ == "__main__":
    sys.exit(main())
