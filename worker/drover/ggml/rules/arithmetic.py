"""Rules of element-wise operations, reductions, orderings and norms (docs/protocol.md section 6.4)."""

from collections.abc import Callable

from drover.ggml.ops import Glu, Op, SortOrder, Unary
from drover.ggml.rules.call import FLOATS, INDEX, ONLY_F32, Call, elements, repeats
from drover.ggml.types import I64


def _binary(call: Call) -> None:
    """src1 repeats into src0; a quantised src0 keeps its type (weights with an adapter added)."""
    a, b = call.source(0), call.typed(1, FLOATS)
    if a.type.quantized:
        call.require(call.dst.type in (a.type, *FLOATS), "a quantised src0 cannot become this type")
    else:
        call.typed(0, FLOATS)
        call.result(FLOATS)
    call.same_shape(a, call.dst)
    call.require(repeats(b.ne, a.ne), "src1 does not repeat into src0")


def _add_id(call: Call) -> None:
    a, b, ids = call.typed(0, ONLY_F32), call.typed(1, ONLY_F32), call.typed(2, INDEX)
    call.result(ONLY_F32)
    call.same_shape(a, call.dst)
    call.require(b.ne == (a.ne[0], b.ne[1], 1, 1), "src1 is not a list of rows like src0's")
    call.require(ids.ne == (a.ne[1], a.ne[2], a.ne[3], 1), "not one index per row")


def _add1(call: Call) -> None:
    call.require(elements(call.typed(1, FLOATS)) == 1, "src1 is not one number")
    _map(call)


def _map(call: Call) -> None:
    """One source of the result's shape."""
    call.same_shape(call.typed(0, FLOATS), call.result(FLOATS))


def _map_f32(call: Call) -> None:
    call.same_shape(call.typed(0, ONLY_F32), call.result(ONLY_F32))


def _unary(call: Call) -> None:
    call.require(call.ints[0] in tuple(Unary), f"no function {call.ints[0]}")
    _map(call)


def _glu(call: Call) -> None:
    call.require(call.ints[0] in tuple(Glu), f"no gate {call.ints[0]}")
    a, b = call.typed(0, FLOATS), call.optional(1)
    call.result(FLOATS)
    if b is not None:
        call.typed(1, FLOATS)
        call.same_shape(a, b)
        call.same_shape(a, call.dst)
        return
    call.require(call.dst.ne == (a.ne[0] // 2, *a.ne[1:]), "the result is not half of src0")


def _sum(call: Call) -> None:
    call.typed(0, FLOATS)
    call.require(elements(call.result(FLOATS)) == 1, "the result is not one number")


def _per_row(call: Call) -> None:
    a = call.typed(0, FLOATS)
    call.require(call.result(FLOATS).ne == (1, *a.ne[1:]), "the result is not one number per row")


def _argmax(call: Call) -> None:
    a = call.typed(0, FLOATS)
    call.require(a.ne[0] > 0, "an empty row has no maximum")
    call.require(call.result(INDEX).ne == (a.ne[1], a.ne[2], a.ne[3], 1), "the result is not one index per row")


def _argsort(call: Call) -> None:
    call.require(call.ints[0] in tuple(SortOrder), f"no order {call.ints[0]}")
    call.same_shape(call.typed(0, ONLY_F32), call.result(INDEX))


def _top_k(call: Call) -> None:
    a, dst = call.typed(0, ONLY_F32), call.result(INDEX)
    call.require(dst.ne[0] <= a.ne[0] and dst.ne[1:] == a.ne[1:], "the result is not a part of each row")


def _count_equal(call: Call) -> None:
    call.same_shape(call.typed(0, INDEX), call.typed(1, INDEX))
    call.require(call.dst.type == I64 and elements(call.dst) == 1, "the result is not one I64")


def _group_norm(call: Call) -> None:
    call.require(call.ints[0] > 0, "no groups")
    _map_f32(call)


def _loss(call: Call) -> None:
    call.same_shape(call.typed(0, ONLY_F32), call.typed(1, ONLY_F32))
    call.require(elements(call.source(0)) > 0, "nothing to average")
    call.require(elements(call.result(ONLY_F32)) == 1, "the result is not one number")


RULES: dict[Op, Callable[[Call], None]] = {
    **dict.fromkeys((Op.ADD, Op.SUB, Op.MUL, Op.DIV), _binary),
    **dict.fromkeys((Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS, Op.SCALE, Op.CLAMP, Op.LEAKY_RELU), _map),
    **dict.fromkeys((Op.NORM, Op.RMS_NORM, Op.L2_NORM, Op.CUMSUM), _map_f32),
    Op.ADD_ID: _add_id,
    Op.ADD1: _add1,
    Op.UNARY: _unary,
    Op.GLU: _glu,
    Op.SUM: _sum,
    Op.SUM_ROWS: _per_row,
    Op.MEAN: _per_row,
    Op.ARGMAX: _argmax,
    Op.ARGSORT: _argsort,
    Op.TOP_K: _top_k,
    Op.COUNT_EQUAL: _count_equal,
    Op.GROUP_NORM: _group_norm,
    Op.CROSS_ENTROPY_LOSS: _loss,
}
