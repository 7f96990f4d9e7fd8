"""A graph as the cpu device runs it: stretches of records for the compiled interpreter, and nodes it has no kernel for.

Nothing of a program changes between runs but counters and results, so running one again costs no Python per node.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover.errors import DeviceError
from drover.ggml.ops import Op
from drover.worker.devices.cpu import matmul, record
from drover.worker.devices.cpu.draft import Draft, address
from drover.worker.devices.cpu.lowering import fuse, lower
from drover.worker.devices.cpu.run import compile_kernel
from drover.worker.devices.cpu.threads import aligned
from drover.worker.devices.device import Buffer, Node, Operand
from drover.worker.devices.reference.device import OPERATIONS

_SOURCE_WORDS = (
    (record.SRC, record.NE0, record.NB0, record.TYPE0),
    (record.SRC + 1, record.NE1, record.NB1, record.TYPE1),
    (record.SRC + 2, record.NE2, record.NB2, record.TYPE2),
    (record.SRC + 3, record.NE3, record.NB3, record.TYPE3),
    (record.SRC + 4, record.NE4, record.NB4, record.TYPE4),
    (record.SRC5, record.NE5, record.NB5, record.TYPE5),
    (record.SRC6, record.NE6, record.NB6, record.TYPE6),
)

Stretch = tuple[int, int]
"""Consecutive records: the first, and how many."""


@dataclass(frozen=True, slots=True)
class CpuProgram:
    """Records and the nodes they came from (one to one), the order of execution, and the room it takes."""

    records: npt.NDArray[np.int64]
    nodes: tuple[Node, ...]
    steps: tuple[Stretch | Node, ...]
    scratch: int
    shared: int
    buffers: tuple[Buffer, ...]
    """Held so that the addresses in the records stay mapped."""

    @property
    def start(self) -> int:
        """Where the records lie."""
        return int(self.records.ctypes.data)


def compile_nodes(nodes: Sequence[Node], threads: int) -> CpuProgram:
    """Turn nodes into a program for so many threads; raises DeviceError for an operation no device of the host has."""
    steps: list[Stretch | Node] = []
    drafts: list[tuple[Node, Draft]] = []
    waiting = deque(part for node in nodes if node.dst.elements for part in matmul.parts(node))
    while waiting:
        node = waiting.popleft()
        draft = lower(node, threads)
        if draft is None:
            _require_reference(node)
            steps.append(node)
            continue
        if fuse(node, draft, waiting[0] if waiting else None):
            waiting.popleft()
        drafts.append((node, draft))
        last = steps[-1] if steps else None
        if isinstance(last, tuple):
            steps[-1] = (last[0], last[1] + 1)
        else:
            steps.append((len(drafts) - 1, 1))
    records = aligned(len(drafts) * record.RECORD_BYTES).view(np.int64).reshape(-1, record.WORDS)
    for row, (node, draft) in zip(records, drafts, strict=True):
        _write(row, node, draft)
    _leave_out_barriers(records, steps)
    return CpuProgram(
        records,
        tuple(node for node, _ in drafts),
        tuple(steps),
        max((draft.scratch for _, draft in drafts), default=0),
        max((draft.shared for _, draft in drafts), default=0),
        tuple({id(x.buffer): x.buffer for node in nodes for x in (node.dst, *node.src) if x is not None}.values()),
    )


def describe(node: Node) -> str:
    """A node in words: operation, name, types and shapes."""
    operands = ", ".join(_shape(x) for x in node.src if x is not None)
    return f"{node.op.name} {node.name!r} ({operands}) -> {_shape(node.dst)}"


def _shape(operand: Operand) -> str:
    return f"{operand.type.name}[{','.join(map(str, operand.ne))}]"


def _require_reference(node: Node) -> None:
    if node.op not in OPERATIONS:
        raise DeviceError(f"this worker cannot compute {describe(node)}: it knows no operation {node.op.name}")


def _write(row: npt.NDArray[np.int64], node: Node, draft: Draft) -> None:
    row[record.KERNEL] = compile_kernel(draft.opcode)
    row[record.DST] = address(node.dst)
    row[record.NE_DST : record.NE_DST + 4] = node.dst.ne
    row[record.NB_DST : record.NB_DST + 4] = node.dst.nb
    row[record.TYPE_DST] = node.dst.type.id
    sources = node.src[:2] if node.op in _TWO_SOURCES else node.src
    for source, (place, extents, strides, kind) in zip(sources, _SOURCE_WORDS, strict=False):
        if source is None:
            continue
        row[place] = address(source)
        row[extents : extents + 4] = source.ne
        row[strides : strides + 4] = source.nb
        row[kind] = source.type.id
    for word, value in draft.words.items():
        row[word] = value
    row[record.FLAGS] = record.SOLO if draft.small else 0


_TWO_SOURCES = frozenset((Op.SET_ROWS, Op.CPY))
"""Operations that name their result as an operand too."""


def _leave_out_barriers(records: npt.NDArray[np.int64], steps: Sequence[Stretch | Node]) -> None:
    """Neighbours that one thread runs alone need no barrier between them."""
    for step in steps:
        if isinstance(step, Node):
            continue
        first, count = step
        for i in range(first, first + count - 1):
            if records[i, record.FLAGS] & records[i + 1, record.FLAGS] & record.SOLO:
                records[i, record.FLAGS] |= record.NO_BARRIER
