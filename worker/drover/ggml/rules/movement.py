"""Rules of the operations that move, gather, join and fill (docs/protocol.md section 6.3)."""

from collections.abc import Callable

from drover.ggml.ops import Op, Tri
from drover.ggml.rules.call import FLOATS, INDEX, Call, contiguous, divides, elements, repeats
from drover.ggml.tensor import span
from drover.ggml.types import F16, F32, I32, I64

WIDE_INDEX = frozenset({I32, I64})


def _copy(call: Call) -> None:
    """Element counts agree; any type converts to any (src1 of CPY is the result's memory, or the node itself)."""
    call.require(elements(call.source(0)) == elements(call.dst), "element counts differ")


def _concat(call: Call) -> None:
    a, b, axis = call.source(0), call.source(1), call.ints[0]
    call.require(0 <= axis <= 3, f"no dimension {axis}")
    call.require(a.type == b.type == call.dst.type, "types differ")
    for k in range(4):
        joined = a.ne[k] + b.ne[k] if k == axis else a.ne[k]
        fits = joined == call.dst.ne[k] and (k == axis or a.ne[k] == b.ne[k])
        call.require(fits, f"dimension {k} does not fit a join along dimension {axis}")


def _repeat(call: Call) -> None:
    a = call.source(0)
    call.require(a.type == call.dst.type and not a.type.quantized, "types differ or are quantised")
    call.require(repeats(a.ne, call.dst.ne), "the result is not a whole number of tiles")


def _repeat_back(call: Call) -> None:
    a = call.typed(0, FLOATS)
    call.result(FLOATS)
    call.require(repeats(call.dst.ne, a.ne), "src0 is not a whole number of tiles")


def _get_rows(call: Call) -> None:
    a, ids, dst = call.source(0), call.typed(1, INDEX), call.dst
    wanted = (a.ne[0], ids.ne[0], ids.ne[1], ids.ne[2])
    call.require(dst.ne == wanted and ids.ne[3] == 1, "the result is not one row per index")
    call.require(a.ne[2:] == ids.ne[1:3], "rows and indices have different outer extents")
    call.require(dst.type == (I32 if a.type == I32 else F32), "the result must be F32, or I32 for I32 rows")


def _set_rows(call: Call) -> None:
    rows, ids, dst = call.typed(0, FLOATS), call.typed(1, WIDE_INDEX), call.dst
    call.require(rows.ne[0] == dst.ne[0] and rows.ne[2:] == dst.ne[2:], "rows do not fit the result")
    call.require(rows.ne[1] == ids.ne[0] and ids.ne[3] == 1, "rows and indices differ in number")
    if elements(rows):
        fits = divides(ids.ne[1], rows.ne[2]) and divides(ids.ne[2], rows.ne[3])
        call.require(fits, "indices do not repeat over the rows")
    call.require(dst.type not in (I32, I64), "cannot store rows as integers")


def _pad(call: Call) -> None:
    a, pads = call.source(0), call.ints[:8]
    call.require(a.type == call.dst.type and not a.type.quantized, "types differ or are quantised")
    call.require(min(pads) >= 0, "negative padding")
    fits = all(call.dst.ne[k] == a.ne[k] + pads[2 * k] + pads[2 * k + 1] for k in range(4))
    call.require(fits, "the result is not src0 and its padding")
    call.require(call.ints[8] == 0 or elements(a) > 0, "nothing to wrap around")


def _pad_reflect(call: Call) -> None:
    a, (left, right) = call.typed(0, FLOATS), call.ints[:2]
    call.require(0 <= left < a.ne[0] and 0 <= right < a.ne[0], "padding reaches beyond the mirrored row")
    call.require(call.dst.ne == (a.ne[0] + left + right, *a.ne[1:]), "the result is not src0 and its padding")
    call.require(call.dst.type == a.type, "types differ")


def _same(call: Call) -> None:
    """One source of the result's shape and type."""
    a = call.typed(0, FLOATS)
    call.same_shape(a, call.dst)
    call.require(a.type == call.dst.type, "types differ")


def _window(call: Call) -> None:
    """SET and ACC: src1, laid with the strides of the parameters, stays inside the result."""
    a, b, dst = call.source(0), call.source(1), call.dst
    call.require(a.type == b.type == dst.type and not a.type.quantized, "types differ or are quantised")
    call.same_shape(a, dst)
    call.require(contiguous(dst), "the result has gaps")
    strides, offset = call.ints[:3], call.ints[3]
    call.require(min(strides) >= 0 and offset >= 0, "negative window")
    size = dst.type.type_size
    call.require(all(s % size == 0 for s in (*strides, offset)), "the window splits elements")
    reach = span(dst.type, b.ne, (size, strides[0], strides[1], strides[2]))
    call.require(offset + reach <= span(dst.type, dst.ne, dst.nb), "the window leaves the result")


def _acc(call: Call) -> None:
    call.typed(0, FLOATS)
    _window(call)


def _arange(call: Call) -> None:
    call.result(frozenset({F32}))
    call.require(call.dst.ne[1:] == (1, 1, 1), "the result is not one row")


def _fill(call: Call) -> None:
    call.result(FLOATS)


def _tri(call: Call) -> None:
    call.require(call.ints[0] in tuple(Tri), f"no triangle {call.ints[0]}")
    _same(call)


def _diag(call: Call) -> None:
    a = call.typed(0, FLOATS)
    call.require(a.ne[1] == 1 and call.dst.ne == (a.ne[0], a.ne[0], a.ne[2], a.ne[3]), "not a diagonal and its matrix")
    call.require(call.dst.type == a.type, "types differ")


def _diag_mask(call: Call) -> None:
    call.require(call.ints[0] >= 0, "negative n_past")
    _same(call)


def _rel_pos(call: Call) -> None:
    a, dst = call.source(0), call.dst
    call.require(a.type == dst.type and a.type in (F16, F32), "types differ or are not floats")
    fits = dst.ne == (a.ne[0], dst.ne[1], dst.ne[1], 1) and a.ne[1:] == (2 * dst.ne[1] - 1, 1, 1)
    call.require(fits, "not [n,k,k] out of [n,2k-1]")


RULES: dict[Op, Callable[[Call], None]] = {
    Op.DUP: _copy,
    Op.CPY: _copy,
    Op.CONT: _copy,
    Op.CONCAT: _concat,
    Op.REPEAT: _repeat,
    Op.REPEAT_BACK: _repeat_back,
    Op.GET_ROWS: _get_rows,
    Op.SET_ROWS: _set_rows,
    Op.PAD: _pad,
    Op.PAD_REFLECT_1D: _pad_reflect,
    Op.ROLL: _same,
    Op.SET: _window,
    Op.ACC: _acc,
    Op.ARANGE: _arange,
    Op.FILL: _fill,
    Op.TRI: _tri,
    Op.DIAG: _diag,
    Op.DIAG_MASK_INF: _diag_mask,
    Op.DIAG_MASK_ZERO: _diag_mask,
    Op.GET_REL_POS: _rel_pos,
}
