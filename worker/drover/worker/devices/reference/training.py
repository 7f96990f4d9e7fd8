"""Operations that only training sends: gradients, and steps of optimizers (docs/protocol.md section 6.8)."""

from collections.abc import Callable

import numpy as np

from drover.ggml.ops import Op
from drover.worker.devices.reference.arithmetic import sigmoid
from drover.worker.devices.reference.arrays import Result, Work, store


def silu_back(work: Work) -> Result:
    """dy · s · (1 + x (1 - s)), where s = sigmoid(x); dy is src0."""
    dy, x = work.f64(0), work.f64(1)
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def rms_norm_back(work: Work) -> Result:
    """The gradient of x / r, where r² = mean(x²) + epsilon: (dy - x · mean(x dy) / r²) / r; dy is src0."""
    dy, x = work.f64(0), work.f64(1)
    square = np.mean(x * x, axis=-1, keepdims=True) + work.floats[0]
    return (dy - x * np.mean(x * dy, axis=-1, keepdims=True) / square) / np.sqrt(square)


def soft_max_back(work: Work) -> Result:
    """scale · y · (dy - y·dy); dy is src0, y what the softmax gave."""
    dy, y = work.f64(0), work.f64(1)
    return work.floats[0] * y * (dy - np.sum(y * dy, axis=-1, keepdims=True))


def get_rows_back(work: Work) -> Result:
    """The first rows of src0, as many as there are indices, added to the rows of the result that those name."""
    columns, rows = work.dst.ne[:2]
    total, ids = np.zeros((rows, columns), np.float32), work.indices(1, rows).reshape(-1)
    np.add.at(total, ids, work.f32(0)[0, 0, : ids.size])
    return total


def cross_entropy_loss_back(work: Work) -> Result:
    """(softmax(src1) - src2) · src0 / rows."""
    loss, logits, labels = work.f64(0), work.f64(1), work.f64(2)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return (shares - labels) * loss.reshape(()) / (logits.size // logits.shape[-1])


def adamw_step(work: Work) -> None:
    """One step of AdamW: the moments are updated in place, then the weights, which decay first.

    Parameters: alpha, beta1, beta2, epsilon, decay, and what both moments are multiplied by against their bias.
    """
    alpha, beta1, beta2, epsilon, decay, unbias1, unbias2 = map(float, work.f64(4).reshape(-1))
    weights, gradient = work.f64(0), work.f64(1)
    first = beta1 * work.f64(2) + (1 - beta1) * gradient
    second = beta2 * work.f64(3) + (1 - beta2) * gradient**2
    store(work.operand(2), first)
    store(work.operand(3), second)
    step = first * unbias1 / (np.sqrt(second * unbias2) + epsilon)
    _update(work, weights * (1 - alpha * decay) - alpha * step)


def sgd_step(work: Work) -> None:
    """One step along the gradient, of weights that decay first; parameters: alpha, decay."""
    alpha, decay = map(float, work.f64(2).reshape(-1))
    _update(work, work.f64(0) * (1 - alpha * decay) - alpha * work.f64(1))


def _update(work: Work, weights: Result) -> None:
    """The weights, where they are and where the result is, which is the same place unless a client is strange."""
    store(work.operand(0), weights)
    store(work.dst, weights)


FUNCTIONS: dict[Op, Callable[[Work], Result]] = {
    Op.SILU_BACK: silu_back,
    Op.RMS_NORM_BACK: rms_norm_back,
    Op.SOFT_MAX_BACK: soft_max_back,
    Op.GET_ROWS_BACK: get_rows_back,
    Op.CROSS_ENTROPY_LOSS_BACK: cross_entropy_loss_back,
    Op.OPT_STEP_ADAMW: adamw_step,
    Op.OPT_STEP_SGD: sgd_step,
}
