"""Rules of operations on elements and on rows: arithmetic, functions, gates, norms, the softmax, sums, norms of
groups, triangular systems."""

from collections.abc import Callable
from math import floor, log2

from drover.ggml.ops import Op, float_params, int_params
from drover.worker.devices.cpu import elementwise, norm, record, reductions
from drover.worker.devices.cpu.draft import (
    FLOATS,
    SOLO_ELEMENTS,
    Draft,
    apart,
    bits,
    first,
    in_place,
    parameters,
    rows_of_f32,
    source,
)
from drover.worker.devices.device import Node


def _binary(kind: int) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        a, b = node.src[0], source(node, 1)
        if a is None or b is None or not {a.type.id, b.type.id, node.dst.type.id} <= FLOATS:
            return None
        return Draft(record.BINARY, parameters(kind))

    return rule


def _function(kind: int | None, *floats: int) -> Callable[[Node, int], Draft | None]:
    """A rule for a function of one tensor; `floats` are the numbers of its float parameters."""

    def rule(node: Node, threads: int) -> Draft | None:
        if not {first(node).type.id, node.dst.type.id} <= FLOATS:
            return None
        number = int_params(node.params)[0] if kind is None else kind
        values = float_params(node.params)
        return Draft(record.UNARY, parameters(number, *(bits(values[i]) for i in floats)))

    return rule


def _glu(node: Node, threads: int) -> Draft | None:
    a, b = first(node), source(node, 1)
    if not {a.type.id, node.dst.type.id} <= FLOATS or (b is not None and b.type.id != a.type.id):
        return None
    ints, floats = int_params(node.params), float_params(node.params)
    return Draft(record.GLU, parameters(ints[0], ints[1], bits(floats[2]), bits(floats[3])))


def _norm(kind: int) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        if not (rows_of_f32(first(node)) and rows_of_f32(node.dst)):
            return None
        return Draft(record.NORM, parameters(kind, bits(float_params(node.params)[0])))

    return rule


def _sum_rows(mean: int) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        if not (rows_of_f32(first(node)) and node.dst.type.id == record.F32):
            return None
        return Draft(record.SUM_ROWS, parameters(mean))

    return rule


def _cumsum(node: Node, threads: int) -> Draft | None:
    if not (rows_of_f32(first(node)) and rows_of_f32(node.dst) and (in_place(node) or apart(node))):
        return None
    return Draft(record.CUMSUM)


def _sum(node: Node, threads: int) -> Draft | None:
    if not {first(node).type.id, node.dst.type.id} <= FLOATS or not apart(node):
        return None
    return Draft(record.TOTAL, parameters(0), shared=reductions.PARTS * reductions.PART_BYTES)


def _count_equal(node: Node, threads: int) -> Draft | None:
    if not apart(node):
        return None
    return Draft(record.TOTAL, parameters(1), shared=reductions.PARTS * reductions.PART_BYTES)


def _group_norm(node: Node, threads: int) -> Draft | None:
    if not (rows_of_f32(first(node)) and rows_of_f32(node.dst) and (in_place(node) or apart(node))):
        return None
    return Draft(record.GROUP_NORM, parameters(int_params(node.params)[0], bits(float_params(node.params)[1])))


def _solve_tri(node: Node, threads: int) -> Draft | None:
    b = source(node, 1)
    if b is None or not (rows_of_f32(first(node)) and rows_of_f32(b) and rows_of_f32(node.dst)):
        return None
    if not apart(node, 0) or not (in_place(node, 1) or apart(node, 1)):
        return None
    return Draft(record.SOLVE_TRI, small=first(node).elements * b.ne[0] <= SOLO_ELEMENTS)


def slopes(heads: int, max_bias: float) -> dict[int, int]:
    """Parameters 1 to 3 for `norm.head_slope`."""
    if max_bias == 0.0:
        return {record.PARAMS + 1: 0, record.PARAMS + 2: 0, record.PARAMS + 3: 0}
    few = 1 << floor(log2(heads))
    base, base_odd = 2.0 ** (-max_bias / few), 2.0 ** (-max_bias / 2.0 / few)
    return {record.PARAMS + 1: bits(base), record.PARAMS + 2: bits(base_odd), record.PARAMS + 3: few}


def _soft_max(node: Node, threads: int) -> Draft | None:
    x, mask = first(node), source(node, 1)
    if not (rows_of_f32(x) and rows_of_f32(node.dst)):
        return None
    if mask is not None and not (mask.type.id in FLOATS and mask.nb[0] == mask.type.type_size):
        return None
    scale, max_bias = float_params(node.params)[:2]
    words = {record.PARAMS: bits(scale), **slopes(x.ne[2], max_bias if mask is not None else 0.0)}
    return Draft(record.SOFT_MAX, words, small=x.elements <= SOLO_ELEMENTS // 4)


RULES: dict[Op, Callable[[Node, int], Draft | None]] = {
    Op.ADD: _binary(elementwise.ADD),
    Op.SUB: _binary(elementwise.SUB),
    Op.MUL: _binary(elementwise.MUL),
    Op.DIV: _binary(elementwise.DIV),
    Op.UNARY: _function(None, 1, 2, 3, 4),
    Op.SQR: _function(elementwise.SQR),
    Op.SQRT: _function(elementwise.SQRT),
    Op.LOG: _function(elementwise.LOG),
    Op.SIN: _function(elementwise.SIN),
    Op.COS: _function(elementwise.COS),
    Op.SCALE: _function(elementwise.SCALE, 0, 1),
    Op.CLAMP: _function(elementwise.CLAMP, 0, 1),
    Op.LEAKY_RELU: _function(elementwise.LEAKY_RELU, 0),
    Op.FILL: _function(elementwise.FILL, 0),
    Op.GLU: _glu,
    Op.NORM: _norm(norm.MEAN_AND_VARIANCE),
    Op.RMS_NORM: _norm(norm.RMS),
    Op.L2_NORM: _norm(norm.L2),
    Op.SUM_ROWS: _sum_rows(0),
    Op.MEAN: _sum_rows(1),
    Op.SOFT_MAX: _soft_max,
    Op.CUMSUM: _cumsum,
    Op.SUM: _sum,
    Op.COUNT_EQUAL: _count_equal,
    Op.GROUP_NORM: _group_norm,
    Op.SOLVE_TRI: _solve_tri,
}
