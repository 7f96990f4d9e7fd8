"""Rules of state-space, linear-attention and other architecture-bound operations (docs/protocol.md section 6.7)."""

from collections.abc import Callable

from drover.ggml.ops import Op
from drover.ggml.rules.call import FLOATS, INDEX, ONLY_F32, Call, Shaped, contiguous, divides, elements

MAX_ITERATIONS = 1 << 16
HC = 4
"""Streams of a hyper-connection."""


def _ssm_conv(call: Call) -> None:
    x, w, dst = call.typed(0, ONLY_F32), call.typed(1, ONLY_F32), call.result(ONLY_F32)
    taps, channels = w.ne[0], w.ne[1]
    call.require(
        w.ne[2:] == (1, 1) and x.ne[3] == 1, "more dimensions than [time, channels, sequences], [taps, channels]"
    )
    call.require(taps > 0 and x.ne[1] == channels, "channels differ")
    call.require(
        dst.ne == (channels, x.ne[0] - taps + 1, x.ne[2], 1), "the result is not [channels, tokens, sequences]"
    )


def _ssm_scan(call: Call) -> None:
    state, x, dt, a, b, c = (call.typed(i, ONLY_F32) for i in range(6))
    ids, dst = call.typed(6, INDEX), call.result(ONLY_F32)
    n, dim, heads, _ = state.ne
    tokens, sequences = x.ne[2], x.ne[3]
    call.require(x.ne[:2] == (dim, heads), "the input does not fit the state")
    call.require(dt.ne == (heads, tokens, sequences, 1), "not one step per head and token")
    call.require(a.ne in ((1, heads, 1, 1), (n, heads, 1, 1)), "not one decay per head")
    call.require(b.ne == c.ne == (n, b.ne[1], tokens, sequences), "B and C do not fit the state")
    call.require(divides(b.ne[1], heads), "heads do not share B and C evenly")
    call.require(ids.ne == (sequences, 1, 1, 1), "not one state per sequence")
    blocks = call.ints[0]
    call.require(blocks >= 0, "negative number of states")
    _length(call, dst, elements(x) + blocks * n * dim * heads * sequences)


def _gated_delta_net(call: Call) -> None:
    q, k, v, g, beta, state = (call.typed(i, ONLY_F32) for i in range(6))
    dst = call.result(ONLY_F32)
    size, heads, tokens, batch = v.ne
    call.same_shape(q, k)
    call.require(q.ne[0] == size and q.ne[2] == tokens and q.ne[1] > 0, "queries and values do not fit together")
    call.require(divides(q.ne[3], batch), "queries do not repeat over the batch")
    call.require(g.ne[0] in (1, size) and g.ne[1:] == v.ne[1:], "not one gate per head or channel")
    call.require(beta.ne == (1, *v.ne[1:]), "not one beta per head")
    call.require(elements(state) == size * size * heads * batch, "the state is not one matrix per head")
    snapshots = call.ints[0]
    call.require(snapshots >= 0, "negative number of snapshots")
    _length(call, dst, elements(v) + snapshots * elements(state))


def _linear_attention(inputs: tuple[int, ...], state_index: int, bonus: int | None = None) -> Callable[[Call], None]:
    """A rule for [size, heads, tokens] inputs, a state of one matrix per head and sequence, maybe a per-head vector."""

    def rule(call: Call) -> None:
        first, state, dst = (call.typed(inputs[0], ONLY_F32), call.typed(state_index, ONLY_F32), call.result(ONLY_F32))
        size, heads, tokens, _ = first.ne
        for index in inputs:
            call.require(call.typed(index, ONLY_F32).ne == (size, heads, tokens, 1), "inputs differ in shape")
        if bonus is not None:
            call.require(elements(call.typed(bonus, ONLY_F32)) == size * heads, "not one vector per head")
        matrices = size * size * heads
        call.require(divides(matrices, elements(state)), "the state is not one matrix per head and sequence")
        call.require(divides(elements(state) // matrices, tokens), "tokens are not shared evenly by the sequences")
        _length(call, dst, elements(first) + elements(state))

    return rule


def _length(call: Call, dst: Shaped, count: int) -> None:
    """The result is a plain run of outputs and states."""
    call.require(elements(dst) == count and contiguous(dst), f"the result is not {count} numbers without gaps")


def _indexer(call: Call) -> None:
    q, k, w, mask, dst = (call.typed(0, ONLY_F32), call.source(1), call.typed(2, ONLY_F32), call.source(3), call.dst)
    size, heads, tokens, streams = q.ne
    cells = k.ne[2]
    call.require(k.ne == (size, 1, cells, streams), "queries and keys do not fit together")
    call.require(w.ne == (heads, tokens, 1, streams), "not one weight per head and token")
    fits = mask.ne[:3] == (cells, tokens, 1) and divides(mask.ne[3], streams)
    call.require(mask.type in FLOATS and fits, "the mask does not fit the scores")
    call.require(call.result(ONLY_F32).ne == (cells, tokens, 1, streams) and dst.ne[2] == 1, "not one score per cell")


def _hc_pre(call: Call) -> None:
    x, w, dst = call.typed(0, ONLY_F32), call.typed(1, ONLY_F32), call.result(ONLY_F32)
    size, streams, tokens, _ = x.ne
    wanted = x.ne if call.ints[1] else (streams, tokens, 1, 1)
    call.require(x.ne[3] == 1 and w.ne == wanted, "weights do not fit the streams")
    call.require(dst.ne == (size, tokens, 1, 1), "the result is not [channels, tokens]")


def _hc_post(call: Call) -> None:
    x, r, p = (call.typed(i, ONLY_F32) for i in range(3))
    size, streams, tokens, _ = r.ne
    call.require(x.ne == (size, tokens, 1, 1) and r.ne[3] == 1, "input and streams do not fit together")
    call.require(p.ne == (streams, tokens, 1, 1), "not one weight per stream and token")
    if call.optional(3) is not None:
        call.require(call.typed(3, ONLY_F32).ne == (streams, streams, tokens, 1), "not one matrix per token")
    call.same_shape(r, call.result(ONLY_F32))


def _hc_comb(call: Call) -> None:
    mix, scales, bias, dst = (call.typed(0, ONLY_F32), call.typed(1, ONLY_F32), call.typed(2, ONLY_F32), call.dst)
    width = 2 * HC + HC * HC
    call.require(mix.ne[0] == width and elements(scales) == 3 and elements(bias) == width, "not 24 numbers per token")
    call.require(elements(call.result(ONLY_F32)) == HC * HC * mix.ne[1] * mix.ne[2] * mix.ne[3], "not 4 x 4 per token")
    call.require(contiguous(dst), "the result has gaps")
    call.require(0 <= call.ints[1] <= MAX_ITERATIONS, f"{call.ints[1]} iterations")


RULES: dict[Op, Callable[[Call], None]] = {
    Op.SSM_CONV: _ssm_conv,
    Op.SSM_SCAN: _ssm_scan,
    Op.GATED_DELTA_NET: _gated_delta_net,
    Op.RWKV_WKV6: _linear_attention((0, 1, 2, 4), 5, bonus=3),
    Op.GATED_LINEAR_ATTN: _linear_attention((0, 1, 2, 3), 4),
    Op.RWKV_WKV7: _linear_attention((0, 1, 2, 3, 4, 5), 6),
    Op.LIGHTNING_INDEXER: _indexer,
    Op.DSV4_HC_PRE: _hc_pre,
    Op.DSV4_HC_POST: _hc_post,
    Op.DSV4_HC_COMB: _hc_comb,
}
