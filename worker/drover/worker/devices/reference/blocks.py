"""What all writers of quantised blocks use: sums in order, rounding, nearest levels, and packing bits.

Arithmetic is float32 throughout, and results are exact to the bit: that is what makes blocks the same everywhere.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def pack_halves(d: Array) -> Array:
    """As the bytes of f16."""
    return np.ascontiguousarray(d.astype(np.float16)).view(np.uint8)


def pack_nibbles(q: Array) -> Array:
    """The first half of the last dimension into low nibbles, the second into high ones."""
    half = q.shape[-1] // 2
    packed: Array = q[..., :half] | q[..., half:] << np.uint8(4)
    return packed


def pack_crumbs(q: Array) -> Array:
    """Levels (…, 256) of two bits: four elements, 32 apart, to a byte."""
    parts = q.reshape(*q.shape[:-1], 2, 4, 32)
    packed: Array = parts[..., 0, :] | parts[..., 1, :] << 2 | parts[..., 2, :] << 4 | parts[..., 3, :] << 6
    return packed.reshape(*q.shape[:-1], 64)


def inverse(d: Array) -> Array:
    """1/d, or 0 where d is 0."""
    return np.where(d != 0, np.float32(1) / np.where(d != 0, d, 1), 0).astype(np.float32)


def ratio(a: Array, b: Array) -> Array:
    """a/b, or 0 where b is 0."""
    return np.where(b != 0, a / np.where(b != 0, b, 1), 0).astype(np.float32)


def total(x: Array) -> Array:
    """Sum over the last dimension, one element after another; keeps the dimension."""
    return np.cumsum(x, axis=-1, dtype=np.float32)[..., -1:]


def largest_of(x: Array) -> Array:
    """The first element of largest magnitude, with its sign; keeps the dimension."""
    return np.take_along_axis(x, np.argmax(np.abs(x), axis=-1)[..., None], axis=-1)


def round_away(x: Array) -> Array:
    """To the nearest integer, halves away from zero."""
    cut: Array = np.trunc(x)
    cut += np.where(np.abs(x - cut) >= 0.5, np.sign(x), 0).astype(np.float32)
    return cut


def whole(x: Array, low: int, high: int) -> Array:
    """To the nearest integers, halves to even, cut to a range."""
    cut: Array = np.clip(np.rint(np.nan_to_num(x, nan=0.0)), low, high)
    return cut


def as_half(d: Array) -> Array:
    """As f16 keeps it."""
    return d.astype(np.float16).astype(np.float32)


def nearest_level(levels: Array, x: Array) -> Array:
    """Which of the rising `levels` is nearest; the upper one of two equally near."""
    upper = np.clip(np.searchsorted(levels, x, side="right"), 1, len(levels) - 1)
    return np.where(x - levels[upper - 1] < levels[upper] - x, upper - 1, upper).astype(np.uint8)
