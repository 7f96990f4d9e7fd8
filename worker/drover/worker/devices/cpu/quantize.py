"""Activations into the form their weights are multiplied with, one column at a time.

The rounding is ggml's, so that the same text comes out: 8-bit blocks of 256 for K types (`KS`), 8-bit blocks of 32 for
the other quantized ones (`FOURS`), and for 16-bit weights the nearest 16-bit value. Units hold 256 elements of `KS`,
128 of `FOURS` and `BFLOATS`, 64 of `FLOATS`; a last unit is filled with zeros.
"""

from typing import Any, Final

import numba

from drover.worker.devices.cpu.kinds import BF16_ID, F16_ID, NVFP4, is_float, is_k, offset_of
from drover.worker.devices.cpu.simd import (
    DOT_BF16,
    F32,
    I32,
    I64,
    absolute,
    call,
    constant,
    dot_bytes,
    emits,
    f32,
    i8x16,
    i8x64,
    i16x8,
    i16x16,
    i32x16,
    i64,
    jit,
    joined,
    load_f16,
    load_f16_f32x16,
    load_f32,
    load_f32x16,
    max_lanes,
    maximum,
    nearest,
    read,
    round_to_bf16_f32x16,
    round_to_f16,
    round_to_f16_f32x16,
    shuffle,
    splat_f32x16,
    store,
    store_bf16_f32x16,
    store_f32,
    to_i8,
    to_i32,
    void,
    write,
    zero_f32x16,
)

KS: Final = 0
FOURS: Final = 1
FLOATS: Final = 2
BFLOATS: Final = 3

K_UNIT: Final = 320
"""Bytes: a head, and 256 signed bytes at 64."""
SUMS_OF_16: Final = 0
SUMS_OF_32: Final = 32
K_SCALE: Final = 48
"""Of the head: sixteen and eight sums of elements, with their signs turned (i16), and the scale (f32)."""
FOUR_UNIT: Final = 320
"""Bytes: scales of four blocks (f32, four times each) at 0, corrections for the offset of the weights (i32) at 64, the
first halves of the blocks at 128, the second halves at 192, and scaled sums (f32, one and three zeros each) at 256."""

_F32_OR_BF16 = BFLOATS if DOT_BF16 else FLOATS


@jit
def column_bytes(k: int) -> int:
    """Bytes that a column of k elements takes in any form."""
    return (k + 255) // 256 * 1024


@jit
def form_of(kind: int) -> int:
    """The form of activations for weights of a type."""
    if kind == BF16_ID:
        return _F32_OR_BF16
    if is_float(kind):
        return FLOATS
    return KS if is_k(kind) else FOURS


@jit
def stride_of(form: int, k: int) -> int:
    """Bytes of a column of k elements in a form, a multiple of 64."""
    if form == KS:
        return (k + 255) // 256 * K_UNIT
    if form == FOURS:
        return (k + 127) // 128 * FOUR_UNIT
    if form == BFLOATS:
        return (k + 127) // 128 * 256
    return (k + 63) // 64 * 256


def prepare(_table: int, kind: int, form: int, x: int, x_kind: int, k: int, out: int, scratch: int) -> None:
    """Write k elements at x (F32 or F16, contiguous) in a form; `scratch` holds a column of floats."""
    unit = 256 if form == KS else (64 if form == FLOATS else 128)
    padded = (k + unit - 1) // unit * unit
    if x_kind == F16_ID or padded != k:
        _widen(x, x_kind, k, padded, scratch)
        x = scratch
    if form == KS:
        _quantize_k(x, padded, out)
    elif form == FOURS:
        _quantize_fours(x, padded, out, 0 if kind == NVFP4 else offset_of(kind))
    elif form == BFLOATS:
        for i in range(0, padded, 16):
            store_bf16_f32x16(out + 2 * i, load_f32x16(x + 4 * i))
    elif kind == F16_ID:
        for i in range(0, padded, 16):
            store(out + 4 * i, round_to_f16_f32x16(load_f32x16(x + 4 * i)))
    elif kind == BF16_ID:
        for i in range(0, padded, 16):
            store(out + 4 * i, round_to_bf16_f32x16(load_f32x16(x + 4 * i)))
    else:
        for i in range(0, padded, 16):
            store(out + 4 * i, load_f32x16(x + 4 * i))


@jit
def _widen(x: int, x_kind: int, k: int, padded: int, out: int) -> None:
    """k floats of either type to f32, then zeros up to `padded`."""
    whole = k // 16 * 16
    if x_kind == F16_ID:
        for i in range(0, whole, 16):
            store(out + 4 * i, load_f16_f32x16(x + 2 * i))
        for i in range(whole, k):
            store_f32(out + 4 * i, load_f16(x + 2 * i))
    else:
        for i in range(0, whole, 16):
            store(out + 4 * i, load_f32x16(x + 4 * i))
        for i in range(whole, k):
            store_f32(out + 4 * i, load_f32(x + 4 * i))
    for i in range(k, padded):
        store_f32(out + 4 * i, numba.float32(0))


@emits(i32x16, i64)
def _sums_of_four(b: Any, a: Any) -> Any:
    """Sums of neighbouring four of 64 signed bytes."""
    return dot_bytes(b, constant(i32x16, 0), constant(i8x64, 1), read(b, a, i8x64.ir))


@emits(void, i64)
def _store_sums(b: Any, unit: Any) -> None:
    """The sums that the head of a K unit keeps, from its bytes."""
    ones, nothing = constant(i8x64, 1), constant(i32x16, 0)
    sums = []
    for j in range(4):
        elements = read(b, b.add(unit, I64(64 + 64 * j)), i8x64.ir)
        fours = b.sub(nothing, dot_bytes(b, nothing, ones, elements))
        pairs = b.add(shuffle(b, fours, range(0, 16, 2)), shuffle(b, fours, range(1, 16, 2)))
        sums.append(b.add(shuffle(b, pairs, range(0, 8, 2)), shuffle(b, pairs, range(1, 8, 2))))
    all_ = joined(b, joined(b, *sums[:2]), joined(b, *sums[2:]))
    write(b, b.add(unit, I64(SUMS_OF_16)), b.trunc(all_, i16x16.ir))
    wide = b.add(shuffle(b, all_, range(0, 16, 2)), shuffle(b, all_, range(1, 16, 2)))
    write(b, b.add(unit, I64(SUMS_OF_32)), b.trunc(wide, i16x8.ir))


@emits(f32, i64)
def _sum_of_16(b: Any, a: Any) -> Any:
    """The sum of 16 signed bytes, as a float."""
    whole = b.sext(read(b, a, i8x16.ir), i32x16.ir)
    return b.sitofp(call(b, "llvm.vector.reduce.add.v16i32", I32, whole), F32)


@jit
def _quantize_k(x: int, k: int, out: int) -> None:
    """Blocks of 256: the largest magnitude becomes 127, the scale is the reciprocal of the factor used."""
    for _ in range(k // 256):
        m = zero_f32x16()
        for j in range(16):
            m = maximum(m, absolute(load_f32x16(x + 64 * j)))
        largest = max_lanes(m)
        factor = numba.float32(0)
        d = numba.float32(0)
        if largest > 0:
            factor = numba.float32(127) / largest
            d = numba.float32(1) / factor
        factors = splat_f32x16(factor)
        for j in range(16):
            store(out + 64 + 16 * j, to_i8(to_i32(nearest(load_f32x16(x + 64 * j) * factors))))
        _store_sums(out)
        store_f32(out + K_SCALE, d)
        x += 1024
        out += K_UNIT


@jit
def _quantize_fours(x: int, k: int, out: int, offset: int) -> None:
    """Blocks of 32, four to a unit: the scale is rounded to half precision, the factor is not."""
    for _ in range(k // 128):
        store(out + 256, zero_f32x16())
        for j in range(4):
            low = load_f32x16(x + 128 * j)
            high = load_f32x16(x + 128 * j + 64)
            largest = max_lanes(maximum(absolute(low), absolute(high)))
            d = largest / numba.float32(127)
            factor = numba.float32(127) / largest if largest > 0 else numba.float32(0)
            factors = splat_f32x16(factor)
            store(out + 128 + 16 * j, to_i8(to_i32(nearest(low * factors))))
            store(out + 192 + 16 * j, to_i8(to_i32(nearest(high * factors))))
            total = _sum_of_16(out + 128 + 16 * j) + _sum_of_16(out + 192 + 16 * j)
            store_f32(out + 256 + 16 * j, round_to_f16(d * total))
            rounded = round_to_f16(d)
            for lane in range(4):
                store_f32(out + 16 * j + 4 * lane, rounded)
        fours = _sums_of_four(out + 128) + _sums_of_four(out + 192)
        store(out + 64, fours * -offset)
        x += 512
        out += FOUR_UNIT
