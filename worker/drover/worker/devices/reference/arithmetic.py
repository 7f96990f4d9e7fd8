"""Element-wise operations, reductions, orderings and norms (docs/protocol.md section 6.4)."""

import math
from collections.abc import Callable

import numpy as np

from drover.ggml.ops import Glu, Op, SortOrder, Unary
from drover.worker.devices.reference.arrays import Array, Doubles, Result, Work, load, tile

_erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Doubles) -> Doubles:
    """1/(1+exp(-x))."""
    y: Doubles = 1 / (1 + np.exp(-x))
    return y


def silu(x: Doubles) -> Doubles:
    """x sigmoid(x)."""
    y: Doubles = x * sigmoid(x)
    return y


def softplus(x: Doubles) -> Doubles:
    """ln(1+exp(x)); x itself where it is large."""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def gelu(x: Doubles) -> Doubles:
    """The tanh form."""
    y: Doubles = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return y


def gelu_erf(x: Doubles) -> Doubles:
    """The exact form."""
    y: Doubles = x / 2 * (1 + _erf(x / math.sqrt(2)))
    return y


def gelu_quick(x: Doubles) -> Doubles:
    """The sigmoid form."""
    return x * sigmoid(1.702 * x)


def hard_sigmoid(x: Doubles) -> Doubles:
    """A line from 0 at -3 to 1 at 3."""
    return np.clip((x + 3) / 6, 0, 1)


def xielu(x: Doubles, p: tuple[float, ...]) -> Doubles:
    """A parabola above zero, an exponential below; `p` are the node's parameters."""
    return np.where(x > 0, p[2] * x * x + p[3] * x, (np.expm1(np.minimum(x, p[4])) - x) * p[1] + p[3] * x)


def round_away(x: Doubles) -> Doubles:
    """To the nearest integer, halves away from zero."""
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0)


UNARY: dict[Unary, Callable[[Doubles], Array]] = {
    Unary.ABS: np.abs,
    Unary.SGN: np.sign,
    Unary.NEG: np.negative,
    Unary.STEP: lambda x: (x > 0).astype(np.float64),
    Unary.TANH: np.tanh,
    Unary.ELU: lambda x: np.where(x > 0, x, np.expm1(x)),
    Unary.RELU: lambda x: np.maximum(x, 0),
    Unary.SIGMOID: sigmoid,
    Unary.GELU: gelu,
    Unary.GELU_QUICK: gelu_quick,
    Unary.SILU: silu,
    Unary.HARDSWISH: lambda x: x * hard_sigmoid(x),
    Unary.HARDSIGMOID: hard_sigmoid,
    Unary.EXP: np.exp,
    Unary.EXPM1: np.expm1,
    Unary.SOFTPLUS: softplus,
    Unary.GELU_ERF: gelu_erf,
    Unary.FLOOR: np.floor,
    Unary.CEIL: np.ceil,
    Unary.ROUND: round_away,
    Unary.TRUNC: np.trunc,
}
"""Functions of one number; XIELU alone has parameters."""


def unary(work: Work) -> Result:
    """The function parameter 0 names."""
    kind = Unary(work.ints[0])
    x = work.f64(0)
    return xielu(x, work.floats) if kind == Unary.XIELU else UNARY[kind](x)


GATES: dict[Glu, Callable[[Doubles, Doubles, float, float], Doubles]] = {
    Glu.REGLU: lambda x, y, alpha, limit: np.maximum(x, 0) * y,
    Glu.GEGLU: lambda x, y, alpha, limit: gelu(x) * y,
    Glu.SWIGLU: lambda x, y, alpha, limit: silu(x) * y,
    Glu.SWIGLU_OAI: lambda x, y, alpha, limit: (
        np.minimum(x, limit) * sigmoid(alpha * np.minimum(x, limit)) * (np.clip(y, -limit, limit) + 1)
    ),
    Glu.GEGLU_ERF: lambda x, y, alpha, limit: gelu_erf(x) * y,
    Glu.GEGLU_QUICK: lambda x, y, alpha, limit: gelu_quick(x) * y,
    Glu.SWIGLU_CLAMP: lambda x, y, alpha, limit: silu(np.minimum(x, limit)) * np.clip(y, -limit, limit),
}


def glu(work: Work) -> Result:
    """A gate over two operands, or over the halves of one (exchanged if parameter 1 says so)."""
    x = work.f64(0)
    if work.optional(1) is not None:
        y = work.f64(1)
    else:
        half = work.dst.ne[0]
        x, y = x[..., :half], x[..., half : 2 * half]
        if work.ints[1]:
            x, y = y, x
    return GATES[Glu(work.ints[0])](x, y, work.floats[2], work.floats[3])


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Work], Result]:
    """src0 and src1, tiled to src0's shape."""

    def compute(work: Work) -> Result:
        a = work.f32(0)
        return function(a, tile(work.f32(1), a.shape))

    return compute


def add_id(work: Work) -> Result:
    """a(:,u,t) + b(:,ids(u,t))."""
    rows = work.f32(1)[0, 0]
    return work.f32(0) + rows[work.indices(2, rows.shape[0])].reshape(work.dst.ne[::-1])


def add1(work: Work) -> Result:
    """src0 plus one number."""
    return work.f32(0) + work.f32(1).reshape(())


def scale(work: Work) -> Result:
    """f[0]·x + f[1]."""
    return work.f32(0) * np.float32(work.floats[0]) + np.float32(work.floats[1])


def clamp(work: Work) -> Result:
    """min(max(x, f[0]), f[1])."""
    return np.minimum(np.maximum(work.f32(0), np.float32(work.floats[0])), np.float32(work.floats[1]))


def leaky_relu(work: Work) -> Result:
    """x above zero, f[0]·x below."""
    x = work.f32(0)
    return np.where(x > 0, x, x * np.float32(work.floats[0]))


def argmax(work: Work) -> Result:
    """Where the first maximum of each row is."""
    return np.argmax(work.f32(0), axis=-1)


def argsort(work: Work) -> Result:
    """Indices that sort each row; ties in order of place."""
    x = work.f32(0)
    return np.argsort(-x if work.ints[0] == SortOrder.DESC else x, axis=-1, kind="stable")


def top_k(work: Work) -> Result:
    """Indices of the largest of each row, largest first."""
    return np.argsort(-work.f32(0), axis=-1, kind="stable")[..., : work.dst.ne[0]]


def count_equal(work: Work) -> Result:
    """How many elements of two integer tensors agree."""
    return np.array(np.count_nonzero(load(work.operand(0)) == load(work.operand(1))), np.int64)


def norm(work: Work) -> Result:
    """(x - mean)/sqrt(var + f[0]) of each row."""
    x = work.f64(0)
    x -= x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + work.floats[0])


def rms_norm(work: Work) -> Result:
    """x/sqrt(mean(x²) + f[0]) of each row."""
    x = work.f64(0)
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + work.floats[0])


def l2_norm(work: Work) -> Result:
    """x/max(|x|, f[0]) of each row."""
    x = work.f64(0)
    return x / np.maximum(np.sqrt(np.square(x).sum(axis=-1, keepdims=True)), work.floats[0])


def group_norm(work: Work) -> Result:
    """Norm over dimensions 0 and 1 and a group of the channels in dimension 2."""
    x = work.f64(0)
    width = -(-x.shape[1] // work.ints[0])
    for first in range(0, x.shape[1], width):
        group = x[:, first : first + width]
        group -= group.mean(axis=(1, 2, 3), keepdims=True)
        group /= np.sqrt(np.square(group).mean(axis=(1, 2, 3), keepdims=True) + work.floats[1])
    return x


def cross_entropy_loss(work: Work) -> Result:
    """Mean over the rows of -labels·log_softmax(logits)."""
    logits, labels = work.f64(0), work.f64(1)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.array(-(labels * logits).sum() / (logits.size // logits.shape[-1]))


FUNCTIONS: dict[Op, Callable[[Work], Result]] = {
    Op.ADD: _binary(np.add),
    Op.SUB: _binary(np.subtract),
    Op.MUL: _binary(np.multiply),
    Op.DIV: _binary(np.divide),
    Op.ADD_ID: add_id,
    Op.ADD1: add1,
    Op.SQR: lambda work: np.square(work.f32(0)),
    Op.SQRT: lambda work: np.sqrt(work.f32(0)),
    Op.LOG: lambda work: np.log(work.f64(0)),
    Op.SIN: lambda work: np.sin(work.f64(0)),
    Op.COS: lambda work: np.cos(work.f64(0)),
    Op.SCALE: scale,
    Op.CLAMP: clamp,
    Op.LEAKY_RELU: leaky_relu,
    Op.UNARY: unary,
    Op.GLU: glu,
    Op.SUM: lambda work: work.f64(0).sum(keepdims=True),
    Op.SUM_ROWS: lambda work: work.f64(0).sum(axis=-1),
    Op.MEAN: lambda work: work.f64(0).mean(axis=-1),
    Op.CUMSUM: lambda work: work.f64(0).cumsum(axis=-1),
    Op.ARGMAX: argmax,
    Op.ARGSORT: argsort,
    Op.TOP_K: top_k,
    Op.COUNT_EQUAL: count_equal,
    Op.NORM: norm,
    Op.RMS_NORM: rms_norm,
    Op.L2_NORM: l2_norm,
    Op.GROUP_NORM: group_norm,
    Op.CROSS_ENTROPY_LOSS: cross_entropy_loss,
}
