"""Float32 to quantised blocks, whole arrays at a time (docs/protocol.md section 5.2).

A writer takes values shaped (…, elements of a block) and gives (…, bytes of a block): the bytes a stock worker writes.
"""

from collections.abc import Callable

import numpy as np

from drover.ggml.types import (
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    TensorType,
)
from drover.worker.devices.reference.blocks import (
    Array,
    inverse,
    nearest_level,
    pack_crumbs,
    pack_halves,
    pack_nibbles,
    ratio,
    round_away,
    total,
    whole,
)
from drover.worker.devices.reference.fitting import to_iq4_nl, to_iq4_xs, to_q2_k, to_q3_k, to_q4_k, to_q5_k, to_q6_k
from drover.worker.devices.reference.quants import FP4, UE4M3


def _levels(x: Array, top: int) -> Array:
    """Cut to whole levels, at most `top`; what is not a number becomes 0."""
    whole: Array = np.nan_to_num(np.clip(np.trunc(x), 0, top), nan=0.0)
    return whole.astype(np.uint8)


def _to_q8_0(x: Array) -> Array:
    top = np.max(np.abs(x), axis=-1, keepdims=True)
    q = whole(ratio(np.full_like(top, 127), top) * x, -127, 127)
    return np.concatenate((pack_halves(top / np.float32(127)), q.astype(np.int8).view(np.uint8)), axis=-1)


def _signed(x: Array, half: int) -> tuple[Array, Array]:
    """Scale and levels of the types without a minimum: the largest element becomes -half."""
    largest = np.take_along_axis(x, np.argmax(np.abs(x), axis=-1)[..., None], axis=-1)
    d = largest / np.float32(-half)
    return d, _levels(x * inverse(d) + np.float32(half + 0.5), 2 * half - 1)


def _affine(x: Array, top: int) -> tuple[Array, Array, Array]:
    """Scale, minimum and levels of the types with a minimum."""
    low = x.min(axis=-1, keepdims=True)
    d = (x.max(axis=-1, keepdims=True) - low) / np.float32(top)
    return d, low, _levels((x - low) * inverse(d) + np.float32(0.5), top)


def _to_q4_0(x: Array) -> Array:
    d, q = _signed(x, 8)
    return np.concatenate((pack_halves(d), pack_nibbles(q)), axis=-1)


def _to_q4_1(x: Array) -> Array:
    d, low, q = _affine(x, 15)
    return np.concatenate((pack_halves(d), pack_halves(low), pack_nibbles(q)), axis=-1)


def _to_q5_0(x: Array) -> Array:
    d, q = _signed(x, 16)
    return np.concatenate((pack_halves(d), _fifth_bits(q), pack_nibbles(q & np.uint8(15))), axis=-1)


def _to_q5_1(x: Array) -> Array:
    d, low, q = _affine(x, 31)
    return np.concatenate((pack_halves(d), pack_halves(low), _fifth_bits(q), pack_nibbles(q & np.uint8(15))), axis=-1)


def _fifth_bits(q: Array) -> Array:
    return np.packbits(q >> np.uint8(4), axis=-1, bitorder="little")


def _trits(x: Array) -> tuple[Array, Array]:
    """The f16 scale and the levels 0..2 of the ternary types."""
    d = np.max(np.abs(x), axis=-1, keepdims=True)
    return pack_halves(d), (np.clip(np.nan_to_num(round_away(x * inverse(d)), nan=0.0), -1, 1) + 1).astype(np.uint8)


def _to_tq1_0(x: Array) -> Array:
    d, q = _trits(x)
    parts = []
    for first, size, count in ((0, 32, 5), (160, 16, 5), (240, 4, 4)):
        digits = q[..., first : first + size * count].reshape(*q.shape[:-1], count, size).astype(np.uint16)
        number = sum(digits[..., n, :] * 3 ** (4 - n) for n in range(count))
        parts.append(((number * np.uint32(256) + 242) // 243).astype(np.uint8))
    return np.concatenate((*parts, d), axis=-1)


def _to_tq2_0(x: Array) -> Array:
    d, q = _trits(x)
    return np.concatenate((pack_crumbs(q), d), axis=-1)


def _nearest_fp4(x: Array, d: Array) -> Array:
    """Codes of the nearest of the sixteen (doubled) 4-bit floats times d; the lower code of two equally near."""
    code: Array = np.argmin(np.abs(FP4 * d[..., None] - x[..., None]), axis=-1)
    return code.astype(np.uint8)


def _to_mxfp4(x: Array) -> Array:
    top = np.max(np.abs(x), axis=-1, keepdims=True)
    _, exponent = np.frexp(top)
    e = np.where(top > 0, np.clip(exponent.astype(np.int32) - 3 + 127, 0, 254), 0)
    d = np.ldexp(np.float32(1), e - 128).astype(np.float32)
    return np.concatenate((e.astype(np.uint8), pack_nibbles(_nearest_fp4(x, d))), axis=-1)


def _to_nvfp4(x: Array) -> Array:
    groups = x.reshape(*x.shape[:-1], 4, 16)
    code = nearest_level(UE4M3[:127], np.max(np.abs(groups), axis=-1) / np.float32(6))
    q = _nearest_fp4(groups, np.float32(0.5) * UE4M3[code][..., None])
    return np.concatenate((code, pack_nibbles(q).reshape(*x.shape[:-1], 32)), axis=-1)


def _to_q1_0(x: Array) -> Array:
    d = total(np.abs(x)) / np.float32(128)
    return np.concatenate((pack_halves(d), np.packbits(x >= 0, axis=-1, bitorder="little")), axis=-1)


def _to_q2_0(x: Array) -> Array:
    d = np.max(np.abs(x), axis=-1, keepdims=True)
    q = (np.clip(np.nan_to_num(round_away(x * inverse(d)), nan=0.0), -1, 2) + 1).astype(np.uint8)
    q = q.reshape(*x.shape[:-1], 16, 4)
    packed = q[..., 0] | q[..., 1] << 2 | q[..., 2] << 4 | q[..., 3] << 6
    return np.concatenate((pack_halves(d), packed), axis=-1)


QUANTIZE: dict[TensorType, Callable[[Array], Array]] = {
    Q8_0: _to_q8_0,
    Q4_0: _to_q4_0,
    Q4_1: _to_q4_1,
    Q5_0: _to_q5_0,
    Q5_1: _to_q5_1,
    Q2_K: to_q2_k,
    Q3_K: to_q3_k,
    Q4_K: to_q4_k,
    Q5_K: to_q5_k,
    Q6_K: to_q6_k,
    IQ4_NL: to_iq4_nl,
    IQ4_XS: to_iq4_xs,
    TQ1_0: _to_tq1_0,
    TQ2_0: _to_tq2_0,
    MXFP4: _to_mxfp4,
    NVFP4: _to_nvfp4,
    Q1_0: _to_q1_0,
    Q2_0: _to_q2_0,
}
