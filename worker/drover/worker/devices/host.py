"""Memory of devices that compute in the host's address space: anonymous maps, zeroed, huge pages asked."""

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from drover.errors import DeviceError
from drover.worker.devices.device import Buffer
from drover.worker.machine import available_memory

ALIGNMENT = 64
ALWAYS_THERE = 128 << 20
"""Bytes that are taken to compute with without asking the machine, which costs more than most nodes."""
MAX_SIZE = 1 << 46


def require_free(wanted: int) -> None:
    """Raise DeviceError if the machine has not so many bytes to compute with."""
    if wanted > ALWAYS_THERE and wanted > (free := available_memory()):
        raise DeviceError(f"no memory to compute with: {wanted} bytes needed, {free} are free")


class HostBuffer:
    """`size` zeroed bytes as a numpy array, aligned to a page, with `GUARD` readable bytes behind them."""

    GUARD = 4096

    def __init__(self, size: int) -> None:
        self.size = size
        try:
            self._map = mmap.mmap(-1, size + self.GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(f"cannot reserve {size} bytes of memory: {error}") from error
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self.array.ctypes.data)


def host(buffer: Buffer) -> HostBuffer:
    """The same buffer, known to be of this kind."""
    assert isinstance(buffer, HostBuffer)
    return buffer


class HostMemory:
    """The memory half of a device on the host: `limit` is how many bytes it offers."""

    alignment = ALIGNMENT
    max_size = MAX_SIZE

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    def memory(self) -> tuple[int, int]:
        """Free and total bytes offered."""
        return max(0, self._limit - self._used), self._limit

    def alloc(self, size: int) -> HostBuffer:
        """Reserve zeroed memory; raises DeviceError when less than `size` is left of the limit."""
        if size > self._limit - self._used:
            raise DeviceError(f"{size} bytes asked, {self._limit - self._used} of {self._limit} left")
        buffer = HostBuffer(size)
        self._used += size
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give memory back; the pages go when the last view of them does."""
        self._used -= buffer.size

    def window(self, buffer: Buffer, offset: int, size: int) -> memoryview:
        """The bytes themselves."""
        return host(buffer).array.data[offset : offset + size]

    def write(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        """Copy bytes in."""
        self.window(buffer, offset, len(data))[:] = data

    def read(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        """Copy bytes out."""
        out[:] = self.window(buffer, offset, len(out))

    def fill(self, buffer: Buffer, offset: int, size: int, value: int) -> None:
        """Set every byte of a range."""
        host(buffer).array[offset : offset + size] = value

    def copy(self, src: Buffer, src_offset: int, dst: Buffer, dst_offset: int, size: int) -> None:
        """Copy bytes; the ranges may overlap."""
        host(dst).array[dst_offset : dst_offset + size] = host(src).array[src_offset : src_offset + size].copy()
