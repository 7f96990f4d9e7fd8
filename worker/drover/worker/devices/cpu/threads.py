"""The threads of a device: one program at a time, run by all of them at once.

The calling thread is number 0 and the others sleep between runs. Nothing is waited for at the end: a run ends with a
barrier inside the compiled code, so a helper that is still on its way back touches nothing of the program.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from drover.errors import DeviceError
from drover.worker.devices.cpu import callees
from drover.worker.devices.cpu.run import parts, run
from drover.worker.devices.cpu.sync import BAD_RECORD, CALLEES, SYNC_BYTES
from drover.worker.devices.host import require_free

_ALIGNMENT = 64
_KEPT_BYTES = 128 << 20
"""Memory to compute with that is kept between programs: more than those of models need."""


class Threads:
    """`count` threads, `count - 1` of them helpers of our own; `run` is not to be called twice at a time.

    Creating them compiles the kernels, which takes a while when numba's cache has none.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._sync = aligned(SYNC_BYTES).view(np.int64)
        self._sync[CALLEES // 8] = callees.table()
        self._scratch = [aligned(_ALIGNMENT) for _ in range(count)]
        self._shared = aligned(_ALIGNMENT)
        self._addresses = self._locate()
        self._job: tuple[int, int, int] | None = None
        for compile_part in parts():
            compile_part()
        self._go = [threading.Lock() for _ in range(count - 1)]
        self._helpers = [threading.Thread(target=self._help, args=(i + 1,), daemon=True) for i in range(count - 1)]
        for lock, helper in zip(self._go, self._helpers, strict=True):
            lock.acquire()
            helper.start()

    @contextmanager
    def room(self, scratch: int, shared: int) -> Iterator[None]:
        """Within have at least these bytes: `scratch` for each thread, `shared` for all; raises DeviceError.

        What is unusually much is given back at the end.
        """
        if scratch > self._scratch[0].nbytes or shared > self._shared.nbytes:
            self._take(max(scratch, self._scratch[0].nbytes), max(shared, self._shared.nbytes))
        try:
            yield
        finally:
            if self.count * self._scratch[0].nbytes + self._shared.nbytes > _KEPT_BYTES:
                self._take(_ALIGNMENT, _ALIGNMENT)

    def _take(self, scratch: int, shared: int) -> None:
        wanted = self.count * scratch + shared
        require_free(wanted)
        try:
            self._scratch = [aligned(scratch) for _ in range(self.count)]
            self._shared = aligned(shared)
        except MemoryError as error:
            raise DeviceError(f"no memory to compute with: {wanted} bytes needed") from error
        self._addresses = self._locate()

    def run(self, address: int, records: int, ticks: int = 0) -> int:
        """Execute records at an address; the address of a record that met a bad index, or 0.

        `ticks`, if any, is where one number more than there are records is written: `run.run` says which.
        """
        self._job = (address, records, ticks)
        for lock in self._go:
            lock.release()
        self._call(0, *self._job)
        return int(self._sync[BAD_RECORD // 8])

    def close(self) -> None:
        """End the helpers."""
        self._job = None
        for lock in self._go:
            lock.release()
        for helper in self._helpers:
            helper.join()
        self._go, self._helpers = [], []

    def _help(self, thread: int) -> None:
        lock = self._go[thread - 1]
        while True:
            lock.acquire()
            if self._job is None:
                return
            self._call(thread, *self._job)

    def _call(self, thread: int, address: int, records: int, ticks: int) -> None:
        run(thread, self.count, address, records, *self._addresses[thread], ticks)

    def _locate(self) -> list[tuple[int, int, int]]:
        """Addresses for each thread: synchronisation block, scratch, shared memory."""
        sync, shared = int(self._sync.ctypes.data), int(self._shared.ctypes.data)
        return [(sync, int(scratch.ctypes.data), shared) for scratch in self._scratch]


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that start on a cache line."""
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -int(raw.ctypes.data) % _ALIGNMENT
    return raw[start : start + size]
