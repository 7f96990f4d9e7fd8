"""Attention and position encoding (docs/protocol.md section 6.6)."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from drover.ggml.ops import Op, RopeMode
from drover.worker.devices.reference.arrays import Array, Doubles, Result, Work, load

MULTI_AXIS = 8
"""Bit of a rope mode: four position planes instead of one."""
LOGITS = 1 << 22
"""How many attention forms at a time: tokens and cells cost memory each by itself, not their product."""


def slopes(heads: int, max_bias: float) -> Doubles:
    """The ALiBi slope of each head; ones without a bias."""
    if max_bias <= 0:
        return np.ones(heads)
    power = 1 << (heads.bit_length() - 1)
    h = np.arange(heads)
    return np.where(
        h < power, 2.0 ** (-max_bias / power * (h + 1)), 2.0 ** (-max_bias / (2 * power) * (2 * (h - power) + 1))
    )


def softmax(z: Doubles, sink: Array | None = None) -> Doubles:
    """Over the last dimension, with one more logit in the sum if there is a sink; zeros where every logit is -inf."""
    top = z.max(axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(z - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    return np.where(total > 0, weights / np.where(total > 0, total, 1), np.where(np.isnan(total), np.nan, 0))


def soft_max(work: Work) -> Result:
    """Softmax of scale·x + slope·mask."""
    z = work.f64(0) * work.floats[0]
    streams, heads, n, _ = z.shape
    if work.optional(1) is not None:
        mask = work.f64(1)[:, :, :n]
        mask = mask[np.arange(streams) % mask.shape[0]][:, np.arange(heads) % mask.shape[1]]
        z += slopes(heads, work.floats[1])[:, None, None] * mask
    sinks = work.f64(2).reshape(heads, 1, 1) if work.optional(2) is not None else None
    return softmax(z, sinks)


def flash_attn(work: Work) -> Result:
    """softmax(scale·q·k, capped, + slope·mask)·v, head by head; cells masked with -inf are never looked at."""
    q, k, v = work.f64(0), work.f64(1), work.f64(2)
    streams, heads, n, _ = q.shape
    scale, max_bias, softcap = work.floats[:3]
    mask = work.f64(3) if work.optional(3) is not None else None
    sinks = work.f64(4).reshape(heads) if work.optional(4) is not None else None
    slope = slopes(heads, max_bias)
    out = np.empty((streams, n, heads, v.shape[3]))
    step = max(1, LOGITS // max(1, k.shape[2]))
    for s, h, first in ((s, h, first) for s, h in np.ndindex(streams, heads) for first in range(0, n, step)):
        some = slice(first, min(n, first + step))
        keys = k[s * k.shape[0] // streams, h * k.shape[1] // heads]
        values = v[s * v.shape[0] // streams, h * v.shape[1] // heads]
        z = q[s, h, some] @ keys.T * scale
        if softcap:
            z = softcap * np.tanh(z / softcap)
        if mask is not None:
            bias = mask[s % mask.shape[0], h % mask.shape[1], some]
            z = np.where(np.isneginf(bias), -np.inf, z + slope[h] * bias)
        out[s, some, h] = _mix(softmax(z, None if sinks is None else sinks[h]), values)
    return out


def _mix(weights: Doubles, values: Doubles) -> Doubles:
    """weights @ values where a weight of zero hides even values that are not finite."""
    odd = ~np.isfinite(values).all(axis=-1)
    out: Doubles = weights[:, ~odd] @ values[~odd]
    for cell in np.flatnonzero(odd):
        rows = weights[:, cell] != 0
        out[rows] += weights[rows, cell, None] * values[cell]
    return out


def _rope(direction: int) -> Callable[[Work], Result]:
    """Rotate pairs of channels by an angle that grows with the position; `direction` -1 turns back."""

    def compute(work: Work) -> Result:
        x = work.f64(0)
        cos, sin = rotation(work)
        mode, first = work.ints[2], work.ints[15]
        k = np.arange(cos.shape[-1])
        if mode == RopeMode.NORMAL:
            one, two = first + 2 * k, first + 2 * k + 1
        else:
            one, two = first + k, first + k + cos.shape[-1]
        a, b = x[..., one], x[..., two]
        cos, sin = cos[:, None], direction * sin[:, None]
        x[..., one], x[..., two] = a * cos - b * sin, a * sin + b * cos
        return x

    return compute


def rotation(work: Work) -> tuple[Doubles, Doubles]:
    """Cosine and sine, times the magnitude, of each token and pair: (tokens, pairs)."""
    n_dims, mode, context = work.ints[1], work.ints[2], work.ints[4]
    base, freq_scale, ext_factor, magnitude, beta_fast, beta_slow = (np.float64(f) for f in work.floats[5:11])
    k = np.arange(n_dims if mode == RopeMode.VISION else n_dims // 2)
    planes, exponent = axes(k, mode, work.ints[11:15])
    tokens = work.operand(0).ne[2]
    positions = load(work.operand(1)).reshape(-1, tokens).astype(np.float64)
    theta = positions[planes].T * base ** (-2.0 * exponent / n_dims)
    if work.optional(2) is not None:
        theta = theta / work.f64(2).reshape(-1)[: len(k)]
    angle = freq_scale * theta
    if ext_factor != 0:
        low, high = (n_dims * np.log(context / (b * 2 * math.pi)) / (2 * np.log(base)) for b in (beta_fast, beta_slow))
        low, high = np.maximum(0, np.floor(low)), np.minimum(n_dims - 1, np.ceil(high))
        ramp = (1 - np.clip((k - low) / np.maximum(0.001, high - low), 0, 1)) * ext_factor
        angle = angle * (1 - ramp) + theta * ramp
        magnitude = magnitude * (1 + 0.1 * np.log(1 / freq_scale))
    return np.cos(angle) * magnitude, np.sin(angle) * magnitude


def axes(
    k: npt.NDArray[np.int64], mode: int, sections: tuple[int, ...]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which position plane each pair takes, and the exponent its frequency has."""
    if not mode & MULTI_AXIS:
        return np.zeros_like(k), k
    c = k % sum(sections)
    if mode == RopeMode.IMROPE:
        s0, s1, s2, _ = sections
        wanted = [(c % 3 == 1) & (c < 3 * s1), (c % 3 == 2) & (c < 3 * s2), (c % 3 == 0) & (c < 3 * s0)]
        return np.select(wanted, [1, 2, 0], 3), k
    starts = np.cumsum((0, *sections[:3]))
    plane = np.searchsorted(starts, c, side="right") - 1
    return plane, c - starts[plane] if mode == RopeMode.VISION else k


FUNCTIONS: dict[Op, Callable[[Work], Result]] = {
    Op.SOFT_MAX: soft_max,
    Op.FLASH_ATTN_EXT: flash_attn,
    Op.ROPE: _rope(1),
    Op.ROPE_BACK: _rope(-1),
}
