"""State-space, linear-attention and other architecture-bound operations (docs/protocol.md section 6.7)."""

from collections import deque
from collections.abc import Callable

import numpy as np

from drover.ggml.ops import Op
from drover.worker.devices.reference.arithmetic import sigmoid, softplus
from drover.worker.devices.reference.arrays import Array, Doubles, Result, Work, view

HC = 4
"""Streams of a hyper-connection."""


def ssm_conv(work: Work) -> Result:
    """Σ_j x(t+j, c, s)·w(j, c)."""
    x, w = work.f64(0)[0], work.f64(1)[0, 0]
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[-1], axis=-1)
    return np.einsum("sctj,cj->stc", windows, w)


def ssm_scan(work: Work) -> Result:
    """Outputs of all tokens, then the states after the last token, the one before it, and so on."""
    states, x, dt, decay, b, c = (work.f64(i) for i in range(6))
    ids = work.indices(6, states.shape[0]).reshape(-1)
    state, dt = states[ids], softplus(dt[0])
    group = np.arange(state.shape[1]) // (state.shape[1] // b.shape[2])
    outputs, kept = np.empty_like(x), _newest(work)
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        inputs = step * x[:, t, :, :, None] * b[:, t, group, None, :]
        state = state * np.exp(step * decay[0, 0][:, None, :]) + inputs
        outputs[:, t] = (state * c[:, t, group, None, :]).sum(axis=-1)
        kept.appendleft(state)
    _store_run(work, outputs, kept)
    return None


def _newest(work: Work) -> deque[Doubles]:
    """Room for as many states as the result has, newest first."""
    return deque(maxlen=work.ints[0])


def _store_run(work: Work, outputs: Array, kept: deque[Doubles]) -> None:
    """Outputs, then the states, newest first; places of states there never were stay as they are."""
    flat = view(work.dst).reshape(-1)
    assert np.shares_memory(flat, view(work.dst))
    values = np.concatenate((outputs.ravel(), *(state.ravel() for state in kept)))
    flat[: values.size] = values


def gated_delta_net(work: Work) -> Result:
    """M ← M·diag(exp g); M ← M + β(v - M k)kᵀ; out = M q/√size, per head; M has values as rows, keys as columns."""
    q, k, v, g, beta = (work.f64(i) for i in range(5))
    batch, tokens, heads, size = v.shape
    matrix = work.f64(5).reshape(batch, heads, size, size)
    head, row = np.arange(heads) % q.shape[2], np.arange(batch) * q.shape[0] // batch
    q, k = q[row][:, :, head], k[row][:, :, head]
    outputs, kept = np.empty_like(v), _newest(work)
    for t in range(tokens):
        key = k[:, t, :, :, None]
        matrix = matrix * np.exp(g[:, t])[:, :, None, :]
        delta = beta[:, t, :, :, None] * (v[:, t, :, :, None] - matrix @ key)
        matrix = matrix + delta * key.swapaxes(-1, -2)
        outputs[:, t] = (matrix @ q[:, t, :, :, None])[..., 0] / np.sqrt(size)
        kept.appendleft(matrix)
    _store_run(work, outputs, kept)
    return None


Step = Callable[[list[Doubles], Doubles], tuple[Doubles, Doubles]]
"""One token's inputs (sequences, heads, size) and the state (sequences, heads, i, j) to its output and next state."""


def _linear_attention(work: Work, sources: tuple[int, ...], state_index: int, step: Step) -> Result:
    """Run `step` over the tokens of each sequence: all outputs, then the last states."""
    inputs = [work.f64(i)[0] for i in sources]
    tokens, heads, size = inputs[0].shape
    state = work.f64(state_index).reshape(-1, heads, size, size)
    sequences = state.shape[0]
    inputs = [x.reshape(sequences, tokens // sequences, heads, size) for x in inputs]
    outputs = np.empty_like(inputs[0])
    for t in range(outputs.shape[1]):
        outputs[:, t], state = step([x[:, t] for x in inputs], state)
    return np.concatenate((outputs.ravel(), state.ravel()))


def wkv6(work: Work) -> Result:
    """out_j = Σ_i r_i (u_i k_i v_j + M_ij); M_ij ← w_i M_ij + k_i v_j."""
    heads, size = work.operand(0).ne[1], work.operand(0).ne[0]
    bonus = work.f64(3).reshape(heads, size)

    def step(inputs: list[Doubles], m: Doubles) -> tuple[Doubles, Doubles]:
        k, v, r, w = inputs
        kv = k[..., :, None] * v[..., None, :]
        out = np.einsum("shi,shij->shj", r, bonus[..., None] * kv + m)
        return out, w[..., None] * m + kv

    return _linear_attention(work, (0, 1, 2, 4), 5, step)


def gated_linear_attention(work: Work) -> Result:
    """M_ij ← g_i M_ij + k_i v_j; out_j = Σ_i scale·q_i M_ij."""

    def step(inputs: list[Doubles], m: Doubles) -> tuple[Doubles, Doubles]:
        k, v, q, g = inputs
        m = g[..., None] * m + k[..., :, None] * v[..., None, :]
        return work.floats[0] * np.einsum("shi,shij->shj", q, m), m

    return _linear_attention(work, (0, 1, 2, 3), 4, step)


def wkv7(work: Work) -> Result:
    """M_ij ← w_j M_ij + v_i k_j + (Σ_l a_l M_il) b_j; out_i = Σ_j r_j M_ij."""

    def step(inputs: list[Doubles], m: Doubles) -> tuple[Doubles, Doubles]:
        r, w, k, v, a, b = inputs
        removed = np.einsum("shj,shij->shi", a, m)[..., None] * b[..., None, :]
        m = w[..., None, :] * m + v[..., :, None] * k[..., None, :] + removed
        return np.einsum("shj,shij->shi", r, m), m

    return _linear_attention(work, (0, 1, 2, 3, 4, 5), 6, step)


def lightning_indexer(work: Work) -> Result:
    """Σ_h max(0, q_h·k_c)·w_h + mask."""
    q, k, w, mask = (work.f64(i) for i in range(4))
    keys = k[:, :, 0].swapaxes(-1, -2)
    scores = np.zeros((q.shape[0], q.shape[1], k.shape[1]))
    for head in range(q.shape[2]):
        scores += np.maximum(q[:, :, head] @ keys, 0) * w[:, 0, :, head, None]
    return scores + mask[np.arange(len(q)) % len(mask), 0]


def hc_pre(work: Work) -> Result:
    """f[0]·Σ_i x_i w_i; with i[1], w has a weight per channel and passes through a sigmoid."""
    x, w = work.f64(0)[0], work.f64(1)
    weights = sigmoid(w[0]) if work.ints[1] else w[0, 0][..., None]
    return work.floats[0] * (x * weights).sum(axis=1)


def hc_post(work: Work) -> Result:
    """out_i = p_i·x + Σ_s comb(i,s)·r_s; without comb, + r_i."""
    x, r, p = work.f64(0)[0, 0], work.f64(1)[0], work.f64(2)[0, 0]
    kept = r if work.optional(3) is None else np.einsum("tsi,tsd->tid", work.f64(3)[0], r)
    return p[..., None] * x[:, None] + kept


def hc_comb(work: Work) -> Result:
    """A matrix of weights per token, made doubly stochastic by turns: rows are sources, columns destinations."""
    mix, scales, bias = work.f64(0), work.f64(1).ravel(), work.f64(2).ravel()
    eps, turns = work.floats[0], work.ints[1]
    z = (mix[..., 2 * HC :] * scales[2] + bias[2 * HC :]).reshape(-1, HC, HC)
    z = np.exp(z - z.max(axis=-1, keepdims=True))
    z = z / z.sum(axis=-1, keepdims=True) + eps
    z /= z.sum(axis=-2, keepdims=True) + eps
    for _ in range(turns - 1):
        z /= z.sum(axis=-1, keepdims=True) + eps
        z /= z.sum(axis=-2, keepdims=True) + eps
    return z


FUNCTIONS: dict[Op, Callable[[Work], Result]] = {
    Op.SSM_CONV: ssm_conv,
    Op.SSM_SCAN: ssm_scan,
    Op.GATED_DELTA_NET: gated_delta_net,
    Op.RWKV_WKV6: wkv6,
    Op.GATED_LINEAR_ATTN: gated_linear_attention,
    Op.RWKV_WKV7: wkv7,
    Op.LIGHTNING_INDEXER: lightning_indexer,
    Op.DSV4_HC_PRE: hc_pre,
    Op.DSV4_HC_POST: hc_post,
    Op.DSV4_HC_COMB: hc_comb,
}
