"""Rules of the operations that only training sends (docs/protocol.md section 6.8)."""

from collections.abc import Callable

from drover.ggml.ops import Op
from drover.ggml.rules.call import FLOATS, INDEX, ONLY_F32, Call, elements

ADAMW_PARAMETERS = 7
SGD_PARAMETERS = 2


def _pair(call: Call) -> None:
    """Two sources of the result's shape."""
    call.same_shape(call.typed(0, ONLY_F32), call.result(ONLY_F32))
    call.same_shape(call.typed(1, ONLY_F32), call.dst)


def _get_rows_back(call: Call) -> None:
    rows, ids, dst = call.typed(0, FLOATS), call.typed(1, INDEX), call.result(ONLY_F32)
    fits = rows.ne[0] == dst.ne[0] and rows.ne[1] >= elements(ids) and rows.ne[2:] == (1, 1)
    call.require(fits, "not one row for each index")
    call.require(dst.ne[2:] == ids.ne[2:] == (1, 1) and ids.ne[1] == 1, "indices or result have more dimensions")


def _loss_back(call: Call) -> None:
    call.require(elements(call.typed(0, ONLY_F32)) == 1, "src0 is not one number")
    call.same_shape(call.typed(1, ONLY_F32), call.typed(2, ONLY_F32))
    call.same_shape(call.source(1), call.result(ONLY_F32))


def _step(moments: int, parameters: int) -> Callable[[Call], None]:
    """Weights (the result's memory), their gradient, so many moments, and the parameters of the step."""

    def rule(call: Call) -> None:
        for i in range(2 + moments):
            call.same_shape(call.typed(i, ONLY_F32), call.result(ONLY_F32))
        call.require(elements(call.typed(2 + moments, ONLY_F32)) == parameters, f"not {parameters} parameters")

    return rule


RULES: dict[Op, Callable[[Call], None]] = {
    **dict.fromkeys((Op.SILU_BACK, Op.RMS_NORM_BACK, Op.SOFT_MAX_BACK), _pair),
    Op.GET_ROWS_BACK: _get_rows_back,
    Op.CROSS_ENTROPY_LOSS_BACK: _loss_back,
    Op.OPT_STEP_ADAMW: _step(2, ADAMW_PARAMETERS),
    Op.OPT_STEP_SGD: _step(0, SGD_PARAMETERS),
}
