"""Weight blocks into registers: every type becomes one of four forms that the kernels multiply.

- K: 256 elements as bytes q, a 16-bit scale s per 16 elements, per 16 or 32 elements a 16-bit minimum m, and d and dm
  by turns: x = d * s * q - dm * m. Types without minima count q from an offset; their m stands for that, times the
  scale. Where a scale belongs to 32 elements all eight follow as bytes, repeated.
- Signed: like K without minima, but q is a size at most 127 and the signs stand apart, a bit each.
- Fours: four blocks of 32 elements as bytes u: x = d * (u - offset) + m. One vector holds the first 16 elements of all
  blocks and another the last 16, so that lanes 4 i to 4 i + 3 of 32 bits belong to block i in both.
- Floats: 64 elements as floats.

Layouts: docs/protocol.md section 5.1. Elements stand in natural order, so activations do too. Nothing here branches on
data; a decoder reads its own blocks and asks for lines `AHEAD` bytes further on, nothing else.
"""

from typing import Any

from llvmlite import ir

from drover.worker.devices.cpu.fours import AHEAD, high_nibbles, sizes_in_codebook
from drover.worker.devices.cpu.simd import (
    I1,
    I8,
    I16,
    I32,
    I64,
    broadcast,
    constant,
    emits,
    f32x16,
    i8x16,
    i8x32,
    i8x64,
    i16x8,
    i16x16,
    i16x32,
    i64,
    jit,
    jit_inline,
    joined,
    load_bf16_f32x16,
    load_f16,
    load_f16_f32x16,
    load_f32,
    load_f32x16,
    load_i8_i16x16,
    load_i8x64,
    load_i16x16,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    prefetch,
    read,
    shuffle,
    splat_f32x16,
    store_i8,
    widen_f16,
)

# ---- K types

_EIGHT = ir.VectorType(I8, 8)


@emits(i8x64, i64, i64, i64)
def shifted(b: Any, a: Any, low: Any, high: Any) -> Any:
    """32 bytes twice, as 16-bit lanes: shifted right by `low` in the first half, by `high` in the second."""
    twice, counts = _twice_and_counts(b, a, low, high)
    return b.bitcast(b.lshr(twice, counts), i8x64.ir)


@emits(i8x64, i64, i64, i64)
def _shifted_left(b: Any, a: Any, low: Any, high: Any) -> Any:
    """Like `shifted`, to the left."""
    twice, counts = _twice_and_counts(b, a, low, high)
    return b.bitcast(b.shl(twice, counts), i8x64.ir)


def _twice_and_counts(b: Any, a: Any, low: Any, high: Any) -> tuple[Any, Any]:
    twice = shuffle(b, b.bitcast(read(b, a, i8x32.ir), i16x16.ir), [*range(16)] * 2)
    counts = joined(b, broadcast(b, b.trunc(low, I16), 16), broadcast(b, b.trunc(high, I16), 16))
    return twice, counts


@emits(i16x16, i64)
def _twice_each(b: Any, x: Any) -> Any:
    """Eight bytes of an integer, each twice, as 16-bit integers."""
    return b.zext(shuffle(b, b.bitcast(x, _EIGHT), [i // 2 for i in range(16)]), i16x16.ir)


@emits(i16x8, i64)
def _each(b: Any, x: Any) -> Any:
    """Eight bytes of an integer as 16-bit integers."""
    return b.zext(b.bitcast(x, _EIGHT), i16x8.ir)


@emits(i16x16, i64, i64)
def _bytes_i16(b: Any, low: Any, high: Any) -> Any:
    """Sixteen bytes of two integers as 16-bit integers."""
    pair = b.insert_element(ir.Constant(ir.VectorType(I64, 2), ir.Undefined), low, ir.IntType(32)(0))
    pair = b.insert_element(pair, high, ir.IntType(32)(1))
    return b.zext(b.bitcast(pair, i8x16.ir), i16x16.ir)


@emits(i8x64, i64)
def _repeated(b: Any, x: Any) -> Any:
    """The eight bytes of an integer, eight times."""
    return b.bitcast(broadcast(b, x, 8), i8x64.ir)


@emits(f32x16, i64)
def _pairs(b: Any, a: Any) -> Any:
    """Two half-precision floats by turns."""
    return widen_f16(b, b.bitcast(broadcast(b, read(b, a, I32), 8), i16x16.ir))


@jit_inline
def _six_bit_pairs(w: int) -> Any:
    """The 8 scales and 8 minima of Q4_K and Q5_K, as the bytes of two integers."""
    u0 = load_u32(w)
    u1 = load_u32(w + 4)
    u2 = load_u32(w + 8)
    scales_high = (u2 & 0x0F0F0F0F) | ((u0 >> 2) & 0x30303030)
    minima_high = ((u2 >> 4) & 0x0F0F0F0F) | ((u1 >> 2) & 0x30303030)
    return (u0 & 0x3F3F3F3F) | (scales_high << 32), (u1 & 0x3F3F3F3F) | (minima_high << 32)


@jit_inline
def decode_q4_k(w: int) -> Any:
    """144 bytes to a K block: q, scales, minima, d and dm."""
    for i in range(3):
        prefetch(w + AHEAD + 64 * i)
    scales, minima = _six_bit_pairs(w + 4)
    q0 = shifted(w + 16, 0, 4) & 15
    q1 = shifted(w + 48, 0, 4) & 15
    q2 = shifted(w + 80, 0, 4) & 15
    q3 = shifted(w + 112, 0, 4) & 15
    return q0, q1, q2, q3, _twice_each(scales), _each(minima), _pairs(w), _repeated(scales)


@jit_inline
def decode_q5_k(w: int) -> Any:
    """176 bytes to a K block."""
    for i in range(3):
        prefetch(w + AHEAD + 64 * i)
    scales, minima = _six_bit_pairs(w + 4)
    q0 = (shifted(w + 48, 0, 4) & 15) | (_shifted_left(w + 16, 4, 3) & 16)
    q1 = (shifted(w + 80, 0, 4) & 15) | (_shifted_left(w + 16, 2, 1) & 16)
    q2 = (shifted(w + 112, 0, 4) & 15) | (shifted(w + 16, 0, 1) & 16)
    q3 = (shifted(w + 144, 0, 4) & 15) | (shifted(w + 16, 2, 3) & 16)
    return q0, q1, q2, q3, _twice_each(scales), _each(minima), _pairs(w), _repeated(scales)


@jit_inline
def decode_q6_k(w: int) -> Any:
    """210 bytes to a K block: q counts from 32."""
    for i in range(4):
        prefetch(w + AHEAD + 64 * i)
    low0 = load_i8x64(w)
    low1 = load_i8x64(w + 64)
    q0 = (low0 & 15) | (_shifted_left(w + 128, 4, 2) & 48)
    q1 = high_nibbles(low0) | (shifted(w + 128, 0, 2) & 48)
    q2 = (low1 & 15) | (_shifted_left(w + 160, 4, 2) & 48)
    q3 = high_nibbles(low1) | (shifted(w + 160, 0, 2) & 48)
    scales = load_i8_i16x16(w + 192)
    return q0, q1, q2, q3, scales, scales << 5, splat_f32x16(load_f16(w + 208))


@jit_inline
def decode_q2_k(w: int) -> Any:
    """84 bytes to a K block."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    q0 = shifted(w + 16, 0, 2) & 3
    q1 = shifted(w + 16, 4, 6) & 3
    q2 = shifted(w + 48, 0, 2) & 3
    q3 = shifted(w + 48, 4, 6) & 3
    both = load_i8_i16x16(w)
    return q0, q1, q2, q3, both & 15, (both >> 4) & 15, _pairs(w + 80)


@jit_inline
def decode_q3_k(w: int) -> Any:
    """110 bytes to a K block: q counts from 4."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    q0 = (shifted(w + 32, 0, 2) & 3) | (_shifted_left(w, 2, 1) & 4)
    q1 = (shifted(w + 32, 4, 6) & 3) | (shifted(w, 0, 1) & 4)
    q2 = (shifted(w + 64, 0, 2) & 3) | (shifted(w, 2, 3) & 4)
    q3 = (shifted(w + 64, 4, 6) & 3) | (shifted(w, 4, 5) & 4)
    low = load_i64(w + 96)
    high = load_u32(w + 104)
    first = (high & 0x03030303) | (((high >> 2) & 0x03030303) << 32)
    second = ((high >> 4) & 0x03030303) | (((high >> 6) & 0x03030303) << 32)
    scales = _bytes_i16((low & 0x0F0F0F0F0F0F0F0F) | (first << 4), ((low >> 4) & 0x0F0F0F0F0F0F0F0F) | (second << 4))
    scales = scales - _thirty_two()
    return q0, q1, q2, q3, scales, scales << 2, splat_f32x16(load_f16(w + 108))


@emits(i16x16)
def _thirty_two(b: Any) -> Any:
    return constant(i16x16, 32)


# ---- K types by codebook


@emits(i8x64, i64)
def _nibbles_by_16(b: Any, a: Any) -> Any:
    """32 bytes as 64 nibbles: the low ones of the first 16, their high ones, then those of the last 16."""
    twice = shuffle(b, b.bitcast(read(b, a, i8x32.ir), i16x16.ir), [i // 16 * 8 + i % 8 for i in range(32)])
    shifted = b.lshr(twice, constant(i16x32, [i // 8 % 2 * 4 for i in range(32)]))
    return b.and_(b.bitcast(shifted, i8x64.ir), constant(i8x64, 15))


@emits(i64, i8x64)
def _below_eight(b: Any, x: Any) -> Any:
    """Which of 64 bytes are less than 8, a bit each."""
    return b.bitcast(b.icmp_unsigned("<", x, constant(i8x64, 8)), I64)


@jit_inline
def decode_iq4_xs(w: int) -> Any:
    """136 bytes to a signed block."""
    for i in range(3):
        prefetch(w + AHEAD + 64 * i)
    q0, q1, q2, q3 = _nibbles_by_16(w + 8), _nibbles_by_16(w + 40), _nibbles_by_16(w + 72), _nibbles_by_16(w + 104)
    low = load_u32(w + 4)
    low = (low | low << 16) & 0x0000FFFF0000FFFF
    low = (low | low << 8) & 0x00FF00FF00FF00FF
    low = (low | low << 4) & 0x0F0F0F0F0F0F0F0F
    high = load_u16(w + 2)
    high = (high | high << 24) & 0x000000FF000000FF
    high = (high | high << 12) & 0x000F000F000F000F
    high = (high | high << 6) & 0x0303030303030303
    scales = _twice_each(low | high << 4) - _thirty_two()
    signs = _below_eight(q0), _below_eight(q1), _below_eight(q2), _below_eight(q3)
    return (
        sizes_in_codebook(q0),
        sizes_in_codebook(q1),
        sizes_in_codebook(q2),
        sizes_in_codebook(q3),
        scales,
        load_f16(w),
        signs,
    )


# ---- ternary types


@emits(i16x16)
def _ones(b: Any) -> Any:
    return constant(i16x16, 1)


@jit_inline
def decode_tq2_0(w: int) -> Any:
    """66 bytes to a K block: q counts from 1."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    q0 = shifted(w, 0, 2) & 3
    q1 = shifted(w, 4, 6) & 3
    q2 = shifted(w + 32, 0, 2) & 3
    q3 = shifted(w + 32, 4, 6) & 3
    return q0, q1, q2, q3, _ones(), _ones(), splat_f32x16(load_f16(w + 64))


def _threefold(b: Any, x: Any) -> Any:
    return b.add(x, b.add(x, x))


def _digits(b: Any, x: Any) -> Any:
    """The first digits of base 3 of bytes: 3 x / 256."""
    some = b.select(b.icmp_unsigned(">", x, constant(i8x64, 85)), constant(i8x64, 1), constant(i8x64, 0))
    return b.select(b.icmp_unsigned(">", x, constant(i8x64, 170 - 256)), constant(i8x64, 2), some)


def _five_digits(first: int) -> Any:
    def digits(b: Any, w: Any) -> Any:
        """64 of the digits of 32 bytes with five each, 16 bytes with five each, and 4 bytes with four."""
        x, y, z = (read(b, b.add(w, I64(at)), ir.VectorType(I8, n)) for at, n in ((0, 32), (32, 16), (48, 4)))
        for _ in range(2 * first):
            x = _threefold(b, x)
        if first < 2:
            return _digits(b, joined(b, x, _threefold(b, x)))
        tripled = _threefold(b, y)
        if first == 2:
            return _digits(b, joined(b, x, joined(b, y, tripled)))
        powers = [_threefold(b, tripled)]
        for _ in range(2):
            powers.append(_threefold(b, powers[-1]))
        rest = [z]
        for _ in range(3):
            rest.append(_threefold(b, rest[-1]))
        last = joined(b, joined(b, *rest[:2]), joined(b, *rest[2:]))
        return _digits(b, joined(b, joined(b, *powers[:2]), joined(b, powers[2], last)))

    digits.__name__ = f"five_digits_{first}"
    return emits(i8x64, i64)(digits)


_digits0, _digits1, _digits2, _digits3 = map(_five_digits, range(4))


@jit_inline
def decode_tq1_0(w: int) -> Any:
    """54 bytes to a K block: q counts from 1."""
    prefetch(w + AHEAD)
    return _digits0(w), _digits1(w), _digits2(w), _digits3(w), _ones(), _ones(), splat_f32x16(load_f16(w + 52))


# ---- signed blocks

LEVEL_UNIT = 384
"""Bytes of a block of 256 that `levels` has looked up: sizes of levels, then"""
LEVEL_SCALES = 256
"""sixteen scales (i16),"""
LEVEL_SIGNS = 288
"""a bit for each level, set where it is negative,"""
LEVEL_D = 320
"""and the factor of all (f32)."""


@jit_inline
def decode_levels(w: int) -> Any:
    """A block as `levels` leaves it to a signed block."""
    at = w + LEVEL_SIGNS
    signs = load_i64(at), load_i64(at + 8), load_i64(at + 16), load_i64(at + 24)
    scales = load_i16x16(w + LEVEL_SCALES)
    q0, q1, q2, q3 = load_i8x64(w), load_i8x64(w + 64), load_i8x64(w + 128), load_i8x64(w + 192)
    return q0, q1, q2, q3, scales, load_f32(w + LEVEL_D), signs


@emits(i8x64, i8x64, i64)
def _from_128(b: Any, x: Any, signs: Any) -> Any:
    """128 and more, or less where a sign is set."""
    middle = constant(i8x64, -128)
    return b.select(b.bitcast(signs, ir.VectorType(I1, 64)), b.sub(middle, x), b.add(middle, x))


@jit_inline
def as_k(block: Any) -> Any:
    """A signed block as a K block: q counts from 128."""
    q0, q1, q2, q3, scales, d, signs = block
    q0, q1 = _from_128(q0, signs[0]), _from_128(q1, signs[1])
    q2, q3 = _from_128(q2, signs[2]), _from_128(q3, signs[3])
    return q0, q1, q2, q3, scales, scales << 7, splat_f32x16(d)


# ---- floats


@jit_inline
def decode_f32(w: int) -> Any:
    """256 bytes to 64 floats."""
    for i in range(4):
        prefetch(w + AHEAD + 64 * i)
    return load_f32x16(w), load_f32x16(w + 64), load_f32x16(w + 128), load_f32x16(w + 192)


@jit_inline
def decode_f16(w: int) -> Any:
    """128 bytes to 64 floats."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    return load_f16_f32x16(w), load_f16_f32x16(w + 32), load_f16_f32x16(w + 64), load_f16_f32x16(w + 96)


@jit_inline
def decode_bf16(w: int) -> Any:
    """128 bytes to 64 floats."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    return load_bf16_f32x16(w), load_bf16_f32x16(w + 32), load_bf16_f32x16(w + 64), load_bf16_f32x16(w + 96)


# ---- bytes


@jit
def clear(a: int, size: int) -> None:
    """Zero bytes."""
    for i in range(size):
        store_i8(a + i, 0)


@jit
def copy(a: int, out: int, size: int) -> None:
    """Copy bytes; the ranges are apart."""
    for i in range(size):
        store_i8(out + i, load_u8(a + i))
