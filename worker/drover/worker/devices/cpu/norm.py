"""Operations on whole rows of F32: the norms, the softmax, sums.

Rows are contiguous inside, anything outside. Every kernel may work in place. Formulas: docs/protocol.md sections 6.4
and 6.6.
"""

import math
from typing import Any

from numba import float32

from drover.worker.devices.cpu.record import (
    DST,
    F32,
    NB0,
    NB1,
    NB_DST,
    NE0,
    NE1,
    NE_DST,
    PARAMS,
    SRC,
    TYPE1,
)
from drover.worker.devices.cpu.simd import (
    add_products,
    fma,
    jit,
    load_f32,
    load_f32x16,
    maximum,
    splat_f32x16,
    store_f32,
    sum_lanes,
    zero_f32x16,
    zero_f64x16,
)
from drover.worker.devices.cpu.sync import each_row
from drover.worker.devices.cpu.vector import exp, greatest, keep, load_row, param, row_address, store_row, word

# What NORM does (parameter 0).
RMS, MEAN_AND_VARIANCE, L2 = range(3)
WEIGHTS = 2
"""Parameter: the address of what every row is multiplied by, or 0."""

_LOWEST = -3.0e38


def norm(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Scale (and centre) every row by its own statistics; multiply by weights where the program says so."""
    kind = word(record, PARAMS)
    epsilon = param(record, 1)
    ne0 = word(record, NE_DST)
    weight = word(record, PARAMS + WEIGHTS)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        x = row_address(record, SRC, NB0, i1, i2, i3)
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        _norm_row(kind, x, y, weight, ne0, epsilon)


@jit
def _norm_row(kind: int, x: int, y: int, weight: int, count: int, epsilon: float) -> None:
    mean = splat_f32x16(0.0)
    if kind == MEAN_AND_VARIANCE:
        mean = splat_f32x16(_row_sum(x, count) / count)
    squares, whole = zero_f64x16(), count - count % 16
    for i in range(0, whole, 16):
        a = load_f32x16(x + 4 * i) - mean
        squares = add_products(a, a, squares)
    if whole < count:
        a = keep(load_f32x16(x + 4 * whole) - mean, count - whole, 0.0)
        squares = add_products(a, a, squares)
    scale = splat_f32x16(_norm_scale(kind, sum_lanes(squares), count, epsilon))
    for i in range(0, count, 16):
        value = (load_f32x16(x + 4 * i) - mean) * scale
        if weight != 0:
            value = value * load_f32x16(weight + 4 * i)
        store_row(y + 4 * i, F32, value, count - i)


@jit
def _norm_scale(kind: int, energy: float, count: int, epsilon: float) -> Any:
    """The factor of a row, from its energy in double precision; every step is rounded as ggml rounds it."""
    if kind == L2:
        return float32(1.0) / float32(max(math.sqrt(float32(energy)), epsilon))
    return float32(1.0) / float32(math.sqrt(float32(float32(energy / count) + epsilon)))


@jit
def _row_sum(x: int, count: int) -> float:
    total, more = zero_f32x16(), zero_f32x16()
    whole = count - count % 32
    for i in range(0, whole, 32):
        total, more = total + load_f32x16(x + 4 * i), more + load_f32x16(x + 4 * i + 64)
    for i in range(whole, count, 16):
        total = total + keep(load_f32x16(x + 4 * i), count - i, 0.0)
    return sum_lanes(total + more)


def sum_rows(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """The sum of every row (with parameter 0: the mean)."""
    count = word(record, NE0)
    divisor = count if word(record, PARAMS) != 0 else 1
    for i1, i2, i3 in each_row(record, NE0, threads):
        total = _row_sum(row_address(record, SRC, NB0, i1, i2, i3), count)
        store_f32(row_address(record, DST, NB_DST, i1, i2, i3), total / divisor)


@jit
def head_slope(head: int, few: int, base: float, base_odd: float) -> float:
    """ALiBi slope of a head; `few` is the largest power of two up to the number of heads, 0 for no slopes."""
    if few == 0:
        return 1.0
    if head < few:
        return base ** (head + 1)
    return base_odd ** (2 * (head - few) + 1)


def soft_max(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Softmax of scale · src0 + slope · src1 over rows, src2 an extra logit for each head."""
    ne0 = word(record, NE_DST)
    scale, base, base_odd = param(record, 0), param(record, 1), param(record, 2)
    few = word(record, PARAMS + 3)
    sinks = word(record, SRC + 2)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        x = row_address(record, SRC, NB0, i1, i2, i3)
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        mask = 0
        if word(record, SRC + 1) != 0:
            mask = row_address(record, SRC + 1, NB1, i1, i2 % word(record, NE1 + 2), i3 % word(record, NE1 + 3))
        slope = head_slope(i2, few, base, base_odd)
        sink = load_f32(sinks + 4 * i2) if sinks != 0 else _LOWEST
        _soft_max_row(x, mask, word(record, TYPE1), y, ne0, scale, slope, sink)


@jit
def _soft_max_row(x: int, mask: int, kind: int, y: int, count: int, scale: float, slope: float, sink: float) -> None:
    factor, tilt = splat_f32x16(scale), splat_f32x16(slope)
    most = splat_f32x16(sink)
    size = 4 if kind == F32 else 2
    for i in range(0, count, 16):
        z = load_f32x16(x + 4 * i) * factor
        if mask != 0:
            z = fma(load_row(mask + size * i, kind), tilt, z)
        store_row(y + 4 * i, F32, z, count - i)
        most = maximum(keep(z, count - i, _LOWEST), most)
    top = greatest(most)
    total = zero_f32x16()
    high = splat_f32x16(top)
    for i in range(0, count, 16):
        e = exp(load_f32x16(y + 4 * i) - high)
        store_row(y + 4 * i, F32, e, count - i)
        total = total + keep(e, count - i, 0.0)
    denominator = sum_lanes(total)
    if sink > _LOWEST:
        denominator += sum_lanes(keep(exp(splat_f32x16(sink) - high), 1, 0.0))
    share = splat_f32x16(1.0 / denominator)
    for i in range(0, count, 16):
        store_row(y + 4 * i, F32, load_f32x16(y + 4 * i) * share, count - i)
