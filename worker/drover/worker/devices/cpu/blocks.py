"""Rows of quantized blocks as floats, and floats as blocks, for operations that copy rows.

Layouts: docs/protocol.md section 5.1; quantisation: section 5.2. Matrix products decode weights on their own.
"""

from typing import Any

from numba import float32

from drover.worker.devices.cpu.record import BF16, F16, F32, I32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0
from drover.worker.devices.cpu.simd import (
    absolute,
    emits,
    i8x16,
    i32x16,
    i64,
    jit,
    load_f16,
    load_f32,
    load_f32x16,
    load_i8,
    load_u8,
    max_lanes,
    maximum,
    nearest,
    read,
    splat_f32x16,
    store,
    store_f16,
    store_i8,
    to_f32,
    to_i8,
    to_i32,
)
from drover.worker.devices.cpu.vector import load_row, move, store_row, widen

READABLE = frozenset((F32, F16, BF16, I32, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K))
"""Types `dequantize` knows (I32 stays as it is)."""
WRITABLE = frozenset((Q4_0, Q8_0))
"""Quantized types `quantize` knows."""


@jit
def dequantize(source: int, kind: int, target: int, count: int) -> None:
    """A row of `count` elements (whole blocks) as floats."""
    if kind in (F32, I32):
        move(target, source, 4 * count)
    elif kind in (F16, BF16):
        for i in range(0, count, 16):
            store_row(target + 4 * i, F32, load_row(source + 2 * i, kind), count - i)
    elif kind == Q8_0:
        widen(source, kind, target, count)
    elif kind == Q4_0:
        for block in range(count // 32):
            _read_q4_0(source + 18 * block, target + 128 * block)
    elif kind == Q6_K:
        for block in range(count // 256):
            _read_q6_k(source + 210 * block, target + 1024 * block)
    else:
        for block in range(count // 256):
            _read_q45_k(source + (144 if kind == Q4_K else 176) * block, kind == Q5_K, target + 1024 * block)


@emits(i32x16, i64)
def load_u8_i32x16(b: Any, a: Any) -> Any:
    """Sixteen bytes, 0 to 255, as integers."""
    return b.zext(read(b, a, i8x16.ir), i32x16.ir)


@jit
def _read_q4_0(source: int, target: int) -> None:
    scale = splat_f32x16(load_f16(source))
    nibbles = load_u8_i32x16(source + 2)
    eight = splat_f32x16(8.0)
    store(target, (to_f32(nibbles & 15) - eight) * scale)
    store(target + 64, (to_f32(nibbles >> 4) - eight) * scale)


@jit
def _read_q45_k(source: int, fifth_bit: bool, target: int) -> None:
    d, least = load_f16(source), load_f16(source + 2)
    low = source + 48 if fifth_bit else source + 16
    for k in range(8):
        if k < 4:
            s, m = load_u8(source + 4 + k) & 63, load_u8(source + 8 + k) & 63
        else:
            both = load_u8(source + 8 + k)
            s = (both & 15) | (load_u8(source + k) >> 6) << 4
            m = (both >> 4) | (load_u8(source + 4 + k) >> 6) << 4
        scale, offset = splat_f32x16(float32(d * float32(s))), splat_f32x16(float32(least * float32(m)))
        for half in range(2):
            q = load_u8_i32x16(low + 32 * (k // 2) + 16 * half) >> (4 * (k & 1)) & 15
            if fifth_bit:
                q = q | (load_u8_i32x16(source + 16 + 16 * half) >> k & 1) << 4
            store(target + 128 * k + 64 * half, to_f32(q) * scale - offset)


@jit
def _read_q6_k(source: int, target: int) -> None:
    d = load_f16(source + 208)
    middle = splat_f32x16(32.0)
    for group in range(16):  # 16 elements: half n, quarter t, and which half of the 32
        n, t, side = group // 8, group // 2 % 4, group % 2
        low = load_u8_i32x16(source + 64 * n + 32 * (t & 1) + 16 * side) >> (4 * (t // 2)) & 15
        high = load_u8_i32x16(source + 128 + 32 * n + 16 * side) >> (2 * t) & 3
        scale = splat_f32x16(float32(d * float32(load_i8(source + 192 + group))))
        store(target + 64 * group, (to_f32(low | high << 4) - middle) * scale)


@jit
def quantize(source: int, target: int, kind: int, count: int) -> None:
    """A row of `count` floats (whole blocks) as Q8_0 or Q4_0."""
    for block in range(count // 32):
        if kind == Q8_0:
            _write_q8_0(source + 128 * block, target + 34 * block)
        else:
            _write_q4_0(source + 128 * block, target + 18 * block)


@jit
def _write_q8_0(source: int, target: int) -> None:
    low, high = load_f32x16(source), load_f32x16(source + 64)
    largest = max_lanes(maximum(absolute(low), absolute(high)))
    inverse = splat_f32x16(float32(127.0) / largest if largest != 0.0 else float32(0.0))
    store_f16(target, float32(largest / float32(127.0)))
    store(target + 2, to_i8(to_i32(nearest(low * inverse))))
    store(target + 18, to_i8(to_i32(nearest(high * inverse))))


@jit
def _write_q4_0(source: int, target: int) -> None:
    extreme = float32(0.0)
    for i in range(32):
        x = load_f32(source + 4 * i)
        if abs(x) > abs(extreme):
            extreme = x
    d = float32(extreme / float32(-8.0))
    inverse = float32(1.0) / d if d != 0.0 else float32(0.0)
    store_f16(target, d)
    for i in range(16):
        low = min(15, int(load_f32(source + 4 * i) * inverse + float32(8.5)))
        high = min(15, int(load_f32(source + 64 + 4 * i) * inverse + float32(8.5)))
        store_i8(target + 2 + i, low | high << 4)
