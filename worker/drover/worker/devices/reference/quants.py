"""Quantised blocks to float32, whole arrays at a time (docs/protocol.md section 5.1).

A reader takes bytes shaped (…, bytes of a block) and gives (…, elements of a block). Arithmetic is float32 in the order
the formulas stand, so that values agree to the bit with what everyone else reads.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

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
    Q8_1,
    Q8_K,
    TQ1_0,
    TQ2_0,
    TensorType,
)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The sixteen levels of IQ4."""
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of a 4-bit float e2m1."""
UE4M3 = np.array([np.ldexp(m if e == 0 else 8 + m, max(e, 1) - 10) for e in range(16) for m in range(8)], np.float32)
UE4M3[127] = 0
"""The values of an unsigned 8-bit float e4m3; its last code is none."""


def _half(block: Bytes, at: int) -> Floats:
    """The f16 at a byte offset, with a last dimension of one."""
    return np.ascontiguousarray(block[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles of all bytes, then high nibbles."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _crumbs(packed: Bytes) -> Bytes:
    """Two-bit fields, lowest of all bytes first: shape (…, bytes) to (…, 4, bytes)."""
    return np.stack([(packed >> (2 * s)) & 3 for s in range(4)], axis=-2)


def _bits(packed: Bytes) -> Bytes:
    """Bits, lowest of each byte first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _q4_0(b: Bytes) -> Array:
    return (_nibbles(b[..., 2:]).astype(np.float32) - 8) * _half(b, 0)


def _q4_1(b: Bytes) -> Array:
    return _nibbles(b[..., 4:]).astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q5_0(b: Bytes) -> Array:
    q = _nibbles(b[..., 6:]) | _bits(b[..., 2:6]) << 4
    return (q.astype(np.float32) - 16) * _half(b, 0)


def _q5_1(b: Bytes) -> Array:
    q = _nibbles(b[..., 8:]) | _bits(b[..., 4:8]) << 4
    return q.astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q8_0(b: Bytes) -> Array:
    return b[..., 2:].view(np.int8).astype(np.float32) * _half(b, 0)


def _q8_1(b: Bytes) -> Array:
    return b[..., 4:].view(np.int8).astype(np.float32) * _half(b, 0)


def _q8_k(b: Bytes) -> Array:
    return b[..., 4:260].view(np.int8).astype(np.float32) * np.ascontiguousarray(b[..., :4]).view(np.float32)


def _q2_k(b: Bytes) -> Array:
    lead = b.shape[:-1]
    scales = b[..., :16].reshape(*lead, 2, 4, 2, 1)
    q = _crumbs(b[..., 16:80].reshape(*lead, 2, 32)).reshape(*lead, 2, 4, 2, 16).astype(np.float32)
    d, m = (_half(b, at)[..., None, None, None] for at in (80, 82))
    return (d * (scales & 15) * q - m * (scales >> 4)).reshape(*lead, 256)


def _q3_k(b: Bytes) -> Array:
    lead = b.shape[:-1]
    high = _bits(b[..., :32, None]).swapaxes(-1, -2).reshape(*lead, 2, 4, 2, 16)
    low = _crumbs(b[..., 32:96].reshape(*lead, 2, 32)).reshape(*lead, 2, 4, 2, 16)
    q = low.astype(np.float32) - 4 * (1 - high.astype(np.float32))
    packed = b[..., 96:108]
    upper = _crumbs(packed[..., 8:]).reshape(*lead, 16)
    scales = (_nibbles(packed[..., :8]) | upper << 4).astype(np.float32) - 32
    d = _half(b, 108)[..., None, None, None]
    return (d * scales.reshape(*lead, 2, 4, 2, 1) * q).reshape(*lead, 256)


def six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight scales and eight minima of Q4_K and Q5_K from their twelve bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return scales, minima


def _k_pairs(b: Bytes, q: Array) -> Array:
    """Q4_K and Q5_K values from their (…, 8, 32) levels."""
    scales, minima = six_bit_pairs(b[..., 4:16])
    d, m = _half(b, 0)[..., None], _half(b, 2)[..., None]
    values = d * scales[..., None] * q.astype(np.float32) - m * minima[..., None]
    return values.reshape(*b.shape[:-1], 256)


def _q4_k(b: Bytes) -> Array:
    return _k_pairs(b, _nibbles(b[..., 16:].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32))


def _q5_k(b: Bytes) -> Array:
    low = _nibbles(b[..., 48:].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    high = _bits(b[..., 16:48, None]).swapaxes(-1, -2)
    return _k_pairs(b, low | high << 4)


def _q6_k(b: Bytes) -> Array:
    lead = b.shape[:-1]
    low = _nibbles(b[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 2, 4, 32)
    high = _crumbs(b[..., 128:192].reshape(*lead, 2, 32))
    q = (low | high << 4).astype(np.float32) - 32
    scales = b[..., 192:208].view(np.int8).astype(np.float32)
    d = _half(b, 208)[..., None]
    return (d * scales[..., None] * q.reshape(*lead, 16, 16)).reshape(*lead, 256)


def _iq4_nl(b: Bytes) -> Array:
    return NONLINEAR[_nibbles(b[..., 2:])] * _half(b, 0)


def _iq4_xs(b: Bytes) -> Array:
    lead = b.shape[:-1]
    high = np.ascontiguousarray(b[..., 2:4]).view(np.uint16)
    low = b[..., 4:8]
    nibbles = np.stack((low & 15, low >> 4), axis=-1).reshape(*lead, 8)
    scales = (nibbles | ((high >> (2 * np.arange(8, dtype=np.uint16))) & 3) << 4).astype(np.float32) - 32
    values: Floats = (_half(b, 0) * scales)[..., None] * NONLINEAR[_nibbles(b[..., 8:].reshape(*lead, 8, 16))]
    return values.reshape(*lead, 256)


def _tq1_0(b: Bytes) -> Array:
    parts = ((b[..., :32], 5), (b[..., 32:48], 5), (b[..., 48:52], 4))
    trits = []
    for packed, count in parts:
        for n in range(count):
            shifted = (packed.astype(np.uint16) * 3**n).astype(np.uint8)
            trits.append((shifted.astype(np.uint16) * 3) >> 8)
    return (np.concatenate(trits, axis=-1).astype(np.float32) - 1) * _half(b, 52)


def _tq2_0(b: Bytes) -> Array:
    lead = b.shape[:-1]
    q = _crumbs(b[..., :64].reshape(*lead, 2, 32)).reshape(*lead, 256)
    return (q.astype(np.float32) - 1) * _half(b, 64)


def _mxfp4(b: Bytes) -> Array:
    exponent = b[..., :1].astype(np.int32) - 128
    return (FP4[_nibbles(b[..., 1:])] * np.ldexp(1.0, exponent)).astype(np.float32)


def _nvfp4(b: Bytes) -> Array:
    lead = b.shape[:-1]
    scale = np.float32(0.5) * UE4M3[b[..., :4] & 127]
    values: Floats = FP4[_nibbles(b[..., 4:].reshape(*lead, 4, 8))] * scale[..., None]
    return values.reshape(*lead, 64)


def _q1_0(b: Bytes) -> Array:
    return np.where(_bits(b[..., 2:]) == 1, _half(b, 0), -_half(b, 0))


def _q2_0(b: Bytes) -> Array:
    q = _crumbs(b[..., 2:]).swapaxes(-1, -2).reshape(*b.shape[:-1], 64)
    return (q.astype(np.float32) - 1) * _half(b, 0)


DEQUANTIZE: dict[TensorType, Callable[[Bytes], Array]] = {
    Q4_0: _q4_0,
    Q4_1: _q4_1,
    Q5_0: _q5_0,
    Q5_1: _q5_1,
    Q8_0: _q8_0,
    Q8_1: _q8_1,
    Q8_K: _q8_k,
    Q2_K: _q2_k,
    Q3_K: _q3_k,
    Q4_K: _q4_k,
    Q5_K: _q5_k,
    Q6_K: _q6_k,
    IQ4_NL: _iq4_nl,
    IQ4_XS: _iq4_xs,
    TQ1_0: _tq1_0,
    TQ2_0: _tq2_0,
    MXFP4: _mxfp4,
    NVFP4: _nvfp4,
    Q1_0: _q1_0,
    Q2_0: _q2_0,
}
