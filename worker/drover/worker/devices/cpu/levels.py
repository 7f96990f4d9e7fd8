"""Blocks of 256 whose levels are looked up, to blocks of one simple type in memory: levels, scales and a factor.

The levels of IQ1, IQ2 and IQ3 are points of a grid, of 4 or 8 levels each, with signs beside them.
Layouts: docs/protocol.md section 5.1; what comes out: `LEVEL_UNIT` and after it in `weights`. Grids become constants of
the compiled code, so the `gguf` package is needed where kernels are compiled.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32
from numba.core import cgutils

from drover.ggml import types
from drover.ggml.types import TensorType
from drover.worker.devices.cpu.fours import AHEAD
from drover.worker.devices.cpu.kinds import IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, block_bytes
from drover.worker.devices.cpu.simd import (
    AVX512,
    I1,
    I8,
    I16,
    I32,
    I64,
    Vector,
    broadcast,
    call,
    constant,
    emits,
    i8x16,
    i8x32,
    i8x64,
    i16x8,
    i16x16,
    i16x32,
    i32x8,
    i32x16,
    i64,
    jit_inline,
    load_f16,
    load_i64,
    load_u16,
    load_u32,
    prefetch,
    read,
    shuffle,
    store,
    store_f32,
    store_i16,
    store_i64,
    void,
    write,
)
from drover.worker.devices.cpu.weights import LEVEL_D, LEVEL_SCALES, LEVEL_SIGNS, LEVEL_UNIT
from drover.worker.devices.reference import grids

# ---- grids


def _gather(b: Any, table: Any, indices: Any) -> Any:
    """The integers of a table at some indices (i32), as a vector."""
    n, element = indices.type.count, table.type.pointee.element
    kind = ir.VectorType(element, n)
    if AVX512:
        name = {8: "dpq", 16: "dpi"}[n]
        every = ir.Constant(ir.VectorType(I1, n), [1] * n)
        base = b.bitcast(table, I8.as_pointer())
        nothing = ir.Constant(kind, [0] * n)
        scale = I32(element.width // 8)
        return call(b, f"llvm.x86.avx512.mask.gather.{name}.512", kind, nothing, base, indices, every, scale)
    found = ir.Constant(kind, ir.Undefined)
    for i in range(n):
        place = b.gep(table, [I64(0), b.zext(b.extract_element(indices, I32(i)), I64)])
        found = b.insert_element(found, b.load(place), I32(i))
    return found


def _table(b: Any, kind: TensorType, factor: int = 1) -> Any:
    """The points of a grid as integers, their levels times `factor`: a constant of the module."""
    name = f"grid_{kind.name}"
    if name in b.module.globals:
        return b.module.globals[name]
    levels = (grids.points(kind) * np.int8(factor)).view(np.uint8)
    numbers = levels.view(f"<u{levels.shape[1]}")[:, 0].tolist()
    element = ir.IntType(8 * levels.shape[1])
    return cgutils.global_constant(b.module, name, ir.Constant(ir.ArrayType(element, len(numbers)), numbers))


def _points(kind: TensorType, indices: Vector, factor: int = 1) -> Any:
    """An instruction that looks points up: 64 levels, times `factor`."""

    def points(b: Any, x: Any) -> Any:
        return b.bitcast(_gather(b, _table(b, kind, factor), x), i8x64.ir)

    points.__name__ = f"points_{kind.name}"
    return emits(i8x64, indices)(points)


_iq2_xxs, _iq2_xs, _iq2_s = (_points(kind, i32x8) for kind in (types.IQ2_XXS, types.IQ2_XS, types.IQ2_S))
_iq3_xxs, _iq3_s = (_points(kind, i32x16) for kind in (types.IQ3_XXS, types.IQ3_S))
_iq1 = _points(types.IQ1_S, i32x8, 8)


# ---- indices


def _bytes_of(b: Any, x: Any) -> Any:
    return b.zext(b.bitcast(x, ir.VectorType(I8, 8)), i32x8.ir)


@emits(i32x8, i64)
def _each_byte(b: Any, x: Any) -> Any:
    """Eight bytes of an integer."""
    return _bytes_of(b, x)


def _with_fields(shifts: list[int], mask: int) -> Any:
    def indices(b: Any, low: Any, high: Any) -> Any:
        """Eight bytes, each with bits of a field of `high` above it."""
        spread = broadcast(b, b.trunc(high, I32), 8)
        fields = b.and_(b.lshr(spread, constant(i32x8, shifts)), constant(i32x8, mask))
        return b.or_(_bytes_of(b, low), b.shl(fields, constant(i32x8, 8)))

    indices.__name__ = f"indices_{shifts[1]}_{shifts[4]}"
    return emits(i32x8, i64, i64)(indices)


_iq2_s_indices = _with_fields([0, 2, 4, 6, 8, 10, 12, 14], 3)
_iq1_s_indices = _with_fields([0, 3, 6, 9, 16, 19, 22, 25], 7)
_iq1_m_indices = _with_fields([0, 4, 8, 12, 16, 20, 24, 28], 7)


@emits(i32x16, i64)
def _sixteen_bytes(b: Any, a: Any) -> Any:
    """Sixteen bytes at an address."""
    return b.zext(read(b, a, i8x16.ir), i32x16.ir)


@emits(i32x16, i64, i64)
def _iq3_s_indices(b: Any, a: Any, bits: Any) -> Any:
    """Sixteen bytes at an address, each with a ninth bit."""
    ninth = b.bitcast(b.trunc(bits, I16), ir.VectorType(I1, 16))
    ninth = b.select(ninth, constant(i32x16, 256), constant(i32x16, 0))
    return b.or_(b.zext(read(b, a, i8x16.ir), i32x16.ir), ninth)


@emits(i32x8, i64)
def _nine_bits(b: Any, a: Any) -> Any:
    """The lower nine bits of eight 16-bit integers."""
    return b.zext(b.and_(read(b, a, i16x8.ir), constant(i16x8, 511)), i32x8.ir)


# ---- signs


def _write_signs(b: Any, out: Any, codes: Any) -> None:
    """Seven signs each in 32 bytes; the eighth makes their number even."""
    odd = b.shl(call(b, "llvm.ctpop.v32i8", codes.type, codes), constant(i8x32, 7))
    write(b, b.add(out, I64(LEVEL_SIGNS)), b.or_(codes, odd))


@emits(void, i64, i64)
def _signs_of_iq2_xs(b: Any, a: Any, out: Any) -> None:
    """Codes are the upper seven bits of 32 16-bit integers."""
    _write_signs(b, out, b.trunc(b.lshr(read(b, a, i16x32.ir), constant(i16x32, 9)), i8x32.ir))


def _signs_and_scales(step: int) -> Any:
    def store_both(b: Any, a: Any, out: Any) -> None:
        """Codes of seven bits, and a scale in the upper four, of the last of each `step` 32-bit integers."""
        x = shuffle(b, read(b, a, ir.VectorType(I32, 8 * step)), range(step - 1, 8 * step, step))
        codes = b.and_(x, constant(i32x8, 0x7F))
        for i in range(1, 4):
            codes = b.or_(codes, b.and_(b.shl(x, constant(i32x8, i)), constant(i32x8, 0x7F << 8 * i)))
        _write_signs(b, out, b.bitcast(codes, i8x32.ir))
        s = b.or_(b.lshr(x, constant(i32x8, 27)), constant(i32x8, 1))
        write(b, b.add(out, I64(LEVEL_SCALES)), b.or_(s, b.shl(s, constant(i32x8, 16))))

    store_both.__name__ = f"signs_and_scales_{step}"
    return emits(void, i64, i64)(store_both)


_every, _every_other = _signs_and_scales(1), _signs_and_scales(2)


@emits(void, i64, i64, i8x64)
def _store_signed(b: Any, out: Any, j: Any, levels: Any) -> None:
    """Part j of four of signed levels: sizes, and signs."""
    negative = b.icmp_signed("<", levels, constant(i8x64, 0))
    write(b, b.add(out, b.mul(j, I64(64))), b.select(negative, b.neg(levels), levels))
    write(b, b.add(out, b.add(b.mul(j, I64(8)), I64(LEVEL_SIGNS))), b.bitcast(negative, I64))


@emits(i8x64, i64, i64)
def _shifts_of_iq1_s(b: Any, low: Any, high: Any) -> Any:
    """Each 32 times: −1 where a sign is set, 1 elsewhere."""
    both = [b.select(b.icmp_unsigned("!=", x, I64(0)), I8(-1), I8(1)) for x in (low, high)]
    return shuffle(b, broadcast(b, both[0], 32), range(64), broadcast(b, both[1], 32))


@emits(i8x64, i64)
def _shifts_of_iq1_m(b: Any, nibbles: Any) -> Any:
    """For each of eight nibbles, 8 times: −1 where its upper bit is set, 1 elsewhere."""
    bits = b.and_(broadcast(b, nibbles, 8), ir.Constant(ir.VectorType(I64, 8), [8 << 4 * i for i in range(8)]))
    clear = b.icmp_unsigned("==", bits, ir.Constant(bits.type, [0] * 8))
    ones, minus = (ir.Constant(bits.type, [value] * 8) for value in (0x0101010101010101, -1))
    return b.bitcast(b.select(clear, ones, minus), i8x64.ir)


# ---- scales


@jit_inline
def _two_scales(first: int, second: int) -> int:
    """Twice two numbers plus 1, for 32 elements each."""
    return (2 * first + 1) * 0x00010001 | (2 * second + 1) * 0x00010001 << 32


@jit_inline
def _four_scales(fields: int) -> int:
    """Twice four fields of three bits plus 1."""
    low = (fields & 7) | (fields >> 3 & 7) << 16
    high = (fields >> 6 & 7) | (fields >> 9 & 7) << 16
    return 2 * (low | high << 32) + 0x0001000100010001


@emits(void, i64, i64)
def _nibble_scales(b: Any, a: Any, out: Any) -> None:
    """Twice each nibble of eight bytes plus 1, low ones first: all scales of a block."""
    x = b.zext(read(b, a, ir.VectorType(I8, 8)), i16x8.ir)
    both = shuffle(
        b, b.and_(x, constant(i16x8, 15)), [i // 2 + i % 2 * 8 for i in range(16)], b.lshr(x, constant(i16x8, 4))
    )
    write(b, b.add(out, I64(LEVEL_SCALES)), b.add(b.add(both, both), constant(i16x16, 1)))


# ---- one block of each type: sizes of levels to `out`, scales and signs behind them; the factor comes back


@jit_inline
def _read_iq2_xxs(w: int, out: int) -> Any:
    for j in range(4):
        store(out + 64 * j, _iq2_xxs(_each_byte(load_u32(w + 2 + 16 * j) | load_u32(w + 10 + 16 * j) << 32)))
    _every_other(w + 2, out)
    return load_f16(w) * float32(0.125)


@jit_inline
def _read_iq2_xs(w: int, out: int) -> Any:
    for j in range(4):
        store(out + 64 * j, _iq2_xs(_nine_bits(w + 2 + 16 * j)))
    _signs_of_iq2_xs(w + 2, out)
    _nibble_scales(w + 66, out)
    return load_f16(w) * float32(0.125)


@jit_inline
def _read_iq2_s(w: int, out: int) -> Any:
    for j in range(4):
        store(out + 64 * j, _iq2_s(_iq2_s_indices(load_i64(w + 2 + 8 * j), load_u16(w + 66 + 2 * j))))
        store_i64(out + LEVEL_SIGNS + 8 * j, load_i64(w + 34 + 8 * j))
    _nibble_scales(w + 74, out)
    return load_f16(w) * float32(0.125)


@jit_inline
def _read_iq3_xxs(w: int, out: int) -> Any:
    for j in range(4):
        store(out + 64 * j, _iq3_xxs(_sixteen_bytes(w + 2 + 16 * j)))
    _every(w + 66, out)
    return load_f16(w) * float32(0.25)


@jit_inline
def _read_iq3_s(w: int, out: int) -> Any:
    scales = load_u32(w + 106)
    for j in range(4):
        store(out + 64 * j, _iq3_s(_iq3_s_indices(w + 2 + 16 * j, load_u16(w + 66 + 2 * j))))
        store_i64(out + LEVEL_SIGNS + 8 * j, load_i64(w + 74 + 8 * j))
        store_i64(out + LEVEL_SCALES + 8 * j, _two_scales(scales >> 8 * j & 15, scales >> 8 * j + 4 & 15))
    return load_f16(w)


@jit_inline
def _read_iq1_s(w: int, out: int) -> Any:
    for j in range(4):
        high = load_u32(w + 34 + 4 * j)
        points = _iq1(_iq1_s_indices(load_i64(w + 2 + 8 * j), high))
        _store_signed(out, j, points + _shifts_of_iq1_s(high & 0x8000, high & 0x80000000))
        store_i64(out + LEVEL_SCALES + 8 * j, _two_scales(high >> 12 & 7, high >> 28 & 7))
    return load_f16(w) * float32(0.125)


@jit_inline
def _read_iq1_m(w: int, out: int) -> Any:
    for j in range(4):
        high = load_u32(w + 32 + 4 * j)
        points = _iq1(_iq1_m_indices(load_i64(w + 8 * j), high))
        _store_signed(out, j, points + _shifts_of_iq1_m(high))
        store_i64(out + LEVEL_SCALES + 8 * j, _four_scales(load_u16(w + 48 + 2 * j)))
    bits = load_u16(w + 48) >> 12 | load_u16(w + 50) >> 12 << 4 | load_u16(w + 52) >> 12 << 8
    store_i16(out + LEVEL_D, bits | load_u16(w + 54) >> 12 << 12)
    return load_f16(out + LEVEL_D) * float32(0.125)


def look_up(_table: int, kind: int, w: int, blocks: int, out: int) -> None:
    """Blocks one behind another to units of `LEVEL_UNIT` bytes."""
    size = block_bytes(kind)
    for _ in range(blocks):
        prefetch(w + AHEAD)
        prefetch(w + AHEAD + 64)
        if kind == IQ3_S:
            d = _read_iq3_s(w, out)
        elif kind == IQ3_XXS:
            d = _read_iq3_xxs(w, out)
        elif kind == IQ2_S:
            d = _read_iq2_s(w, out)
        elif kind == IQ2_XS:
            d = _read_iq2_xs(w, out)
        elif kind == IQ2_XXS:
            d = _read_iq2_xxs(w, out)
        elif kind == IQ1_S:
            d = _read_iq1_s(w, out)
        else:
            d = _read_iq1_m(w, out)
        store_f32(out + LEVEL_D, d)
        w += size
        out += LEVEL_UNIT
