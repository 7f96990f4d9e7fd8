"""Rules of attention and position encoding (docs/protocol.md section 6.6)."""

from collections.abc import Callable

from drover.ggml.ops import Op, RopeMode
from drover.ggml.rules.call import INDEX, ONLY_F32, Call, divides
from drover.ggml.tensor import Shape
from drover.ggml.types import F16, F32, F64, I8, I16, I32, I64

MASK = frozenset({F16, F32})
NOT_CACHE = frozenset({I8, I16, I32, I64, F64})
MULTI_AXIS = 8
"""Bit of a rope mode: four position planes instead of one."""


def _soft_max(call: Call) -> None:
    x = call.typed(0, ONLY_F32)
    call.same_shape(x, call.result(ONLY_F32))
    _mask(call, 1, x.ne)
    _sinks(call, 2, x.ne[2])


def _flash_attn(call: Call) -> None:
    q, k, v, dst = (call.typed(0, ONLY_F32), call.source(1), call.source(2), call.result(ONLY_F32))
    call.require(k.type not in NOT_CACHE and v.type not in NOT_CACHE, "keys or values have a type attention lacks")
    head, n, heads, streams = q.ne
    call.require(k.ne[0] == head and k.ne[1] == v.ne[1], "queries, keys and values do not fit together")
    call.require(dst.ne == (v.ne[0], heads, n, streams), "the result is not [value, heads, tokens, streams]")
    for cache in (k, v):
        grouped = divides(cache.ne[2], heads) and divides(cache.ne[3], streams)
        call.require(grouped, "heads or streams do not share keys and values evenly")
    _mask(call, 3, (k.ne[1], n, heads, streams))
    _sinks(call, 4, heads)


def _mask(call: Call, index: int, logits: Shape) -> None:
    """An optional mask covers logits [cells, tokens, heads, streams]; it may have more rows than there are tokens."""
    if call.optional(index) is None:
        return
    mask = call.typed(index, MASK)
    call.require(mask.ne[0] == logits[0] and mask.ne[1] >= logits[1], "the mask is smaller than the logits")
    fits = divides(mask.ne[2], logits[2]) and divides(mask.ne[3], logits[3])
    call.require(fits, "the mask does not repeat over heads or streams")


def _sinks(call: Call, index: int, heads: int) -> None:
    """Optional sinks: one F32 per head."""
    if call.optional(index) is not None:
        call.require(call.typed(index, ONLY_F32).ne == (heads, 1, 1, 1), "not one sink per head")


def _rope(call: Call) -> None:
    x, positions = call.typed(0, MASK), call.typed(1, INDEX)
    call.same_shape(x, call.result(MASK))
    call.require(x.type == call.dst.type, "types differ")
    n_dims, mode, first = call.ints[1], call.ints[2], call.ints[15]
    call.require(mode in tuple(RopeMode), f"no mode {mode}")
    call.require(n_dims > 0 and n_dims % 2 == 0, f"n_dims {n_dims} is not a positive even number")
    pairs, end = n_dims // 2, first + n_dims
    if mode == RopeMode.VISION:
        pairs, end = n_dims, 2 * n_dims
        call.require(end == x.ne[0] and first == 0, f"n_dims {n_dims} is not half a row")
    call.require(first >= 0 and end <= x.ne[0], f"{n_dims} channels from {first} do not fit a row")
    planes = 4 if mode & MULTI_AXIS else 1
    call.require(positions.ne == (x.ne[2] * planes, 1, 1, 1), f"not {planes} positions per token")
    if planes == 4:
        sections = call.ints[11:15]
        call.require(min(sections) >= 0 and sum(sections) > 0, f"bad sections {list(sections)}")
    if call.optional(2) is not None:
        factors = call.typed(2, ONLY_F32)
        call.require(factors.ne[0] >= pairs and factors.ne[1:] == (1, 1, 1), "too few frequency factors")


RULES: dict[Op, Callable[[Call], None]] = {
    Op.SOFT_MAX: _soft_max,
    Op.FLASH_ATTN_EXT: _flash_attn,
    Op.ROPE: _rope,
    Op.ROPE_BACK: _rope,
}
