"""Weight blocks into registers: every type becomes one of three forms that the kernels multiply.

- K: 256 elements as bytes q, a 16-bit scale s per 16 elements, and per 16 or 32 elements a 16-bit minimum m:
  x = d * s * q - dm * m. Types without minima count q from an offset; their m stands for that, times the scale.
- Fours: four blocks of 32 elements as bytes u: x = d * (u - offset) + m. One vector holds the first 16 elements of all
  blocks and another the last 16, so that lanes 4 i to 4 i + 3 of 32 bits belong to block i in both.
- Floats: 64 elements as floats.

Layouts: docs/protocol.md section 5.1. Elements stand in natural order, so activations do too. Nothing here branches on
data; a decoder reads its own blocks and asks for lines 2048 bytes ahead, nothing else.
"""

from typing import Any

from llvmlite import ir

from drover.worker.devices.cpu.kinds import MXFP4, Q1_0, Q2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from drover.worker.devices.cpu.simd import (
    AVX2,
    AVX512,
    I1,
    I8,
    I16,
    I64,
    Vector,
    broadcast,
    call,
    constant,
    emits,
    f32x16,
    halves,
    i8x16,
    i8x32,
    i8x64,
    i16x8,
    i16x16,
    i16x32,
    i32x16,
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

AHEAD = 2048
"""Bytes between a load and the line asked for meanwhile; measured, see the kernel benchmark."""

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


@emits(i8x64, i8x64)
def _high_nibbles(b: Any, x: Any) -> Any:
    fours = b.lshr(b.bitcast(x, i16x32.ir), constant(i16x32, 4))
    return b.and_(b.bitcast(fours, i8x64.ir), constant(i8x64, 15))


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
    return q0, q1, q2, q3, _twice_each(scales), _each(minima), load_f16(w), load_f16(w + 2)


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
    return q0, q1, q2, q3, _twice_each(scales), _each(minima), load_f16(w), load_f16(w + 2)


@jit_inline
def decode_q6_k(w: int) -> Any:
    """210 bytes to a K block: q counts from 32."""
    for i in range(4):
        prefetch(w + AHEAD + 64 * i)
    low0 = load_i8x64(w)
    low1 = load_i8x64(w + 64)
    q0 = (low0 & 15) | (_shifted_left(w + 128, 4, 2) & 48)
    q1 = _high_nibbles(low0) | (shifted(w + 128, 0, 2) & 48)
    q2 = (low1 & 15) | (_shifted_left(w + 160, 4, 2) & 48)
    q3 = _high_nibbles(low1) | (shifted(w + 160, 0, 2) & 48)
    scales = load_i8_i16x16(w + 192)
    d = load_f16(w + 208)
    return q0, q1, q2, q3, scales, scales << 5, d, d


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
    return q0, q1, q2, q3, both & 15, (both >> 4) & 15, load_f16(w + 80), load_f16(w + 82)


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
    d = load_f16(w + 108)
    return q0, q1, q2, q3, scales, scales << 2, d, d


@emits(i16x16)
def _thirty_two(b: Any) -> Any:
    return constant(i16x16, 32)


# ---- K types by codebook

_CODEBOOK = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def _table_lookup(b: Any, table: list[int], x: Any) -> Any:
    n = x.type.count
    if n == 64 and AVX512:
        return call(b, "llvm.x86.avx512.pshuf.b.512", x.type, constant(i8x64, table * 4), x)
    if n == 32 and AVX2:
        return call(b, "llvm.x86.avx2.pshuf.b", x.type, constant(i8x32, table * 2), x)
    if n == 64 and AVX2:
        return joined(b, *(_table_lookup(b, table, half) for half in halves(b, x)))
    kind = Vector("i8", n)
    result = constant(kind, table[0])
    for i, value in enumerate(table[1:], 1):
        result = b.select(b.icmp_unsigned("==", x, constant(kind, i)), constant(kind, value), result)
    return result


@emits(i8x64, i8x64)
def _from_codebook(b: Any, x: Any) -> Any:
    """The values of IQ4_NL, plus 128."""
    return _table_lookup(b, [value + 128 - 256 * (value >= 0) for value in _CODEBOOK], x)


@emits(i8x64, i64)
def _nibbles_by_16(b: Any, a: Any) -> Any:
    """32 bytes as 64 nibbles: the low ones of the first 16, their high ones, then those of the last 16."""
    twice = shuffle(b, b.bitcast(read(b, a, i8x32.ir), i16x16.ir), [i // 16 * 8 + i % 8 for i in range(32)])
    shifted = b.lshr(twice, constant(i16x32, [i // 8 % 2 * 4 for i in range(32)]))
    return b.and_(b.bitcast(shifted, i8x64.ir), constant(i8x64, 15))


@jit_inline
def decode_iq4_xs(w: int) -> Any:
    """136 bytes to a K block: q counts from 128."""
    for i in range(3):
        prefetch(w + AHEAD + 64 * i)
    q0 = _from_codebook(_nibbles_by_16(w + 8))
    q1 = _from_codebook(_nibbles_by_16(w + 40))
    q2 = _from_codebook(_nibbles_by_16(w + 72))
    q3 = _from_codebook(_nibbles_by_16(w + 104))
    low = load_u32(w + 4)
    low = (low | low << 16) & 0x0000FFFF0000FFFF
    low = (low | low << 8) & 0x00FF00FF00FF00FF
    low = (low | low << 4) & 0x0F0F0F0F0F0F0F0F
    high = load_u16(w + 2)
    high = (high | high << 24) & 0x000000FF000000FF
    high = (high | high << 12) & 0x000F000F000F000F
    high = (high | high << 6) & 0x0303030303030303
    scales = _twice_each(low | high << 4) - _thirty_two()
    d = load_f16(w)
    return q0, q1, q2, q3, scales, scales << 7, d, d


# ---- blocks whose levels `levels` has looked up

LEVEL_UNIT = 320
"""Bytes of a block of 256: levels plus 128, then these:"""
LEVEL_SCALES = 256
"""sixteen scales (i16),"""
LEVEL_D = 288
"""and the factor of all (f32)."""


@jit_inline
def decode_levels(w: int) -> Any:
    """A block as `levels` leaves it to a K block: q counts from 128."""
    scales = load_i16x16(w + LEVEL_SCALES)
    d = load_f32(w + LEVEL_D)
    return load_i8x64(w), load_i8x64(w + 64), load_i8x64(w + 128), load_i8x64(w + 192), scales, scales << 7, d, d


# ---- blocks of 32, four at a time


def _four(b: Any, a: Any, stride: Any, kind: Any) -> Any:
    """16 bytes here and at three further places, `stride` bytes apart."""
    parts = [read(b, b.add(a, b.mul(stride, I64(i))), kind) for i in range(4)]
    return joined(b, joined(b, *parts[:2]), joined(b, *parts[2:]))


@emits(f32x16, i64, i64)
def _four_f16(b: Any, a: Any, stride: Any) -> Any:
    """The half-precision float that four blocks start with, four lanes each."""
    return widen_f16(b, shuffle(b, _four(b, a, stride, i16x8.ir), [i // 4 * 8 for i in range(16)]))


@emits(f32x16, i64, i64)
def _four_second_f16(b: Any, a: Any, stride: Any) -> Any:
    """The second half-precision float of four blocks, four lanes each."""
    return widen_f16(b, shuffle(b, _four(b, a, stride, i16x8.ir), [i // 4 * 8 + 1 for i in range(16)]))


@emits(i8x64, i64, i64)
def _four_of_16(b: Any, a: Any, stride: Any) -> Any:
    """Sixteen bytes of each of four blocks."""
    return _four(b, a, stride, i8x16.ir)


@emits(i8x64, i64)
def _fifth_bits(b: Any, bits: Any) -> Any:
    """64 bits, each as 16 or 0 in a byte."""
    return b.select(b.bitcast(bits, ir.VectorType(I1, 64)), constant(i8x64, 16), constant(i8x64, 0))


@jit_inline
def decode_q8_0(w: int) -> Any:
    """Four blocks of 34 bytes; offset 128."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    d = _four_f16(w, 34)
    return _four_of_16(w + 2, 34) ^ -128, _four_of_16(w + 18, 34) ^ -128, d, d


@jit_inline
def decode_q4_0(w: int) -> Any:
    """Four blocks of 18 bytes; offset 8."""
    prefetch(w + AHEAD)
    q = _four_of_16(w + 2, 18)
    d = _four_f16(w, 18)
    return q & 15, _high_nibbles(q), d, d


@jit_inline
def decode_iq4_nl(w: int) -> Any:
    """Four blocks of 18 bytes; offset 128."""
    prefetch(w + AHEAD)
    q = _four_of_16(w + 2, 18)
    d = _four_f16(w, 18)
    return _from_codebook(q & 15), _from_codebook(_high_nibbles(q)), d, d


@jit_inline
def decode_q4_1(w: int) -> Any:
    """Four blocks of 20 bytes; offset 0."""
    prefetch(w + AHEAD)
    q = _four_of_16(w + 4, 20)
    return q & 15, _high_nibbles(q), _four_f16(w, 20), _four_second_f16(w, 20)


@jit_inline
def _with_fifth_bits(q: Any, bits: int, stride: int) -> Any:
    """Nibbles of four blocks, completed by the bits of each block, `stride` bytes apart."""
    b0 = load_u32(bits)
    b1 = load_u32(bits + stride)
    b2 = load_u32(bits + 2 * stride)
    b3 = load_u32(bits + 3 * stride)
    low = (b0 & 0xFFFF) | ((b1 & 0xFFFF) << 16) | ((b2 & 0xFFFF) << 32) | (b3 << 48)
    high = (b0 >> 16) | (b1 & 0xFFFF0000) | ((b2 >> 16) << 32) | ((b3 >> 16) << 48)
    return (q & 15) | _fifth_bits(low), _high_nibbles(q) | _fifth_bits(high)


@jit_inline
def decode_q5_0(w: int) -> Any:
    """Four blocks of 22 bytes; offset 16."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    q = _with_fifth_bits(_four_of_16(w + 6, 22), w + 2, 22)
    d = _four_f16(w, 22)
    return q[0], q[1], d, d


@jit_inline
def decode_q5_1(w: int) -> Any:
    """Four blocks of 24 bytes; offset 0."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    q = _with_fifth_bits(_four_of_16(w + 8, 24), w + 4, 24)
    return q[0], q[1], _four_f16(w, 24), _four_second_f16(w, 24)


_FP4 = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0]
"""Twice the values of a 4-bit float e2m1, plus 12."""


@emits(i8x64, i8x64)
def _from_fp4(b: Any, x: Any) -> Any:
    return _table_lookup(b, _FP4, x)


@emits(f32x16, i64)
def _four_half_powers(b: Any, a: Any) -> Any:
    """Half the powers of two whose biased exponents are the first bytes of four blocks 17 bytes apart."""
    bytes_ = shuffle(b, _four(b, a, I64(17), i8x16.ir), [i // 4 * 16 for i in range(16)])
    e = b.zext(bytes_, i32x16.ir)
    normal = b.shl(b.sub(e, constant(i32x16, 1)), constant(i32x16, 23))
    small = b.shl(constant(i32x16, 1 << 21), e)
    return b.bitcast(b.select(b.icmp_unsigned("<", e, constant(i32x16, 2)), small, normal), f32x16.ir)


@jit_inline
def decode_mxfp4(w: int) -> Any:
    """Four blocks of 17 bytes; offset 12."""
    prefetch(w + AHEAD)
    q = _four_of_16(w + 1, 17)
    d = _four_half_powers(w)
    return _from_fp4(q & 15), _from_fp4(_high_nibbles(q)), d, d


def _nibbles_by_8(first: int) -> Any:
    def nibbles(b: Any, a: Any) -> Any:
        """Every other 8 bytes of two runs of 32, 36 bytes apart: low nibbles of 8 bytes, then their high ones."""
        eights = ir.VectorType(I64, 4)
        both = joined(b, read(b, a, eights), read(b, b.add(a, I64(36)), eights))
        twice = shuffle(b, both, [2 * (i // 2) + first for i in range(8)])
        shifted = b.lshr(twice, ir.Constant(twice.type, [i % 2 * 4 for i in range(8)]))
        return b.and_(b.bitcast(shifted, i8x64.ir), constant(i8x64, 15))

    nibbles.__name__ = f"nibbles_by_8_from_{first}"
    return emits(i8x64, i64)(nibbles)


_even_nibbles, _odd_nibbles = _nibbles_by_8(0), _nibbles_by_8(1)


def _half_e4m3(first: int) -> Any:
    def scales(b: Any, a: Any) -> Any:
        """Half of every other float e4m3 of those that two blocks of 36 bytes start with; 0 for no number."""
        fours = [read(b, b.add(a, I64(36 * i)), ir.VectorType(I8, 4)) for i in (0, 1)]
        x = b.zext(shuffle(b, joined(b, *fours), [2 * (i // 4) + first for i in range(16)]), i32x16.ir)
        x = b.and_(x, constant(i32x16, 127))
        normal = b.bitcast(b.add(b.shl(x, constant(i32x16, 20)), constant(i32x16, 119 << 23)), f32x16.ir)
        small = b.fmul(b.sitofp(x, f32x16.ir), constant(f32x16, 2.0**-10))
        value = b.select(b.icmp_unsigned("<", x, constant(i32x16, 8)), small, normal)
        return b.select(b.icmp_unsigned("==", x, constant(i32x16, 127)), constant(f32x16, 0.0), value)

    scales.__name__ = f"half_e4m3_from_{first}"
    return emits(f32x16, i64)(scales)


_even_scales, _odd_scales = _half_e4m3(0), _half_e4m3(1)


@jit_inline
def decode_nvfp4(w: int) -> Any:
    """Two blocks of 36 bytes; offset 12. The first and the last 16 of 32 elements have factors of their own."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    low, high = _from_fp4(_even_nibbles(w + 4)), _from_fp4(_odd_nibbles(w + 4))
    return low, high, _even_scales(w), _odd_scales(w)


@emits(i8x64, i64)
def _doubled_bits(b: Any, bits: Any) -> Any:
    """64 bits, each as 2 or 0 in a byte."""
    return b.select(b.bitcast(bits, ir.VectorType(I1, 64)), constant(i8x64, 2), constant(i8x64, 0))


@jit_inline
def decode_q1_0(w: int) -> Any:
    """A block of 18 bytes; offset 1."""
    prefetch(w + AHEAD)
    first, second = load_i64(w + 2), load_i64(w + 10)
    low = (first & 0xFFFF) | (first >> 16 & 0xFFFF0000) | (second & 0xFFFF) << 32 | (second >> 32) << 48
    high = (first >> 16 & 0xFFFF) | (first >> 48 & 0xFFFF) << 16 | (second >> 16 & 0xFFFF) << 32
    high |= second >> 48 << 48
    d = splat_f32x16(load_f16(w))
    return _doubled_bits(low), _doubled_bits(high), d, d


def _crumbs_by_16(first: int) -> Any:
    def crumbs(b: Any, a: Any) -> Any:
        """Every other 16 of the 2 times 64 fields of two bits in two runs of 16 bytes, 18 bytes apart."""
        parts = []
        for i in (0, 1):
            x = b.zext(read(b, b.add(a, I64(18 * i)), i8x16.ir), i32x16.ir)
            shifts = [b.shl(x, constant(i32x16, n)) for n in (6, 12, 18)]
            fields = b.or_(b.or_(x, shifts[0]), b.or_(shifts[1], shifts[2]))
            parts.append(b.and_(fields, constant(i32x16, 0x03030303)))
        lanes = [8 * (i // 4) + 4 * first + i % 4 for i in range(16)]
        return b.bitcast(shuffle(b, parts[0], lanes, parts[1]), i8x64.ir)

    crumbs.__name__ = f"crumbs_by_16_from_{first}"
    return emits(i8x64, i64)(crumbs)


_even_crumbs, _odd_crumbs = _crumbs_by_16(0), _crumbs_by_16(1)


@emits(f32x16, i64)
def _two_f16(b: Any, a: Any) -> Any:
    """The half-precision floats that two blocks of 18 bytes start with, eight lanes each."""
    both = [read(b, b.add(a, I64(18 * i)), i16x8.ir) for i in (0, 1)]
    return widen_f16(b, shuffle(b, both[0], [i // 8 * 8 for i in range(16)], both[1]))


@jit_inline
def decode_q2_0(w: int) -> Any:
    """Two blocks of 18 bytes; offset 1."""
    prefetch(w + AHEAD)
    d = _two_f16(w)
    return _even_crumbs(w + 2), _odd_crumbs(w + 2), d, d


@jit_inline
def decode_fours(kind: int, w: int) -> Any:
    """128 elements of any type with blocks of 32 to 128 whose blocks have one factor."""
    if kind == Q8_0:
        return decode_q8_0(w)
    if kind == Q4_0:
        return decode_q4_0(w)
    if kind == Q4_1:
        return decode_q4_1(w)
    if kind == Q5_0:
        return decode_q5_0(w)
    if kind == Q5_1:
        return decode_q5_1(w)
    if kind == MXFP4:
        return decode_mxfp4(w)
    if kind == Q1_0:
        return decode_q1_0(w)
    if kind == Q2_0:
        return decode_q2_0(w)
    return decode_iq4_nl(w)


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
