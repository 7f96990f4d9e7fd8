"""Writers of blocks whose scales are searched for: the K types and IQ4.

Each search tries a few scales per group and keeps the one with the least squared error, or nearly: the same ones, in
the same order and precision, as the stock worker, whose blocks come out the same byte for byte.
"""

import numpy as np

from drover.worker.devices.reference.blocks import (
    Array,
    as_half,
    inverse,
    largest_of,
    nearest_level,
    pack_crumbs,
    pack_halves,
    pack_nibbles,
    ratio,
    total,
    whole,
)
from drover.worker.devices.reference.quants import NONLINEAR

TINY = 1e-15
"""Groups smaller than this are zero."""


def _fit_affine(x: Array, w: Array, top: int, first: float, steps: int, power: int) -> tuple[Array, Array, Array]:
    """Scale, minimum (as a positive number) and levels 0..top that fit a group best, by weighted least squares.

    Tries `steps` + 1 scales, from `first` levels off the plain one on and a tenth of a level apart, each with the best
    minimum so far; the error counts each difference to `power`.
    """
    base, high = np.minimum(x.min(axis=-1, keepdims=True), 0), x.max(axis=-1, keepdims=True)
    lowest, flat = base, base == high
    high = np.where(flat, base + 1, high).astype(np.float32)
    sum_w, sum_x = total(w), total(w * x)

    def error(scale: Array, base: Array, levels: Array) -> Array:
        off = scale * levels + base - x
        return total(w * (np.abs(off) if power == 1 else off * off))

    plain = np.float32(top) / (high - base)
    scale, levels = 1 / plain, whole(plain * (x - base), 0, top)
    best = error(scale, base, levels)
    for step in range(steps + 1):
        count = np.float32(first) + np.float32(0.1) * np.float32(step) + np.float32(top)
        tried = whole(count / (high - base) * (x - base), 0, top)
        sum_l, sum_l2, sum_xl = total(w * tried), total(w * tried * tried), total(w * tried * x)
        det = sum_w * sum_l2 - sum_l * sum_l
        new_scale = ratio(sum_w * sum_xl - sum_x * sum_l, det)
        new_base = ratio(sum_l2 * sum_x - sum_l * sum_xl, det)
        new_scale = np.where(new_base > 0, ratio(sum_xl, sum_l2), new_scale)
        new_base = np.minimum(new_base, 0)
        found = error(new_scale, new_base, tried)
        better = (det > 0) & (found < best)
        levels, best = np.where(better, tried, levels), np.where(better, found, best)
        scale, base = np.where(better, new_scale, scale), np.where(better, new_base, base)
    return np.where(flat, 0, scale), -np.where(flat, lowest, base), np.where(flat, 0, levels)


def _requantise(x: Array, d: Array, m: Array, levels: Array, top: int) -> Array:
    """Levels under the scales as they were stored; where a scale came out as 0, the levels stay."""
    return np.where(d != 0, whole(ratio(x + m, d), 0, top), levels).astype(np.uint8)


def _affine_scales(scale: Array, low: Array, top: int) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Whole scales and minima 0..top of the groups (…, groups, 1), their f16 units, and what they now stand for."""
    found = []
    for real in (scale, low):
        largest = np.maximum(real.max(axis=-2, keepdims=True), 0)
        counts = whole(ratio(np.full_like(largest, top), largest) * real, 0, top)
        found.append((counts, as_half(largest / np.float32(top))))
    (s, d), (m, dmin) = found
    return s.astype(np.uint8), m.astype(np.uint8), d, dmin, d * s, dmin * m


def _to_k_pairs(x: Array, top: int, first: float, steps: int) -> tuple[Array, Array]:
    """Head (d, dmin, packed six-bit pairs) and levels (…, 8, 32) of Q4_K and Q5_K."""
    groups = x.reshape(*x.shape[:-1], 8, 32)
    w = np.sqrt(total(groups * groups) / np.float32(32)) + np.abs(groups)
    scale, low, levels = _fit_affine(groups, w, top, first, steps, 2)
    s, m, d, dmin, real_scale, real_low = _affine_scales(scale, low, 63)
    q = _requantise(groups, real_scale, real_low, levels, top)
    s, m = s[..., 0], m[..., 0]
    high = s[..., 4:] & 15 | m[..., 4:] << 4
    pairs = np.concatenate((s[..., :4] | s[..., 4:] >> 4 << 6, m[..., :4] | m[..., 4:] >> 4 << 6, high), axis=-1)
    return np.concatenate((pack_halves(d[..., 0, :]), pack_halves(dmin[..., 0, :]), pairs), axis=-1), q


def _paired_nibbles(q: Array) -> Array:
    """Levels (…, 8, 32): low nibbles of the even groups, high nibbles of the odd ones."""
    return (q[..., ::2, :] & 15 | q[..., 1::2, :] << 4).reshape(*q.shape[:-2], 128)


def to_q4_k(x: Array) -> Array:
    """Eight groups of 32, scales and minima of six bits."""
    head, q = _to_k_pairs(x, 15, -1.0, 20)
    return np.concatenate((head, _paired_nibbles(q)), axis=-1)


def to_q5_k(x: Array) -> Array:
    """The same with levels 0..31."""
    head, q = _to_k_pairs(x, 31, -0.5, 15)
    high = np.packbits(q >> 4, axis=-2, bitorder="little")[..., 0, :]
    return np.concatenate((head, high, _paired_nibbles(q)), axis=-1)


def to_q2_k(x: Array) -> Array:
    """Sixteen groups of 16, scales and minima of four bits."""
    groups = x.reshape(*x.shape[:-1], 16, 16)
    scale, low, levels = _fit_affine(groups, np.abs(groups), 3, -0.5, 15, 1)
    s, m, d, dmin, real_scale, real_low = _affine_scales(scale, low, 15)
    q = _requantise(groups, real_scale, real_low, levels, 3).reshape(x.shape)
    pairs = (s | m << 4)[..., 0]
    return np.concatenate((pairs, pack_crumbs(q), pack_halves(d[..., 0, :]), pack_halves(dmin[..., 0, :])), axis=-1)


def _fit_symmetric(x: Array, half: int) -> tuple[Array, Array]:
    """Scale and levels -half..half-1 that fit a group best, weights x², among scales up to 0.9 levels off."""
    largest = largest_of(x)
    empty = np.abs(largest) < TINY
    largest = np.where(empty, 1, largest).astype(np.float32)
    w = x * x
    scale = best = np.zeros_like(largest)
    levels = np.zeros_like(x)
    for step in (0, *range(-9, 0), *range(1, 10)):
        tried = whole(-(np.float32(half) + np.float32(0.1) * np.float32(step)) / largest * x, -half, half - 1)
        sum_xl, sum_l2 = total(w * x * tried), total(w * tried * tried)
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2) if step else np.ones_like(empty)
        scale = np.where(better, ratio(sum_xl, sum_l2), scale)
        best, levels = np.where(better, scale * sum_xl, best), np.where(better, tried, levels)
    return np.where(empty, 0, scale), np.where(empty, -half, levels)


def to_q6_k(x: Array) -> Array:
    """Sixteen groups of 16, scales of eight bits."""
    groups = x.reshape(*x.shape[:-1], 16, 16)
    scale, levels = _fit_symmetric(groups, 32)
    largest = largest_of(scale[..., 0])[..., None]
    empty = np.abs(largest) < TINY
    unit = np.float32(-128) / np.where(empty, 1, largest).astype(np.float32)
    s = np.where(empty, 0, whole(unit * scale, -128, 127))
    d = np.where(empty, 0, as_half(1 / unit))
    real = (d * s).astype(np.float32)
    q = np.where(real != 0, whole(ratio(groups, real), -32, 31), levels) + 32
    q = np.where(empty, 0, q).astype(np.uint8).reshape(*x.shape[:-1], 2, 4, 32)
    low = q[..., :2, :] & 15 | q[..., 2:, :] << 4
    high = pack_crumbs((q >> 4).reshape(x.shape))
    scales = s[..., 0].astype(np.int8).view(np.uint8)
    return np.concatenate((low.reshape(*x.shape[:-1], 128), high, scales, pack_halves(d[..., 0, :])), axis=-1)


def _fit_q3(x: Array) -> tuple[Array, Array]:
    """Scale and levels -4..3 of groups: start from the plain ones, then move single elements while the fit gains."""
    largest = largest_of(x)
    empty = np.abs(largest) < TINY
    w = x * x
    levels = whole(np.float32(-4) / np.where(empty, 1, largest).astype(np.float32) * x, -4, 3)
    sum_xl, sum_l2 = (total(w * y * levels)[..., 0] for y in (x, levels))
    for _ in range(5):
        before = levels.copy()
        for i in range(x.shape[-1]):
            xi, wi, old = x[..., i], w[..., i], levels[..., i]
            rest_xl, rest_l2 = sum_xl - wi * xi * old, sum_l2 - wi * old * old
            new = whole(ratio(xi * rest_l2, rest_xl), -4, 3)
            new_xl, new_l2 = rest_xl + wi * xi * new, rest_l2 + wi * new * new
            gain = new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2
            moved = (rest_xl > 0) & (new != old) & (new_l2 > 0) & gain
            levels[..., i] = np.where(moved, new, old)
            sum_xl, sum_l2 = np.where(moved, new_xl, sum_xl), np.where(moved, new_l2, sum_l2)
        if np.array_equal(levels, before):
            break
    return np.where(empty, 0, ratio(sum_xl, sum_l2)[..., None]), np.where(empty, -4, levels)


def to_q3_k(x: Array) -> Array:
    """Sixteen groups of 16, scales of six bits."""
    groups = x.reshape(*x.shape[:-1], 16, 16)
    scale, levels = _fit_q3(groups)
    largest = largest_of(scale[..., 0])[..., None]
    unit = ratio(np.full_like(largest, -32), largest)
    s = whole(unit * scale, -32, 31)
    d = as_half(ratio(np.ones_like(unit), unit))
    stored = np.where(largest != 0, s + 32, 0).astype(np.uint8)[..., 0]
    real = (d * (stored[..., None].astype(np.float32) - 32)).astype(np.float32)
    q = (np.where(real != 0, whole(ratio(groups, real), -4, 3), levels) + 4).astype(np.uint8).reshape(x.shape)
    high = np.packbits((q >> 2).reshape(*x.shape[:-1], 8, 32), axis=-2, bitorder="little")[..., 0, :]
    upper = stored >> 4
    tops = upper[..., :4] | upper[..., 4:8] << 2 | upper[..., 8:12] << 4 | upper[..., 12:] << 6
    scales = np.concatenate((stored[..., :8] & 15 | stored[..., 8:] << 4, tops), axis=-1)
    return np.concatenate((high, pack_crumbs(q & 3), scales, pack_halves(d[..., 0, :])), axis=-1)


def _fit_nonlinear(x: Array, turns: int) -> tuple[Array, Array]:
    """Scale and levels of IQ4 groups: the plain scale, or the best of those up to `turns` sixteenths off."""
    largest = largest_of(x)
    empty = np.abs(largest) < TINY
    largest = np.where(empty, 1, largest).astype(np.float32)
    w = x * x
    first = NONLINEAR[0] if turns <= 0 else -NONLINEAR[0]
    scale = best = np.zeros_like(largest)
    kept = np.zeros(x.shape, np.uint8)
    for turn in (None, *range(-turns, turns + 1)):
        factor = 1 / (largest / first) if turn is None else (np.float32(turn) + NONLINEAR[0]) / largest
        tried = nearest_level(NONLINEAR, factor * x)
        q = NONLINEAR[tried]
        sum_qx, sum_q2 = total(w * q * x), total(w * q * q)
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2) if turn is not None else np.ones_like(empty)
        scale = np.where(better, ratio(sum_qx, sum_q2), scale)
        best, kept = np.where(better, scale * sum_qx, best), np.where(better, tried, kept)
    return np.where(empty, 0, scale), np.where(empty, 0, kept).astype(np.uint8)


def to_iq4_nl(x: Array) -> Array:
    """One scale for 32 uneven levels."""
    scale, q = _fit_nonlinear(x, 0)
    return np.concatenate((pack_halves(scale), pack_nibbles(q)), axis=-1)


def to_iq4_xs(x: Array) -> Array:
    """Eight groups of 32 uneven levels, scales of six bits."""
    groups = x.reshape(*x.shape[:-1], 8, 32)
    scale, _ = _fit_nonlinear(groups, 7)
    d = largest_of(scale[..., 0])[..., None] / np.float32(-32)
    s = whole(inverse(d) * scale, -32, 31)
    q = nearest_level(NONLINEAR, inverse((d * s).astype(np.float32)) * groups)
    stored = (s + 32).astype(np.uint8)[..., 0]
    low = stored[..., ::2] & 15 | (stored[..., 1::2] & 15) << 4
    tops = stored.astype(np.uint16) >> 4 << 2 * np.arange(8, dtype=np.uint16)
    high = tops.sum(axis=-1, dtype=np.uint16, keepdims=True)
    nibbles = pack_nibbles(q).reshape(*x.shape[:-1], 128)
    return np.concatenate((pack_halves(d[..., 0, :]), high.view(np.uint8), low, nibbles), axis=-1)
