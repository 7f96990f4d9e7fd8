"""Where the time of a client's graphs went: by operation, types and shapes, beside what the device can do at most."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from drover.ggml.ops import Glu, Op, Unary, int_params
from drover.ggml.rules.call import elements, storage
from drover.worker.devices.device import Ceiling, Node, Operand, Timing

_ROWS = 40
_WIDTH = 160
_NAMED: dict[Op, type[Unary] | type[Glu]] = {Op.UNARY: Unary, Op.GLU: Glu}
_PARTLY_READ = frozenset((Op.GET_ROWS, Op.SET_ROWS, Op.CPY, Op.CONT, Op.DUP))
"""Operations that move no more than their result, or what goes into it; the rest of an operand is not touched."""

Kind = tuple[str, str, str]
"""Operation, types and shapes, in words."""


@dataclass(slots=True)
class Spent:
    """What nodes of one kind took: how many there were, seconds, bytes moved, additions and multiplications."""

    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    operations: int = 0


class Profile:
    """The timings of one client, added up."""

    def __init__(self, ceilings: Sequence[Ceiling]) -> None:
        self._ceilings = ceilings
        self._graphs = 0
        self.spent: dict[Kind, Spent] = {}

    def add(self, timings: Sequence[Timing]) -> None:
        """The nodes of a graph that has run."""
        self._graphs += 1
        for timing in timings:
            spent = self.spent.setdefault(kind_of(timing.node), Spent())
            spent.calls += 1
            spent.seconds += timing.seconds
            spent.bytes += moved(timing.node)
            spent.operations += operations(timing.node)

    def report(self, peer: str) -> None:
        """A table to standard output, what took longest first; nothing if nothing was computed."""
        if not self.spent:
            return
        total = sum(spent.seconds for spent in self.spent.values())
        print(f"client {peer}: {self._graphs} graphs, {total:.3f} s")
        for ceiling in self._ceilings:
            print(f"  the device at most: {ceiling.what} {ceiling.rate / 1e9:.1f} G{ceiling.unit}")
        table = Table(box=box.SIMPLE)
        for heading in ("seconds", "%", "calls", "µs", "operation", "types", "shapes", "GB/s", "GFLOP/s"):
            table.add_column(heading, justify="left" if heading in ("operation", "types", "shapes") else "right")
        ranked = sorted(self.spent.items(), key=lambda item: -item[1].seconds)
        for kind, spent in ranked[:_ROWS]:
            table.add_row(*_cells(kind, spent, total))
        if rest := [spent for _, spent in ranked[_ROWS:]]:
            others = Spent(sum(spent.calls for spent in rest), sum(spent.seconds for spent in rest))
            table.add_row(*_cells((f"{len(rest)} more kinds", "", ""), others, total))
        Console(width=_WIDTH).print(table)


def kind_of(node: Node) -> Kind:
    """A node in words."""
    names = _NAMED.get(node.op)
    name = node.op.name if names is None else names(int_params(node.params)[0]).name
    operands = [operand for operand in node.src if operand is not None]
    types = f"{' '.join(x.type.name for x in operands)} -> {node.dst.type.name}"
    return name, types, f"{' '.join(map(_shape, operands))} -> {_shape(node.dst)}"


def moved(node: Node) -> int:
    """Bytes that a node has to read and write, every element once."""
    written = storage(node.dst)
    if node.op == Op.SET_ROWS:
        return 2 * _size(node, 0)
    if node.op in _PARTLY_READ:
        return 2 * written
    sizes = [_size(node, i) for i in range(len(node.src))]
    if node.op == Op.MUL_MAT_ID:
        sizes[0] = sizes[0] * _experts(node) // max(1, _ne(node, 0)[2])
    return sum(sizes) + written


def operations(node: Node) -> int:
    """Additions and multiplications of a product; 0 for everything that is bound by memory."""
    if node.op in (Op.MUL_MAT, Op.MUL_MAT_ID):
        return 2 * _ne(node, 0)[0] * elements(node.dst)
    if node.op == Op.FLASH_ATTN_EXT:
        query, keys, values = _ne(node, 0), _ne(node, 1), _ne(node, 2)
        return 2 * query[1] * query[2] * query[3] * keys[1] * (query[0] + values[0])
    return 0


def _experts(node: Node) -> int:
    """How many experts a product reads at most."""
    ids = _ne(node, 2)
    return min(_ne(node, 0)[2], ids[0] * ids[1])


def _ne(node: Node, index: int) -> tuple[int, ...]:
    source = node.src[index]
    assert source is not None
    return source.ne


def _size(node: Node, index: int) -> int:
    source = node.src[index]
    return 0 if source is None else storage(source)


def _shape(operand: Operand) -> str:
    last = max((i for i, n in enumerate(operand.ne) if n != 1), default=0)
    return "x".join(map(str, operand.ne[: last + 1]))


def _cells(kind: Kind, spent: Spent, total: float) -> list[str]:
    seconds = spent.seconds or float("inf")
    return [
        f"{spent.seconds:.4f}",
        f"{100 * spent.seconds / (total or 1):.1f}",
        str(spent.calls),
        f"{1e6 * spent.seconds / spent.calls:.1f}",
        *kind,
        f"{spent.bytes / seconds / 1e9:.1f}" if spent.bytes else "",
        f"{spent.operations / seconds / 1e9:.1f}" if spent.operations else "",
    ]
