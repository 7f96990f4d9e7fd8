"""Memory of one session: buffers under handles and made-up addresses, and the one bounds check there is.

Real addresses never leave the process: buffer `h` claims to start at `h << 40`. All arithmetic on numbers from the wire
is done in Python integers, which do not wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from drover.errors import DeviceError, RemoteProtocolError
from drover.ggml.tensor import Tensor
from drover.worker.devices.device import Buffer, Device
from drover.worker.turns import Turns

SPACING = 40
"""Bits of an address below the handle: no buffer is larger."""
MAX_BUFFER = 1 << SPACING
MAX_HANDLE = (1 << 64 - SPACING) - 1
MAX_BUFFERS = 4096
"""Buffers a session may hold at a time: each is a mapping, and the kernel grants a process about 65 000."""

_BOUNCE = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class SharedDevice:
    """A device that several sessions use, and the lock that lets one of them in at a time, each in its turn.

    A graph is one turn: of two sessions that compute at once neither waits for more than one graph of the other.
    """

    device: Device
    lock: Turns = field(default_factory=Turns)

    @property
    def max_size(self) -> int:
        """Largest buffer we hand out, in bytes."""
        return min(self.device.max_size, MAX_BUFFER)


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """A buffer handed out: `size` bytes that the client addresses from `base` on."""

    handle: int
    owner: SharedDevice
    buffer: Buffer
    size: int

    @property
    def base(self) -> int:
        """Where the client believes it starts."""
        return self.handle << SPACING


class Memory:
    """The buffers of one session: `limit` bytes at most, on all devices together."""

    def __init__(self, devices: Sequence[SharedDevice], limit: int | None = None) -> None:
        self._devices = devices
        self._limit = limit
        self._held: dict[int, Allocation] = {}
        self._last = 0

    @property
    def used(self) -> int:
        """Bytes held now, on all devices; any thread may ask."""
        return sum(held.size for held in list(self._held.values()))

    def held(self) -> dict[SharedDevice, tuple[int, int]]:
        """How many buffers, and bytes in them, are held of each device; any thread may ask."""
        sums: dict[SharedDevice, tuple[int, int]] = {}
        for held in list(self._held.values()):
            buffers, size = sums.get(held.owner, (0, 0))
            sums[held.owner] = buffers + 1, size + held.size
        return sums

    def available(self, device: int) -> tuple[int, int]:
        """Bytes of a device that this session may still take, and those it has in all."""
        owner = self._devices[device]
        with owner.lock:
            free, total = owner.device.memory()
        return (free if self._limit is None else min(free, self._limit - self.used)), total

    def alloc(self, device: int, size: int) -> Allocation:
        """A new zeroed buffer on a device; raises DeviceError when it does not fit."""
        owner = self._devices[device]
        if self._limit is not None and self.used + size > self._limit:
            raise DeviceError(f"{size} bytes asked, {self.used} held: a client may hold {self._limit}")
        if size > owner.max_size:
            raise DeviceError(f"{size} bytes asked, a buffer has at most {owner.max_size}")
        if len(self._held) >= MAX_BUFFERS or self._last >= MAX_HANDLE:
            raise DeviceError(f"{len(self._held)} buffers held, {self._last} handed out: no more for this client")
        with owner.lock:
            buffer = owner.device.alloc(size)
        self._last += 1
        self._held[self._last] = allocation = Allocation(self._last, owner, buffer, size)
        return allocation

    def find(self, handle: int) -> Allocation:
        """The buffer with this handle; raises RemoteProtocolError if this session has none."""
        held = self._held.get(handle)
        if held is None:
            raise RemoteProtocolError(f"this client has no buffer {handle}")
        return held

    def free(self, handle: int) -> None:
        """Give one buffer back."""
        self._release(self.find(handle))
        del self._held[handle]

    def close(self) -> None:
        """Give everything back; safe to call twice."""
        while self._held:
            self._release(self._held.popitem()[1])

    def region(self, handle: int, address: int, size: int) -> Region:
        """THE bounds check: `size` bytes at `address` lie wholly inside the buffer, or RemoteProtocolError."""
        held = self.find(handle)
        offset = address - held.base
        if offset < 0 or size < 0 or offset + size > held.size:
            raise RemoteProtocolError(f"{size} bytes at offset {offset} of buffer {handle}, which has {held.size}")
        return Region(held, offset, size)

    def part(self, tensor: Tensor, offset: int, size: int) -> Region:
        """`size` bytes from byte `offset` of a tensor on: inside the tensor, and that inside its buffer."""
        nbytes = tensor.nbytes
        try:
            address = tensor.data if nbytes else self.find(tensor.buffer).base
            whole = self.region(tensor.buffer, address, nbytes)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"tensor {tensor.name!r}: {error}") from None
        if offset + size > nbytes:
            raise RemoteProtocolError(f"tensor {tensor.name!r}: {size} bytes at offset {offset}, of {nbytes} bytes")
        return Region(whole.allocation, whole.offset + offset, size)

    def _release(self, held: Allocation) -> None:
        with held.owner.lock:
            held.owner.device.free(held.buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Bytes known to be in bounds, and what can be done to them."""

    allocation: Allocation
    offset: int
    size: int

    @property
    def window(self) -> memoryview | None:
        """The bytes themselves where the host can address them."""
        with self.allocation.owner.lock:
            return self._device.window(self.allocation.buffer, self.offset, self.size)

    def write(self, data: memoryview) -> None:
        """Copy bytes in."""
        with self.allocation.owner.lock:
            self._device.write(self.allocation.buffer, self.offset, data)

    def read(self) -> memoryview:
        """The bytes, not copied where the host can address them."""
        window = self.window
        if window is not None:
            return window
        out = scratch(self.size)
        with self.allocation.owner.lock:
            self._device.read(self.allocation.buffer, self.offset, out)
        return out

    def fill(self, value: int) -> None:
        """Set every byte."""
        with self.allocation.owner.lock:
            self._device.fill(self.allocation.buffer, self.offset, self.size, value)

    def copy_to(self, target: Region) -> None:
        """Copy into a region of the same size, which may overlap on the same device."""
        ours, theirs = self.allocation, target.allocation
        if ours.owner is theirs.owner:
            with ours.owner.lock:
                self._device.copy(ours.buffer, self.offset, theirs.buffer, target.offset, self.size)
            return
        for start in range(0, self.size, _BOUNCE):
            size = min(_BOUNCE, self.size - start)
            target._slice(start, size).write(self._slice(start, size).read())

    def write_rows(self, data: memoryview, size: int, stride: int) -> None:
        """Spread packed rows of `size` bytes, `stride` bytes apart."""
        window = self.window
        count = len(data) // size
        if window is not None:
            _rows(window, count, size, stride)[:] = _rows(data, count, size, size)
            return
        for i in range(count):
            self._slice(i * stride, size).write(data[i * size : (i + 1) * size])

    def read_rows(self, count: int, size: int, stride: int) -> memoryview:
        """Rows of `size` bytes, `stride` bytes apart, packed."""
        rows = _rows(self.read(), count, size, stride)
        return np.ascontiguousarray(rows).data.cast("B")

    @property
    def _device(self) -> Device:
        return self.allocation.owner.device

    def _slice(self, start: int, size: int) -> Region:
        return Region(self.allocation, self.offset + start, size)


def scratch(size: int) -> memoryview:
    """Host memory for bytes on their way to a device the host cannot address; its pages come as they are filled."""
    return np.empty(size, np.uint8).data


def _rows(data: memoryview, count: int, size: int, stride: int) -> npt.NDArray[Any]:
    """Rows of bytes as a matrix; the last one ends where `data` does, and of one alone the stride may be anything."""
    strides = (stride if count > 1 else size, 1)
    return np.lib.stride_tricks.as_strided(np.frombuffer(data, np.uint8), (count, size), strides)
