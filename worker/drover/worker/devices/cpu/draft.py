"""What a rule of `lowering` makes of a node, and the words in which rules speak of operands and parameters."""

import struct
from dataclasses import dataclass, field

from drover.worker.devices.cpu import record
from drover.worker.devices.device import Node, Operand
from drover.worker.devices.host import host

FLOATS = frozenset((record.F32, record.F16, record.BF16))

SOLO_ELEMENTS = 8192
"""Elements up to which one thread is done before another would have started."""
ROOM = 256
"""Scratch bytes of the elementwise kernels."""


@dataclass(slots=True)
class Draft:
    """What a record holds besides operands; `words` by word number."""

    opcode: int
    words: dict[int, int] = field(default_factory=dict)
    scratch: int = ROOM
    shared: int = 0
    small: bool = True
    """Whether the operation is cheap per element, so that few elements are best left to one thread."""


def address(operand: Operand) -> int:
    """Where an operand starts in this process."""
    return host(operand.buffer).address + operand.offset


def source(node: Node, index: int) -> Operand | None:
    """The operand in this slot, or None."""
    return node.src[index] if index < len(node.src) else None


def first(node: Node) -> Operand:
    """The first operand; `lower` has seen that it is there."""
    found = node.src[0]
    assert found is not None
    return found


def bits(value: float) -> int:
    """A float as a parameter of a record."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def parameters(*values: int) -> dict[int, int]:
    """The first parameters of a record."""
    return {record.PARAMS + i: value for i, value in enumerate(values)}


def overlap(a: Operand, b: Operand) -> bool:
    """Whether two operands of one buffer have bytes in common."""
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def apart(node: Node, *slots: int) -> bool:
    """Whether the result has no byte of the operands in these slots (of any operand, if none is named)."""
    operands = [source(node, slot) for slot in slots] if slots else node.src
    return not any(x is not None and x.buffer is node.dst.buffer and overlap(x, node.dst) for x in operands)


def in_place(node: Node, slot: int = 0) -> bool:
    """Whether the result is this operand, element for element."""
    return source(node, slot) == node.dst


def rows_of_f32(operand: Operand) -> bool:
    """Whether elements of a row are floats without gaps."""
    return operand.type.id == record.F32 and operand.nb[0] == 4
