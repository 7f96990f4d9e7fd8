"""Weight blocks into registers: every type becomes one of three forms that the kernels multiply.

- K: 256 elements as bytes q, a 16-bit scale s per 16 elements, and per 16 or 32 elements a 16-bit minimum m:
  x = d * s * q - dm * m. Types without minima count q from `k_offset`; their m stands for that, times the scale.
- Fours: four blocks of 32 elements as bytes u: x = d * (u - offset) + m. One vector holds the first 16 elements of all
  blocks and another the last 16, so that lanes 4 i to 4 i + 3 of 32 bits belong to block i in both.
- Floats: 64 elements as floats.

Layouts: docs/protocol.md section 5.1. Elements stand in natural order, so activations do too. Nothing here branches on
data; a decoder reads its own blocks and asks for lines 2048 bytes ahead, nothing else.
"""

from typing import Any

from llvmlite import ir

from drover.ggml import types
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
    i64,
    jit,
    jit_inline,
    joined,
    load_bf16_f32x16,
    load_f16,
    load_f16_f32x16,
    load_f32x16,
    load_i8_i16x16,
    load_i8x64,
    load_i64,
    load_u8,
    load_u32,
    prefetch,
    read,
    shuffle,
    store_i8,
    widen_f16,
)

F32_ID, F16_ID, BF16_ID = types.F32.id, types.F16.id, types.BF16.id
Q4_0, Q4_1, Q5_0, Q5_1 = types.Q4_0.id, types.Q4_1.id, types.Q5_0.id, types.Q5_1.id
Q8_0, IQ4_NL = types.Q8_0.id, types.IQ4_NL.id
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = types.Q2_K.id, types.Q3_K.id, types.Q4_K.id, types.Q5_K.id, types.Q6_K.id

TYPES = frozenset((F32_ID, F16_ID, BF16_ID, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K))
"""The types there are decoders for."""
_SIZES = tuple(types.TYPES[i].type_size if i in TYPES else 0 for i in range(max(TYPES) + 1))

AHEAD = 2048
"""Bytes between a load and the line asked for meanwhile; measured, see the kernel benchmark."""

# ---- K types

_EIGHT = ir.VectorType(I8, 8)


@emits(i8x64, i64, i64, i64)
def _shifted(b: Any, a: Any, low: Any, high: Any) -> Any:
    """32 bytes twice, as 16-bit lanes: shifted right by `low` in the first half, by `high` in the second."""
    twice, counts = _twice_and_counts(b, a, low, high)
    return b.bitcast(b.lshr(twice, counts), i8x64.ir)


@emits(i8x64, i64, i64, i64)
def _shifted_left(b: Any, a: Any, low: Any, high: Any) -> Any:
    """Like `_shifted`, to the left."""
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
    q0 = _shifted(w + 16, 0, 4) & 15
    q1 = _shifted(w + 48, 0, 4) & 15
    q2 = _shifted(w + 80, 0, 4) & 15
    q3 = _shifted(w + 112, 0, 4) & 15
    return q0, q1, q2, q3, _twice_each(scales), _each(minima), load_f16(w), load_f16(w + 2)


@jit_inline
def decode_q5_k(w: int) -> Any:
    """176 bytes to a K block."""
    for i in range(3):
        prefetch(w + AHEAD + 64 * i)
    scales, minima = _six_bit_pairs(w + 4)
    q0 = (_shifted(w + 48, 0, 4) & 15) | (_shifted_left(w + 16, 4, 3) & 16)
    q1 = (_shifted(w + 80, 0, 4) & 15) | (_shifted_left(w + 16, 2, 1) & 16)
    q2 = (_shifted(w + 112, 0, 4) & 15) | (_shifted(w + 16, 0, 1) & 16)
    q3 = (_shifted(w + 144, 0, 4) & 15) | (_shifted(w + 16, 2, 3) & 16)
    return q0, q1, q2, q3, _twice_each(scales), _each(minima), load_f16(w), load_f16(w + 2)


@jit_inline
def decode_q6_k(w: int) -> Any:
    """210 bytes to a K block: q counts from 32."""
    for i in range(4):
        prefetch(w + AHEAD + 64 * i)
    low0 = load_i8x64(w)
    low1 = load_i8x64(w + 64)
    q0 = (low0 & 15) | (_shifted_left(w + 128, 4, 2) & 48)
    q1 = _high_nibbles(low0) | (_shifted(w + 128, 0, 2) & 48)
    q2 = (low1 & 15) | (_shifted_left(w + 160, 4, 2) & 48)
    q3 = _high_nibbles(low1) | (_shifted(w + 160, 0, 2) & 48)
    scales = load_i8_i16x16(w + 192)
    d = load_f16(w + 208)
    return q0, q1, q2, q3, scales, scales << 5, d, d


@jit_inline
def decode_q2_k(w: int) -> Any:
    """84 bytes to a K block."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    q0 = _shifted(w + 16, 0, 2) & 3
    q1 = _shifted(w + 16, 4, 6) & 3
    q2 = _shifted(w + 48, 0, 2) & 3
    q3 = _shifted(w + 48, 4, 6) & 3
    both = load_i8_i16x16(w)
    return q0, q1, q2, q3, both & 15, (both >> 4) & 15, load_f16(w + 80), load_f16(w + 82)


@jit_inline
def decode_q3_k(w: int) -> Any:
    """110 bytes to a K block: q counts from 4."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    q0 = (_shifted(w + 32, 0, 2) & 3) | (_shifted_left(w, 2, 1) & 4)
    q1 = (_shifted(w + 32, 4, 6) & 3) | (_shifted(w, 0, 1) & 4)
    q2 = (_shifted(w + 64, 0, 2) & 3) | (_shifted(w, 2, 3) & 4)
    q3 = (_shifted(w + 64, 4, 6) & 3) | (_shifted(w, 4, 5) & 4)
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


# ---- facts of types, and bytes


@jit
def is_float(kind: int) -> bool:
    """Whether elements are floats, one by one."""
    return kind in (F32_ID, F16_ID, BF16_ID)


@jit
def is_k(kind: int) -> bool:
    """Whether blocks hold 256 elements."""
    return kind in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)


@jit
def block_bytes(kind: int) -> int:
    """Bytes of a block, or of an element."""
    return _SIZES[kind]


@jit
def block_elements(kind: int) -> int:
    """Elements of a block."""
    if is_float(kind):
        return 1
    return 256 if is_k(kind) else 32


@jit
def has_constants(kind: int) -> bool:
    """Whether blocks of 32 have a constant to add."""
    return kind in (Q4_1, Q5_1)


@jit
def offset_of(kind: int) -> int:
    """What the bytes of a type with blocks of 32 count from."""
    if kind in (Q8_0, IQ4_NL):
        return 128
    if kind == Q4_0:
        return 8
    if kind == Q5_0:
        return 16
    return 0


@jit
def k_offset(kind: int) -> int:
    """What q counts from in a K type."""
    if kind == Q6_K:
        return 32
    return 4 if kind == Q3_K else 0


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
