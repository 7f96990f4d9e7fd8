"""Matrix products and triangular systems (docs/protocol.md sections 6.4 and 6.5)."""

from collections.abc import Callable

import numpy as np

from drover.ggml.ops import Op
from drover.worker.devices.reference.arrays import Array, Result, Work, decode, view


def paired(a: Array, b: Array) -> tuple[Array, Array]:
    """Split b's outer dimensions into (Q, group, P, group), so that a, (Q, 1, P, 1), pairs with it by division."""
    (q, p), rest = a.shape[:2], b.shape[2:]
    return a[:, None, :, None], b.reshape(q, b.shape[0] // q, p, b.shape[1] // p, *rest)


def mul_mat(work: Work) -> Result:
    """dst(n,m,p,q) = Σ_k a(k,n, p div (P'/P), q div (Q'/Q))·b(k,m,p,q)."""
    a, b = paired(work.f32(0), work.f32(1))
    return np.matmul(b, a.swapaxes(-1, -2))


def mul_mat_id(work: Work) -> Result:
    """dst(:,u,t) = as(:,:,ids(u,t))ᵀ·b(:, u mod B, t), one expert after another."""
    weights, b = work.operand(0), work.f32(1)[0]
    ids = work.indices(2, weights.ne[2])[0, 0]
    out = np.zeros(work.dst.ne[2::-1], np.float32)
    for expert in np.unique(ids):
        t, u = np.nonzero(ids == expert)
        rows = b[t, u % b.shape[1]]
        out[t, u] = rows @ decode(weights.type, view(weights)[0, expert]).astype(np.float32, copy=False).T
    return out


def out_prod(work: Work) -> Result:
    """dst(i,j) = Σ_k a(i,k)·b(j,k)."""
    a, b = paired(work.f32(0), work.f32(1))
    return np.matmul(b.swapaxes(-1, -2), a)


def solve_tri(work: Work) -> Result:
    """X with A·X = B for lower triangular A, row after row."""
    a, x = work.f64(0), work.f64(1)
    for i in range(a.shape[-1]):
        known = np.matmul(a[..., i : i + 1, :i], x[..., :i, :])
        x[..., i : i + 1, :] = (x[..., i : i + 1, :] - known) / a[..., i : i + 1, i : i + 1]
    return x


FUNCTIONS: dict[Op, Callable[[Work], Result]] = {
    Op.MUL_MAT: mul_mat,
    Op.MUL_MAT_ID: mul_mat_id,
    Op.OUT_PROD: out_prod,
    Op.SOLVE_TRI: solve_tri,
}
