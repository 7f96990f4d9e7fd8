"""One operation with its operands, as a rule sees it: shapes, strides and types, never values.

Every failure goes through `Call.require`, so that every message names the operation and shows all operands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drover.errors import GraphError
from drover.ggml.ops import Op
from drover.ggml.tensor import Shape, span
from drover.ggml.types import BF16, F16, F32, I32, TensorType

FLOATS = frozenset({F32, F16, BF16})
ONLY_F32 = frozenset({F32})
INDEX = frozenset({I32})


class Shaped(Protocol):
    """Anything with a type, extents and byte strides: a Tensor of a graph or an Operand on a device."""

    @property
    def type(self) -> TensorType:
        """Tensor type."""

    @property
    def ne(self) -> Shape:
        """Extents."""

    @property
    def nb(self) -> Shape:
        """Byte strides."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation about to be executed: its parameters read both ways, its result and its sources."""

    op: Op
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    dst: Shaped
    src: Sequence[Shaped | None]

    def require(self, condition: bool, text: str) -> None:
        """Raise GraphError saying `text` and showing the operands, unless `condition` holds."""
        if not condition:
            raise GraphError(f"{self.op.name}: {text} ({self.describe()})")

    def source(self, index: int) -> Shaped:
        """The source in this slot; GraphError if it is absent."""
        found = self.optional(index)
        if found is None:
            raise GraphError(f"{self.op.name}: src{index} is missing ({self.describe()})")
        return found

    def optional(self, index: int) -> Shaped | None:
        """The source in this slot, or None."""
        return self.src[index] if index < len(self.src) else None

    def typed(self, index: int, types: frozenset[TensorType]) -> Shaped:
        """The source in this slot, which must have one of these types."""
        found = self.source(index)
        self.require(found.type in types, f"src{index} has a type this operation does not read")
        return found

    def result(self, types: frozenset[TensorType]) -> Shaped:
        """The result, which must have one of these types."""
        self.require(self.dst.type in types, "the result has a type this operation does not write")
        return self.dst

    def same_shape(self, a: Shaped, b: Shaped) -> None:
        """Both have the same extents."""
        self.require(a.ne == b.ne, "shapes differ")

    def describe(self) -> str:
        """All operands on one line: `F32[32,4,1,1] <- F16[…], …`."""
        last = max((i for i, s in enumerate(self.src) if s is not None), default=-1)
        sources = ", ".join("-" if s is None else show(s) for s in self.src[: last + 1])
        return f"{show(self.dst)} <- {sources or 'nothing'}"


def show(operand: Shaped) -> str:
    """Type and extents of an operand."""
    return f"{operand.type.name}{list(operand.ne)}"


def elements(operand: Shaped) -> int:
    """Number of elements."""
    return operand.ne[0] * operand.ne[1] * operand.ne[2] * operand.ne[3]


def repeats(small: Shape, large: Shape) -> bool:
    """Whether `large` is `small` tiled a whole number of times in every dimension."""
    return all(s > 0 and n % s == 0 for s, n in zip(small, large, strict=True))


def divides(part: int, whole: int) -> bool:
    """Whether `part` is positive and divides `whole`."""
    return part > 0 and whole % part == 0


def dense(operand: Shaped) -> bool:
    """Whether the elements fill the bytes from first to last: no gaps, no overlap."""
    return span(operand.type, operand.ne, operand.nb) == storage(operand)


def storage(operand: Shaped) -> int:
    """Bytes of the elements themselves."""
    return elements(operand) // operand.type.block_size * operand.type.type_size


def contiguous(operand: Shaped) -> bool:
    """Whether elements follow one another without gaps, ne[0] fastest; strides of extents of one do not matter."""
    expected = operand.type.type_size
    blocks = operand.ne[0] // operand.type.block_size
    for count, stride in zip((blocks, *operand.ne[1:]), operand.nb, strict=True):
        if count > 1 and stride != expected:
            return False
        expected *= count
    return True
