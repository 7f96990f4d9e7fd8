"""The tensor record of a graph: shape, strides, operation, operands and place in memory.

Extents are `ne` (ne[0] fastest), byte strides `nb`, exactly as on the wire. Operands are named by `id`, so a graph
is a flat list of these records and never a tree of objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from drover.ggml.ops import PARAM_BYTES, Op
from drover.ggml.types import F32, TensorType

Shape = tuple[int, int, int, int]

NO_PARAMS = bytes(PARAM_BYTES)


@dataclass(slots=True, eq=False)
class Tensor:
    """One record of a tensor table; `id` is unique in its graph and never 0."""

    id: int
    ne: Shape
    nb: Shape
    type: TensorType = F32
    op: Op = Op.NONE
    params: bytes = NO_PARAMS
    flags: int = 0
    src: tuple[int, ...] = ()
    view_src: int = 0
    view_offs: int = 0
    buffer: int = 0
    data: int = 0
    name: str = ""
    use_count: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes from `data` to the end of the last element."""
        return span(self.type, self.ne, self.nb)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def contiguous(self) -> bool:
        """Whether elements follow one another without gaps, ne[0] fastest."""
        return self.nb == contiguous_strides(self.type, self.ne)


def shape(*extents: int) -> Shape:
    """Pad extents with ones to four dimensions."""
    ne = (*extents, 1, 1, 1, 1)
    return ne[0], ne[1], ne[2], ne[3]


def contiguous_strides(type_: TensorType, ne: Sequence[int]) -> Shape:
    """Byte strides of a tensor without gaps."""
    nb1 = type_.row_bytes(ne[0])
    return type_.type_size, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2]


def span(type_: TensorType, ne: Sequence[int], nb: Sequence[int]) -> int:
    """Bytes a tensor reaches from its address (docs/protocol.md section 2.3); 0 if it has no elements."""
    if min(ne) <= 0:
        return 0
    outer = (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]
    if type_.block_size == 1:
        return type_.type_size + (ne[0] - 1) * nb[0] + outer
    return ne[0] * nb[0] // type_.block_size + outer
