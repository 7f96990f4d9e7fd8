"""Rules of matrix products and triangular systems (docs/protocol.md sections 6.4 and 6.5)."""

from collections.abc import Callable

from drover.ggml.ops import Op
from drover.ggml.rules.call import FLOATS, INDEX, ONLY_F32, Call, Shaped, divides
from drover.ggml.types import F64, I8, I16, I32, I64

NOT_WEIGHTS = frozenset({I8, I16, I32, I64, F64})


def _mul_mat(call: Call) -> None:
    a, b, dst = _weights(call), call.typed(1, FLOATS), call.result(ONLY_F32)
    call.require(a.ne[0] == b.ne[0], "inner extents differ")
    call.require(dst.ne == (a.ne[1], *b.ne[1:]), "the result is not [rows of src0, rows of src1]")
    call.require(divides(a.ne[2], b.ne[2]) and divides(a.ne[3], b.ne[3]), "matrices do not pair up")


def _mul_mat_id(call: Call) -> None:
    a, b, ids, dst = (_weights(call), call.typed(1, FLOATS), call.typed(2, INDEX), call.result(ONLY_F32))
    call.require(a.ne[0] == b.ne[0], "inner extents differ")
    call.require(a.ne[3] == b.ne[3] == 1 and ids.ne[2:] == (1, 1), "more dimensions than [K,N,E], [K,B,T], [U,T]")
    call.require(dst.ne == (a.ne[1], ids.ne[0], ids.ne[1], 1), "the result is not one row per index")
    call.require(b.ne[2] == ids.ne[1] and divides(b.ne[1], ids.ne[0]), "indices do not fit src1")


def _out_prod(call: Call) -> None:
    a, b, dst = _weights(call), call.typed(1, FLOATS), call.result(ONLY_F32)
    call.require(a.ne[1] == b.ne[1], "inner extents differ")
    call.require(dst.ne == (a.ne[0], b.ne[0], *b.ne[2:]), "the result is not [row of src0, row of src1]")
    call.require(divides(a.ne[2], b.ne[2]) and divides(a.ne[3], b.ne[3]), "matrices do not pair up")


def _solve_tri(call: Call) -> None:
    a, b, dst = call.typed(0, ONLY_F32), call.typed(1, ONLY_F32), call.result(ONLY_F32)
    call.require(a.ne[0] == a.ne[1] == b.ne[1] and a.ne[2:] == b.ne[2:], "not a square system and its right side")
    call.same_shape(b, dst)


def _weights(call: Call) -> Shaped:
    a = call.source(0)
    call.require(a.type not in NOT_WEIGHTS, "src0 has a type this operation does not read")
    return a


RULES: dict[Op, Callable[[Call], None]] = {
    Op.MUL_MAT: _mul_mat,
    Op.MUL_MAT_ID: _mul_mat_id,
    Op.OUT_PROD: _out_prod,
    Op.SOLVE_TRI: _solve_tri,
}
