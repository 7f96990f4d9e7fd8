"""Operations on places: ramps, padding, bands of a matrix, windows written into a tensor, pooling.

Formulas: docs/protocol.md sections 6.3 and 6.8.
"""

from numba import float32

from drover.worker.devices.cpu.elementwise import put, take
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
)
from drover.worker.devices.cpu.rope import counting
from drover.worker.devices.cpu.simd import (
    atomic_add,
    bits_f32,
    fma,
    jit,
    load_f32,
    load_f32x16,
    splat_f32x16,
    splat_i32x16,
    store,
    store_f32,
    store_i8,
)
from drover.worker.devices.cpu.sync import barrier, each_item, each_row
from drover.worker.devices.cpu.vector import move, param, row_address, store_row, store_some_f32, word

# Parameters of PAD: what lies before in each dimension, whether the other end does, the size of an element.
BEFORE, AROUND, PAD_SIZE = 0, 4, 5

# Parameters of BAND: in row i, places slope · i + start up to slope · i + end are kept (two slopes); what all others
# become, as four bytes; the size of an element.
LOW_SLOPE, LOW, HIGH_SLOPE, HIGH, OTHERS, BAND_SIZE = range(6)

# Parameters of WINDOW: whether src1 is added; the size of an element; strides of the window in bytes, its offset.
ADDED, WINDOW_SIZE, STRIDES, OFFSET = 0, 1, 2, 5

# Parameters of POOL: what becomes of a window, its extents, their steps, and the padding before.
KIND, KERNEL, STEP, PADDING = 0, 1, 3, 5
LARGEST, MEAN_INSIDE, MEAN = range(3)

_RAMP = 256
"""Vectors of a ramp that a thread claims at a time."""


def arange(record: int, _thread: int, _threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Parameter 0, and parameter 1 more from each element to the next."""
    count = word(record, NE_DST)
    start, step = splat_f32x16(param(record, 0)), splat_f32x16(param(record, 1))
    for block in each_item(record, (count + 15) // 16, _RAMP):
        i = 16 * block
        x = fma(counting() + splat_f32x16(float32(i)), step, start)
        store_row(word(record, DST) + 4 * i, F32, x, count - i)


def pad(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """src0 with zeros around it, or over and over."""
    ne0 = word(record, NE_DST)
    n0, n1, n2, n3 = word(record, NE0), word(record, NE0 + 1), word(record, NE0 + 2), word(record, NE0 + 3)
    around, size = word(record, PARAMS + AROUND) != 0, word(record, PARAMS + PAD_SIZE)
    before = word(record, PARAMS)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        i1, i2, i3 = i1 - word(record, PARAMS + 1), i2 - word(record, PARAMS + 2), i3 - word(record, PARAMS + 3)
        if around:
            x = row_address(record, SRC, NB0, i1 % n1, i2 % n2, i3 % n3)
            _repeat_row(x, y, n0, ne0, -before % n0, size)
        elif 0 <= i1 < n1 and 0 <= i2 < n2 and 0 <= i3 < n3:
            fill(y, 0, before * size)
            move(y + before * size, row_address(record, SRC, NB0, i1, i2, i3), n0 * size)
            fill(y + (before + n0) * size, 0, (ne0 - before - n0) * size)
        else:
            fill(y, 0, ne0 * size)


@jit
def _repeat_row(x: int, y: int, period: int, count: int, start: int, size: int) -> None:
    """`count` elements from `start` on, those of a row over and over."""
    done = 0
    while done < count:
        run = min(count - done, period - start)
        move(y + done * size, x + start * size, run * size)
        done += run
        start = 0


@jit
def fill(y: int, bits: int, count: int) -> None:
    """The same four bytes over and over, for `count` bytes."""
    many = splat_i32x16(bits)
    whole = count - count % 64
    for i in range(0, whole, 64):
        store(y + i, many)
    rest = count % 64
    store_some_f32(y + whole, bits_f32(many), rest // 4)
    for i in range(count - rest % 4, count):
        store_i8(y + i, bits >> (8 * (i % 4)))


def band(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Keep a band along the diagonals of every matrix."""
    ne0 = word(record, NE_DST)
    others, size = word(record, PARAMS + OTHERS), word(record, PARAMS + BAND_SIZE)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        low = min(word(record, PARAMS + LOW_SLOPE) * i1 + word(record, PARAMS + LOW), ne0)
        high = max(low, min(word(record, PARAMS + HIGH_SLOPE) * i1 + word(record, PARAMS + HIGH), ne0))
        x = row_address(record, SRC, NB0, i1, i2, i3)
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        move(y + low * size, x + low * size, (high - low) * size)
        fill(y, others, low * size)
        fill(y + high * size, others, (ne0 - high) * size)


def window(record: int, _thread: int, threads: int, scratch: int, _shared: int, sync: int) -> None:
    """src0 with src1 in a window of it, or added to one."""
    if word(record, DST) != word(record, SRC):
        _copy_rows(record, threads)
        barrier(sync, threads)
    n0, n1, n2 = word(record, NE1), word(record, NE1 + 1), word(record, NE1 + 2)
    rows = n1 * n2 * word(record, NE1 + 3)
    size, kind, step = word(record, PARAMS + WINDOW_SIZE), word(record, TYPE0), word(record, NB1)
    while True:
        row = atomic_add(record + 8 * COUNTER2, 1)
        if row >= rows:
            break
        i1, i2, i3 = row % n1, row // n1 % n2, row // (n1 * n2)
        b = row_address(record, SRC + 1, NB1, i1, i2, i3)
        y = row_address(record, DST, PARAMS + STRIDES - 1, i1, i2, i3) + word(record, PARAMS + OFFSET)
        if word(record, PARAMS + ADDED) == 0:
            move(y, b, n0 * size)
            continue
        if kind == F32 and step == 4:
            for i in range(0, n0, 16):
                store_row(y + 4 * i, F32, load_f32x16(y + 4 * i) + load_f32x16(b + 4 * i), n0 - i)
            continue
        for i in range(0, n0, 16):
            total = take(y + i * size, size, kind, n0 - i, scratch) + take(b + i * step, step, kind, n0 - i, scratch)
            put(y + i * size, size, kind, total, n0 - i, scratch)


@jit
def _copy_rows(record: int, threads: int) -> None:
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        x, y = row_address(record, SRC, NB0, i1, i2, i3), row_address(record, DST, NB_DST, i1, i2, i3)
        move(y, x, word(record, NE_DST) * word(record, PARAMS + WINDOW_SIZE))


def pool(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """The largest or the mean of windows over dimensions 0 and 1."""
    ne0 = word(record, NE_DST)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        top = i1 * word(record, PARAMS + STEP + 1) - word(record, PARAMS + PADDING + 1)
        low, high = max(top, 0), min(top + word(record, PARAMS + KERNEL + 1), word(record, NE0 + 1))
        x = row_address(record, SRC, NB0, low, i2, i3)
        _pool_row(record, x, max(high - low, 0), row_address(record, DST, NB_DST, i1, i2, i3), ne0)


@jit
def _pool_row(record: int, x: int, lines: int, y: int, count: int) -> None:
    """Windows side by side, all of so many lines of src0 from `x` on."""
    kind, width, extent = word(record, PARAMS + KIND), word(record, PARAMS + KERNEL), word(record, NE0)
    step, line, out = word(record, NB0), word(record, NB0 + 1), word(record, NB_DST)
    advance, left = word(record, PARAMS + STEP), -word(record, PARAMS + PADDING)
    whole = float32(width * word(record, PARAMS + KERNEL + 1))
    for column in range(count):
        low, high = max(left, 0), min(left + width, extent)
        left += advance
        largest, total = float32(float("-inf")), float32(0.0)
        for j in range(lines):
            for i in range(low, high):
                value = load_f32(x + j * line + i * step)
                largest = max(largest, value)
                total += value
        if kind == MEAN:
            largest = total / whole
        elif kind == MEAN_INSIDE:
            largest = total / float32(max(1, max(0, high - low) * lines))
        store_f32(y + column * out, largest)
