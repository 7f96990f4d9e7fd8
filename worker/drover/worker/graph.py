"""A graph message -> nodes on real memory in execution order, and the programs kept for GRAPH_RECOMPUTE.

The table is flat and stays flat: operands are looked up by id, nothing recurses. Of the table only what a node that
runs can reach is checked, and all of that is: docs/protocol.md sections 3 and 9.4.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from drover.errors import GraphError, LimitError, RemoteProtocolError
from drover.ggml import rules
from drover.ggml.ops import FORBIDDEN_OPS, MAX_NAME, MAX_SOURCES, METADATA_OPS, PARAM_BYTES, Op, TensorFlag
from drover.ggml.tensor import Shape, span
from drover.ggml.types import TYPES
from drover.rpc.messages import TENSOR_BYTES, GraphCompute
from drover.worker.devices.device import Node, Operand, Program
from drover.worker.limits import GENEROUS, MAX_GRAPHS, Limits
from drover.worker.memory import Memory

MAX_OVERLAP = 256
"""How many times the bytes of its buffer the elements of a tensor may claim: bounds every later product of extents."""
MAX_KEPT_NODES = 1 << 19

_FIELDS = (
    ("id", "<u8", 0),
    ("type", "<u4", 8),
    ("buffer", "<u8", 12),
    ("ne", "<4u4", 20),
    ("nb", "<4u4", 36),
    ("op", "<u4", 52),
    ("params", f"V{PARAM_BYTES}", 56),
    ("flags", "<i4", 120),
    ("src", f"<{MAX_SOURCES}u8", 124),
    ("data", "<u8", 220),
    ("name", f"V{MAX_NAME}", 228),
)
"""Name, format and offset of what we read of a tensor record (docs/protocol.md section 3.1)."""
_RECORD = np.dtype(
    {
        "names": [name for name, _, _ in _FIELDS],
        "formats": [form for _, form, _ in _FIELDS],
        "offsets": [offset for _, _, offset in _FIELDS],
        "itemsize": TENSOR_BYTES,
    }
)


@dataclass(frozen=True, slots=True)
class Graph:
    """What is left to execute, and the handles of the buffers it touches."""

    nodes: list[Node]
    handles: frozenset[int]


def resolve(message: GraphCompute, memory: Memory, owner: object, limits: Limits = GENEROUS) -> Graph:
    """Checked nodes of a graph whose memory must belong to the device `owner`; raises RemoteProtocolError."""
    ids = np.frombuffer(message.nodes, "<u8")
    table = np.frombuffer(message.tensors, _RECORD)
    if len(ids) > limits.nodes or len(table) > limits.tensors:
        raise LimitError(
            f"a graph of {len(ids)} nodes and {len(table)} tensors; {limits.nodes} and {limits.tensors} are possible"
        )
    reader = _Reader(table, memory, owner)
    nodes = [node for node in map(reader.node, ids.tolist()) if node is not None]
    return Graph(nodes, frozenset(reader.handles))


class _Reader:
    """A tensor table by columns; each tensor becomes an operand at most once."""

    def __init__(self, table: npt.NDArray[Any], memory: Memory, owner: object) -> None:
        self.handles: set[int] = set()
        self._memory = memory
        self._owner = owner
        self._table = table
        self._rows = {id_: row for row, id_ in enumerate(table["id"].tolist()) if id_}
        self._type: list[int] = table["type"].tolist()
        self._buffer: list[int] = table["buffer"].tolist()
        self._data: list[int] = table["data"].tolist()
        self._ne: list[list[int]] = table["ne"].tolist()
        self._nb: list[list[int]] = table["nb"].tolist()
        self._op: list[int] = table["op"].tolist()
        self._flags: list[int] = table["flags"].tolist()
        self._src: list[list[int]] = table["src"].tolist()
        self._operands: dict[int, Operand] = {}
        self._sound: set[tuple[object, ...]] = set()

    def node(self, id_: int) -> Node | None:
        """The node with this id, or None if there is nothing to execute."""
        row = self._row(id_)
        op = self._operation(row)
        if op in METADATA_OPS or not self._flags[row] & _COMPUTE or 0 in self._ne[row]:
            return None
        dst = self._operand(row, row, None)
        src = self._sources(row, dst)
        params = self._table["params"][row].tobytes()
        try:
            self._check(op, params, dst, src)
        except GraphError as error:
            raise RemoteProtocolError(f"{self._label(row)}: {error}") from error
        return Node(op, params, dst, _as_read(op, src), self._name(row))

    def _check(self, op: Op, params: bytes, dst: Operand, src: tuple[Operand | None, ...]) -> None:
        """`rules.check`, once for the many nodes of a model that differ in nothing but their place."""
        shapes = tuple(operand and (operand.type.id, operand.ne, operand.nb) for operand in (dst, *src))
        if (op, params, shapes) not in self._sound:
            rules.check(op, params, dst, src)
            self._sound.add((op, params, shapes))

    def _sources(self, row: int, dst: Operand) -> tuple[Operand | None, ...]:
        """Operands by slot, up to the last one present; a node may name itself."""
        ids = self._src[row]
        count = max((slot + 1 for slot, id_ in enumerate(ids) if id_), default=0)
        return tuple(self._operand(self._row(id_, row), row, dst) if id_ else None for id_ in ids[:count])

    def _row(self, id_: int, node: int | None = None) -> int:
        row = self._rows.get(id_)
        if row is None:
            where = "the list of nodes" if node is None else self._label(node)
            raise RemoteProtocolError(f"{where} names tensor {id_:#x}, which is not in the table")
        return row

    def _operation(self, row: int) -> Op:
        op = _OPS.get(self._op[row])
        if op is None:
            raise RemoteProtocolError(f"{self._label(row)}: protocol 8.0 does not have its operation")
        if op in FORBIDDEN_OPS:
            raise RemoteProtocolError(f"{self._label(row)}: its parameter is a pointer of the client, never executed")
        return op

    def _operand(self, row: int, node: int, dst: Operand | None) -> Operand:
        """A tensor on real memory, checked once."""
        operand = self._operands.get(row)
        if operand is not None:
            return operand
        try:
            return self._place(row, dst)
        except RemoteProtocolError as error:
            where = "" if row == node else f": operand {self._label(row)}"
            raise RemoteProtocolError(f"{self._label(node)}{where}: {error}") from None

    def _place(self, row: int, dst: Operand | None) -> Operand:
        """The same for the first time; a tensor without elements borrows the place of its node's result."""
        type_ = TYPES.get(self._type[row])
        if type_ is None:
            raise RemoteProtocolError("protocol 8.0 does not have its type")
        ne, nb = _shape(self._ne[row]), _shape(self._nb[row])
        if 0 in ne and dst is not None:
            return Operand(type_, ne, nb, dst.buffer, dst.offset)
        handle = self._buffer[row]
        if handle == 0:
            raise RemoteProtocolError("it lies in no buffer of this worker")
        region = self._memory.region(handle, self._data[row], span(type_, ne, nb))
        held = region.allocation
        if held.owner is not self._owner:
            raise RemoteProtocolError("it lies on another device than the graph runs on")
        if type_.row_bytes(ne[0]) * ne[1] * ne[2] * ne[3] > MAX_OVERLAP * held.size:
            raise RemoteProtocolError(f"it has more elements than its buffer of {held.size} bytes can hold")
        if not type_.quantized and region.offset % type_.type_size:
            raise RemoteProtocolError(f"offset {region.offset} is not a multiple of {type_.type_size} bytes")
        self.handles.add(handle)
        self._operands[row] = operand = Operand(type_, ne, nb, held.buffer, region.offset)
        return operand

    def _name(self, row: int) -> str:
        raw: bytes = self._table["name"][row].tobytes()
        return raw.split(b"\0", 1)[0].decode(errors="replace")

    def _label(self, row: int) -> str:
        op, type_ = _OPS.get(self._op[row]), TYPES.get(self._type[row])
        operation = op.name if op is not None else f"op {self._op[row]}"
        return f"{self._name(row)!r} {operation} {type_.name if type_ else f'type {self._type[row]}'} {self._ne[row]}"


_OPS = {int(op): op for op in Op}
_COMPUTE = int(TensorFlag.COMPUTE)


def _shape(values: list[int]) -> Shape:
    return values[0], values[1], values[2], values[3]


def _as_read(op: Op, src: tuple[Operand | None, ...]) -> tuple[Operand | None, ...]:
    """Sources as ggml's kernels read them: SUM takes neighbours in memory for a row, also of a transposed tensor."""
    x = src[0] if src else None
    if op is not Op.SUM or x is None or x.nb[0] <= x.type.type_size:
        return src
    return replace(x, nb=(x.type.type_size, *x.nb[1:])), *src[1:]


@dataclass(slots=True)
class _Kept:
    """A program under its uid, or why it is gone."""

    program: Program | None
    handles: frozenset[int]
    nodes: int
    dead: str = ""


class Programs:
    """Compiled graphs of one device of one session, by uid: unless limited, as many as the client believes we have."""

    def __init__(self, most: int = MAX_GRAPHS) -> None:
        self._most = most
        self._kept: dict[int, _Kept] = {}
        self._alive = 0
        self._nodes = 0

    def __len__(self) -> int:
        """How many could run again."""
        return self._alive

    def keep(self, uid: int, program: Program | None, graph: Graph) -> None:
        """Remember what a graph was compiled to; None means it had nothing to execute."""
        if uid not in self._kept and len(self._kept) >= MAX_GRAPHS:
            self.clear()
        self._drop(uid)
        self._kept[uid] = _Kept(program, graph.handles, len(graph.nodes))
        self._alive += 1
        self._nodes += len(graph.nodes)
        if self._alive > self._most:
            self._bury_first(lambda: self._alive > self._most, f"a client may have {self._most} graphs kept")
        if self._nodes > MAX_KEPT_NODES:
            heavy = f"{MAX_KEPT_NODES} nodes were kept already"
            self._bury_first(lambda: self._nodes > MAX_KEPT_NODES and self._alive > 1, heavy)

    def find(self, uid: int) -> Program | None:
        """The program of a graph sent before; raises RemoteProtocolError saying why there is none."""
        kept = self._kept.get(uid)
        if kept is None:
            raise RemoteProtocolError(f"graph {uid} was never sent")
        if kept.dead:
            raise RemoteProtocolError(f"graph {uid} is gone: {kept.dead}")
        self._kept[uid] = self._kept.pop(uid)
        return kept.program

    def nodes(self, uid: int) -> int:
        """How many nodes a kept graph executes."""
        return self._kept[uid].nodes

    def forget(self, handle: int) -> None:
        """A buffer is freed: programs that touch it, and only those, can never run again."""
        for uid, kept in self._kept.items():
            if handle in kept.handles:
                self._bury(uid, f"buffer {handle}, which it uses, was freed")

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._alive = self._nodes = 0

    def _drop(self, uid: int) -> None:
        kept = self._kept.pop(uid, None)
        if kept is not None and not kept.dead:
            self._alive -= 1
            self._nodes -= kept.nodes

    def _bury_first(self, too_many: Callable[[], bool], why: str) -> None:
        """Bury those that ran longest ago."""
        for uid in list(self._kept):
            if not too_many():
                break
            self._bury(uid, why)

    def _bury(self, uid: int, why: str) -> None:
        kept = self._kept[uid]
        if not kept.dead:
            self._alive -= 1
            self._nodes -= kept.nodes
            self._kept[uid] = _Kept(None, frozenset(), 0, dead=why)
