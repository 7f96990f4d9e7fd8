"""Rotary position embedding: the angles of a token are computed once and serve all its heads.

Angles are multiplied up in single precision, pair after pair, and their sine and cosine are the C library's, as in
ggml: results agree to the last bit. Formulas: docs/protocol.md section 6.6.
"""

from typing import Any

from llvmlite import ir
from numba import float32
from numba.core import types

from drover.worker.devices.cpu.record import DST, EXTRA, F32, NB0, NB_DST, NE_DST, PARAMS, SRC, TYPE0
from drover.worker.devices.cpu.simd import (
    emits,
    f32x16,
    fma,
    jit,
    load_f32,
    load_f32x16,
    load_i32,
    shuffle,
    splat_f32x16,
    store,
    store_f32,
    where_greater,
    zero_f32x16,
)
from drover.worker.devices.cpu.sync import each_item, portion
from drover.worker.devices.cpu.vector import load_row, move, param, row_address, store_row, word

# Words of a ROPE record (EXTRA: what a fourth operand would occupy).
PAIRS, MODE, OFFSET, ROTATED = PARAMS, PARAMS + 1, PARAMS + 2, PARAMS + 3
SECTIONS = EXTRA
# Parameters read as floats, by index from PARAMS.
SCALE_STEP, MAGNITUDE, SIGN = 4, 5, 6
# And from EXTRA + 4, as floats.
FREQ_SCALE, EXT_FACTOR, LOW, SPAN = range(4)

_cosf: Any = types.ExternalFunction("cosf", types.float32(types.float32))
_sinf: Any = types.ExternalFunction("sinf", types.float32(types.float32))

_MROPE, _VISION, _IMROPE = 8, 24, 40


def rope(record: int, _thread: int, threads: int, scratch: int, _shared: int, _sync: int) -> None:
    """Rotate pairs of channels of src0 by angles from the positions in src1."""
    heads, tokens = word(record, NE_DST + 1), word(record, NE_DST + 2)
    items = tokens * word(record, NE_DST + 3)
    pairs = word(record, PAIRS)
    table = scratch
    for item in each_item(record, items, portion(items, threads)):
        token, stream = item % tokens, item // tokens
        _angles(record, token, tokens, pairs, table)
        for head in range(heads):
            x = row_address(record, SRC, NB0, head, token, stream)
            y = row_address(record, DST, NB_DST, head, token, stream)
            _rotate(record, x, y, pairs, table)


@jit
def _angles(record: int, token: int, tokens: int, pairs: int, table: int) -> None:
    """Cosines of all pairs, then (after `pairs` rounded up to 16) sines, both times the magnitude."""
    _plain_angles(record, token, tokens, pairs, table)
    room = (pairs + 15) // 16 * 64
    extra = record + 8 * (EXTRA + 4)
    freq_scale, ext_factor = load_f32(extra + 8 * FREQ_SCALE), load_f32(extra + 8 * EXT_FACTOR)
    low, span = load_f32(extra + 8 * LOW), load_f32(extra + 8 * SPAN)
    magnitude = splat_f32x16(param(record, MAGNITUDE))
    signed = splat_f32x16(param(record, MAGNITUDE) * param(record, SIGN))
    zero, one = splat_f32x16(0.0), splat_f32x16(1.0)
    for i in range(0, pairs, 16):
        theta = load_f32x16(table + 4 * i)
        angle = theta * splat_f32x16(freq_scale)
        if ext_factor != 0.0:
            ramp = (splat_f32x16(float32(i)) + counting() - splat_f32x16(low)) / splat_f32x16(span)
            ramp = where_greater(ramp, one, one, where_greater(zero, ramp, zero, ramp))
            mix = (one - ramp) * splat_f32x16(ext_factor)
            angle = fma(theta, mix, angle * (one - mix))
        store(table + 4 * i, angle)
        for k in range(i, min(i + 16, pairs)):
            theta_k = load_f32(table + 4 * k)
            store_f32(table + 4 * k, _cosf(theta_k))
            store_f32(table + room + 4 * k, _sinf(theta_k))
        store(table + 4 * i, load_f32x16(table + 4 * i) * magnitude)
        store(table + room + 4 * i, load_f32x16(table + room + 4 * i) * signed)


@jit
def _plain_angles(record: int, token: int, tokens: int, pairs: int, table: int) -> None:
    """Position times frequency for every pair, divided by its frequency factor."""
    positions, factors = word(record, SRC + 1), word(record, SRC + 2)
    step = param(record, SCALE_STEP)
    mode = word(record, MODE)
    if mode & _MROPE != 0:
        _axis_angles(record, positions + 4 * token, tokens, pairs, table)
    else:
        theta = float32(load_i32(positions + 4 * token))
        for k in range(pairs):
            store_f32(table + 4 * k, theta)
            theta = float32(theta * step)
    if factors != 0:
        for k in range(pairs):
            store_f32(table + 4 * k, load_f32(table + 4 * k) / load_f32(factors + 4 * k))


@jit
def _axis_angles(record: int, position: int, tokens: int, pairs: int, table: int) -> None:
    """Angles where sections of the pairs follow different axes of the position."""
    step = param(record, SCALE_STEP)
    mode = word(record, MODE)
    end0 = word(record, SECTIONS)
    end1 = end0 + word(record, SECTIONS + 1)
    end2 = end1 + word(record, SECTIONS + 2)
    period = end2 + word(record, SECTIONS + 3)
    power = float32(1.0)
    for k in range(pairs):
        c = k % period
        if mode == _VISION and (c == 0 or c == end0 or c in (end1, end2)):
            power = float32(1.0)
        axis = _axis(record, c, end0, end1, end2) if mode == _IMROPE else _section(c, end0, end1, end2)
        store_f32(table + 4 * k, float32(load_i32(position + 4 * tokens * axis)) * power)
        power = float32(power * step)


@jit
def _section(c: int, end0: int, end1: int, end2: int) -> int:
    if c < end0:
        return 0
    if c < end1:
        return 1
    return 2 if c < end2 else 3


@jit
def _axis(record: int, c: int, end0: int, end1: int, end2: int) -> int:
    """The axis of a pair where axes alternate."""
    if c % 3 == 1 and c < 3 * (end1 - end0):
        return 1
    if c % 3 == 2 and c < 3 * (end2 - end1):
        return 2
    return 0 if c % 3 == 0 and c < 3 * end0 else 3


@jit
def _rotate(record: int, x: int, y: int, pairs: int, table: int) -> None:
    kind = word(record, TYPE0)
    size = 4 if kind == F32 else 2
    offset, rotated, channels = word(record, OFFSET), word(record, ROTATED), word(record, NE_DST)
    room = (pairs + 15) // 16 * 64
    if x != y:
        move(y, x, offset * size)
        end = (offset + rotated) * size
        move(y + end, x + end, channels * size - end)
    x += offset * size
    y += offset * size
    adjacent = word(record, MODE) == 0
    for k in range(0, pairs, 16):
        c, s = load_f32x16(table + 4 * k), load_f32x16(table + room + 4 * k)
        left = pairs - k
        if adjacent:
            low, high = load_row(x + 2 * k * size, kind), load_row(x + (2 * k + 16) * size, kind)
            a, b = evens(low, high), odds(low, high)
            turned_a, turned_b = fma(a, c, zero_f32x16() - b * s), fma(a, s, b * c)
            store_row(y + 2 * k * size, kind, weave_low(turned_a, turned_b), 2 * left)
            if left > 8:
                store_row(y + (2 * k + 16) * size, kind, weave_high(turned_a, turned_b), 2 * left - 16)
        else:
            a, b = load_row(x + k * size, kind), load_row(x + (k + pairs) * size, kind)
            store_row(y + k * size, kind, fma(a, c, zero_f32x16() - b * s), left)
            store_row(y + (k + pairs) * size, kind, fma(a, s, b * c), left)


@emits(f32x16)
def counting(b: Any) -> Any:
    """0, 1, … 15."""
    return ir.Constant(f32x16.ir, [float(i) for i in range(16)])


@emits(f32x16, f32x16, f32x16)
def evens(b: Any, x: Any, y: Any) -> Any:
    """Every second lane of x and y, the first included."""
    return shuffle(b, x, range(0, 32, 2), y)


@emits(f32x16, f32x16, f32x16)
def odds(b: Any, x: Any, y: Any) -> Any:
    """Every second lane of x and y, the first left out."""
    return shuffle(b, x, range(1, 32, 2), y)


@emits(f32x16, f32x16, f32x16)
def weave_low(b: Any, x: Any, y: Any) -> Any:
    """The first eight lanes of x and y in turn."""
    return shuffle(b, x, [i // 2 + 16 * (i % 2) for i in range(16)], y)


@emits(f32x16, f32x16, f32x16)
def weave_high(b: Any, x: Any, y: Any) -> Any:
    """The last eight lanes of x and y in turn."""
    return shuffle(b, x, [8 + i // 2 + 16 * (i % 2) for i in range(16)], y)
