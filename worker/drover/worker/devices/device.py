"""What a device is: memory, and graphs compiled for it and run.

A device knows nothing of sockets, sessions or handles. Bounds are checked before it is called (`memory.region` for
addresses, `ggml.rules` for shapes); only the values of index tensors are the device's to check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from drover.ggml.ops import Op
from drover.ggml.tensor import Shape, span
from drover.ggml.types import TensorType


class Buffer(Protocol):
    """A block of device memory; `size` bytes, alive until `Device.free`."""

    size: int


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor on real memory: it starts `offset` bytes into `buffer`, in bounds."""

    type: TensorType
    ne: Shape
    nb: Shape
    buffer: Buffer
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last element."""
        return span(self.type, self.ne, self.nb)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]


@dataclass(frozen=True, slots=True)
class Node:
    """One operation to execute: `dst` receives the result; absent sources are None."""

    op: Op
    params: bytes
    dst: Operand
    src: tuple[Operand | None, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a node took on a device, together with what was computed along with it."""

    node: Node
    seconds: float


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most a device does of something: `rate` per second, of bytes or of additions and multiplications."""

    what: str
    rate: float
    unit: str


Program = Any
"""A compiled graph: opaque to everyone but the device that made it."""


@runtime_checkable
class Device(Protocol):
    """The interface of every device; `close` aside, methods may be called from any thread, one at a time."""

    name: str
    """Short name as listed at start-up: CPU, CUDA0."""
    description: str
    """What it runs on, for people."""
    alignment: int
    """Bytes; a power of two."""
    max_size: int
    """Largest buffer in bytes."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes offered."""

    def alloc(self, size: int) -> Buffer:
        """Reserve zeroed memory; raises DeviceError when there is not enough."""

    def free(self, buffer: Buffer) -> None:
        """Give memory back."""

    def window(self, buffer: Buffer, offset: int, size: int) -> memoryview | None:
        """The bytes themselves, writable, if the host can address them; otherwise None: use `write` and `read`."""

    def write(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        """Copy bytes from the host."""

    def read(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        """Copy bytes to the host."""

    def fill(self, buffer: Buffer, offset: int, size: int, value: int) -> None:
        """Set every byte of a range."""

    def copy(self, src: Buffer, src_offset: int, dst: Buffer, dst_offset: int, size: int) -> None:
        """Copy bytes within the device."""

    def compile(self, nodes: Sequence[Node]) -> Program:
        """Turn nodes, in execution order, into a program; raises DeviceError naming an operation it lacks."""

    def run(self, program: Program) -> None:
        """Execute a program to its end; raises DeviceError if an index tensor points out of range."""

    def run_timed(self, program: Program) -> list[Timing]:
        """Execute like `run`, a little slower, and say how long each node took."""

    def limits(self) -> list[Ceiling]:
        """What the hardware can do at most, measured now; takes a few seconds."""

    def close(self) -> None:
        """Stop threads and give everything back."""
