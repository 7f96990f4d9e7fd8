"""Sums that reach beyond a row or along it, norms of groups of channels, and triangular systems.

Sums are kept in double precision. Formulas: docs/protocol.md section 6.4.
"""

import math
from typing import Any

from numba import float32

from drover.worker.devices.cpu.elementwise import take
from drover.worker.devices.cpu.record import (
    COUNTER2,
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
    TYPE0,
    TYPE_DST,
)
from drover.worker.devices.cpu.simd import (
    add_products,
    atomic_add,
    constant,
    emits,
    f32x16,
    fma,
    jit,
    load_f32,
    load_f32x16,
    load_f64x16,
    load_i32,
    load_i64,
    shuffle,
    splat_f32x16,
    store,
    store_i64,
    sum_lanes,
    zero_f32x16,
    zero_f64x16,
)
from drover.worker.devices.cpu.sync import each_item, each_row
from drover.worker.devices.cpu.vector import keep, lane, param, row_address, store_one, store_row, word

PARTS = 64
"""Parts a TOTAL is cut into, whatever the number of threads: so its sum is always the same."""
PART_BYTES = 128
"""What each of them leaves in shared memory: sixteen sums, or one count."""
_COLUMNS = 32


def total(record: int, _thread: int, _threads: int, scratch: int, shared: int, _sync: int) -> None:
    """The sum of src0; with parameter 0 how many of its integers equal those of src1. Who ends last adds the parts."""
    rows = word(record, NE0 + 1) * word(record, NE0 + 2) * word(record, NE0 + 3)
    for part in each_item(record, PARTS, 1):
        first, end = part * rows // PARTS, (part + 1) * rows // PARTS
        if word(record, PARAMS) != 0:
            store_i64(shared + PART_BYTES * part, _count_rows(record, first, end))
        else:
            _sum_rows(record, first, end, shared + PART_BYTES * part, scratch)
        if atomic_add(record + 8 * COUNTER2, 1) == PARTS - 1:
            _add_parts(record, shared)


@jit
def _sum_rows(record: int, first: int, end: int, target: int, scratch: int) -> None:
    count, ne1, ne2 = word(record, NE0), word(record, NE0 + 1), word(record, NE0 + 2)
    step, kind = word(record, NB0), word(record, TYPE0)
    sums, one = zero_f64x16(), splat_f32x16(1.0)
    for row in range(first, end):
        x = row_address(record, SRC, NB0, row % ne1, row // ne1 % ne2, row // (ne1 * ne2))
        for i in range(0, count, 16):
            value = keep(take(x + i * step, step, kind, count - i, scratch), count - i, 0.0)
            sums = add_products(value, one, sums)
    store(target, sums)


@jit
def _count_rows(record: int, first: int, end: int) -> int:
    count, ne1, ne2 = word(record, NE0), word(record, NE0 + 1), word(record, NE0 + 2)
    step0, step1 = word(record, NB0), word(record, NB1)
    equal = 0
    for row in range(first, end):
        i1, i2, i3 = row % ne1, row // ne1 % ne2, row // (ne1 * ne2)
        x, y = row_address(record, SRC, NB0, i1, i2, i3), row_address(record, SRC + 1, NB1, i1, i2, i3)
        for i in range(count):
            if load_i32(x + i * step0) == load_i32(y + i * step1):
                equal += 1
    return equal


@jit
def _add_parts(record: int, shared: int) -> None:
    if word(record, PARAMS) != 0:
        equal = 0
        for part in range(PARTS):
            equal += load_i64(shared + PART_BYTES * part)
        store_i64(word(record, DST), equal)
        return
    sums = zero_f64x16()
    for part in range(PARTS):
        sums = sums + load_f64x16(shared + PART_BYTES * part)
    store_one(word(record, DST), word(record, TYPE_DST), float32(sum_lanes(sums)))


def cumsum(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Every row summed up to each place, that place included."""
    count = word(record, NE_DST)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        x, y = row_address(record, SRC, NB0, i1, i2, i3), row_address(record, DST, NB_DST, i1, i2, i3)
        before = 0.0
        for i in range(0, count, 16):
            sums = running(load_f32x16(x + 4 * i))
            store_row(y + 4 * i, F32, sums + splat_f32x16(float32(before)), count - i)
            before += lane(sums, 15)


@emits(f32x16, f32x16)
def running(b: Any, x: Any) -> Any:
    """The sums of lanes 0 to i: twice as many in every step."""
    nothing = constant(f32x16, 0.0)
    for distance in (1, 2, 4, 8):
        x = b.fadd(x, shuffle(b, x, [i - distance if i >= distance else 16 for i in range(16)], nothing))
    return x


def group_norm(record: int, _thread: int, _threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Parameter 0 groups of the channels in dimension 2, each centred and scaled by its own statistics."""
    groups, channels = word(record, PARAMS), word(record, NE0 + 2)
    width = (channels + groups - 1) // groups
    for item in each_item(record, groups * word(record, NE0 + 3), 1):
        group, image = item % groups, item // groups
        first, end = min(group * width, channels), min((group + 1) * width, channels)
        if first == end:
            continue
        elements = word(record, NE0) * word(record, NE0 + 1) * (end - first)
        mean = float32(_moment(record, first, end, image, float32(0.0), True) / elements)
        variance = float32(_moment(record, first, end, image, mean, False) / elements)
        scale = float32(1.0) / float32(math.sqrt(variance + param(record, 1)))
        _normalise(record, first, end, image, mean, scale)


@jit
def _moment(record: int, first: int, end: int, image: int, mean: Any, plain: bool) -> float:
    """The sum of x − mean over some channels (plain), or of its squares."""
    count, ne1 = word(record, NE0), word(record, NE0 + 1)
    sums, middle, one = zero_f64x16(), splat_f32x16(mean), splat_f32x16(1.0)
    for row in range(first * ne1, end * ne1):
        x = row_address(record, SRC, NB0, row % ne1, row // ne1, image)
        for i in range(0, count, 16):
            value = keep(load_f32x16(x + 4 * i) - middle, count - i, 0.0)
            sums = add_products(value, one if plain else value, sums)
    return sum_lanes(sums)


@jit
def _normalise(record: int, first: int, end: int, image: int, mean: Any, scale: Any) -> None:
    count, ne1 = word(record, NE0), word(record, NE0 + 1)
    middle, factor = splat_f32x16(mean), splat_f32x16(scale)
    for row in range(first * ne1, end * ne1):
        x = row_address(record, SRC, NB0, row % ne1, row // ne1, image)
        y = row_address(record, DST, NB_DST, row % ne1, row // ne1, image)
        for i in range(0, count, 16):
            store_row(y + 4 * i, F32, (load_f32x16(x + 4 * i) - middle) * factor, count - i)


def solve_tri(record: int, _thread: int, _threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """X with src0 · X = src1 for lower triangles src0: some columns at a time, row after row."""
    columns, ne2 = word(record, NE1), word(record, NE1 + 2)
    blocks = (columns + _COLUMNS - 1) // _COLUMNS
    items = blocks * ne2 * word(record, NE1 + 3)
    for item in each_item(record, items, 1):
        column, i2, i3 = item % blocks * _COLUMNS, item // blocks % ne2, item // (blocks * ne2)
        for row in range(word(record, NE0)):
            _solve_row(record, row, i2, i3, 4 * column, columns - column)


@jit
def _solve_row(record: int, row: int, i2: int, i3: int, shift: int, left: int) -> None:
    a = row_address(record, SRC, NB0, row, i2, i3)
    b = row_address(record, SRC + 1, NB1, row, i2, i3) + shift
    known, step = row_address(record, DST, NB_DST, 0, i2, i3) + shift, word(record, NB_DST + 1)
    low, high = zero_f32x16(), zero_f32x16()
    for i in range(row):
        factor = splat_f32x16(load_f32(a + 4 * i))
        low = fma(factor, load_f32x16(known + i * step), low)
        if left > 16:
            high = fma(factor, load_f32x16(known + i * step + 64), high)
    scale = splat_f32x16(load_f32(a + 4 * row))
    store_row(known + row * step, F32, (load_f32x16(b) - low) / scale, left)
    if left > 16:
        store_row(known + row * step + 64, F32, (load_f32x16(b + 64) - high) / scale, left - 16)
