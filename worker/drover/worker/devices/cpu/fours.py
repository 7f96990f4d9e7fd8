"""Blocks of 32 to 128 elements into registers, 128 elements at a time; the form is `weights`' fours.

Layouts: docs/protocol.md section 5.1. Codebooks are looked up within a register.
"""

from typing import Any

from llvmlite import ir

from drover.worker.devices.cpu.kinds import MXFP4, Q1_0, Q2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from drover.worker.devices.cpu.simd import (
    AVX2,
    AVX512,
    I1,
    I8,
    I64,
    Vector,
    call,
    constant,
    emits,
    f32x16,
    halves,
    i8x16,
    i8x32,
    i8x64,
    i16x8,
    i16x32,
    i32x16,
    i64,
    jit_inline,
    joined,
    load_f16,
    load_i64,
    load_u32,
    prefetch,
    read,
    shuffle,
    splat_f32x16,
    widen_f16,
)

AHEAD = 2816
"""Bytes between a load and the line asked for meanwhile: far enough for memory to answer, and not a multiple of 2048,
lest both fall into the same few lines of the first-level cache."""

# ---- nibbles, and what they stand for


@emits(i8x64, i8x64)
def high_nibbles(b: Any, x: Any) -> Any:
    """The upper four bits of bytes."""
    fours = b.lshr(b.bitcast(x, i16x32.ir), constant(i16x32, 4))
    return b.and_(b.bitcast(fours, i8x64.ir), constant(i8x64, 15))


CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


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
def sizes_in_codebook(b: Any, x: Any) -> Any:
    """The values of IQ4_NL without their signs: the first eight are negative."""
    return _table_lookup(b, [abs(value) for value in CODEBOOK], x)


@emits(i8x64, i8x64)
def _from_codebook(b: Any, x: Any) -> Any:
    """The values of IQ4_NL, plus 128."""
    return _table_lookup(b, [value + 128 - 256 * (value >= 0) for value in CODEBOOK], x)


# ---- four blocks of 32


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
    return q & 15, high_nibbles(q), d, d


@jit_inline
def decode_iq4_nl(w: int) -> Any:
    """Four blocks of 18 bytes; offset 128."""
    prefetch(w + AHEAD)
    q = _four_of_16(w + 2, 18)
    d = _four_f16(w, 18)
    return _from_codebook(q & 15), _from_codebook(high_nibbles(q)), d, d


@jit_inline
def decode_q4_1(w: int) -> Any:
    """Four blocks of 20 bytes; offset 0."""
    prefetch(w + AHEAD)
    q = _four_of_16(w + 4, 20)
    return q & 15, high_nibbles(q), _four_f16(w, 20), _four_second_f16(w, 20)


@jit_inline
def _with_fifth_bits(q: Any, bits: int, stride: int) -> Any:
    """Nibbles of four blocks, completed by the bits of each block, `stride` bytes apart."""
    b0 = load_u32(bits)
    b1 = load_u32(bits + stride)
    b2 = load_u32(bits + 2 * stride)
    b3 = load_u32(bits + 3 * stride)
    low = (b0 & 0xFFFF) | ((b1 & 0xFFFF) << 16) | ((b2 & 0xFFFF) << 32) | (b3 << 48)
    high = (b0 >> 16) | (b1 & 0xFFFF0000) | ((b2 >> 16) << 32) | ((b3 >> 16) << 48)
    return (q & 15) | _fifth_bits(low), high_nibbles(q) | _fifth_bits(high)


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
    return _from_fp4(q & 15), _from_fp4(high_nibbles(q)), d, d


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
