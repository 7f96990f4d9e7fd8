"""Operations that move elements: copies with conversion, rows by index, joining and tiling.

A copy walks result and operand in row-major order, run by run; a run is a stretch inside one row of both. Meanings:
docs/protocol.md section 6.3.
"""

from drover.worker.devices.cpu import calls
from drover.worker.devices.cpu.elementwise import put, take
from drover.worker.devices.cpu.record import (
    BF16,
    DST,
    F16,
    F32,
    I64,
    NB0,
    NB1,
    NB_DST,
    NE0,
    NE1,
    NE_DST,
    PARAMS,
    SRC,
    TYPE0,
    TYPE1,
    TYPE_DST,
)
from drover.worker.devices.cpu.simd import (
    jit,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    store_f32,
    store_i8,
    store_i16,
    store_i32,
    store_i64,
)
from drover.worker.devices.cpu.sync import each_item, each_row, portion, report_bad_index
from drover.worker.devices.cpu.vector import load_one, move, row_address, store_one, word

# How COPY treats an element (parameter 0). For UNITS, parameter 1 is its size in bytes, blocks counting as elements.
UNITS, FLOATS, TO_INT, FROM_INT, READ_BLOCKS, WRITE_BLOCKS = range(6)


def copy(record: int, _thread: int, threads: int, scratch: int, _shared: int, sync: int) -> None:
    """dst = src0 in row-major order, whatever the shapes."""
    ne0, ne1, ne2 = word(record, NE_DST), word(record, NE_DST + 1), word(record, NE_DST + 2)
    rows = ne1 * ne2 * word(record, NE_DST + 3)
    for row in each_item(record, rows, portion(rows, threads)):
        y = row_address(record, DST, NB_DST, row % ne1, row // ne1 % ne2, row // (ne1 * ne2))
        _fill_row(record, row * ne0, y, ne0, calls.table_of(sync), scratch)


@jit
def _fill_row(record: int, position: int, y: int, count: int, table: int, scratch: int) -> None:
    """Copy `count` elements from a position of src0 in row-major order."""
    n0, n1, n2 = word(record, NE0), word(record, NE0 + 1), word(record, NE0 + 2)
    step0, step1 = word(record, NB0), word(record, NB_DST)
    row, i0 = position // n0, position % n0
    done = 0
    while done < count:
        run = min(count - done, n0 - i0)
        x = row_address(record, SRC, NB0, row % n1, row // n1 % n2, row // (n1 * n2)) + i0 * step0
        _copy_run(record, x, step0, y + done * step1, step1, run, table, scratch)
        done += run
        row += 1
        i0 = 0


@jit
def _copy_run(record: int, x: int, step0: int, y: int, step1: int, count: int, table: int, scratch: int) -> None:
    mode = word(record, PARAMS)
    if mode == UNITS:
        _copy_units(x, step0, y, step1, word(record, PARAMS + 1), count)
    elif mode == FLOATS:
        type0, type1 = word(record, TYPE0), word(record, TYPE_DST)
        for i in range(0, count, 16):
            value = take(x + i * step0, step0, type0, count - i, scratch)
            put(y + i * step1, step1, type1, value, count - i, scratch)
    elif mode == TO_INT:
        for i in range(count):
            store_i32(y + i * step1, int(load_f32(x + i * step0)))
    elif mode == FROM_INT:
        for i in range(count):
            store_f32(y + i * step1, load_i32(x + i * step0))
    elif mode == READ_BLOCKS:
        calls.dequantize(table, x, word(record, TYPE0), y, count, scratch)
    else:
        calls.quantize(table, x, y, word(record, TYPE_DST), count)


@jit
def _copy_units(x: int, step0: int, y: int, step1: int, size: int, count: int) -> None:
    if step0 == size and step1 == size:
        move(y, x, size * count)
    elif size == 4:
        for i in range(count):
            store_i32(y + i * step1, load_i32(x + i * step0))
    elif size == 2:
        for i in range(count):
            store_i16(y + i * step1, load_u16(x + i * step0))
    elif size == 8:
        for i in range(count):
            store_i64(y + i * step1, load_i64(x + i * step0))
    elif size == 1:
        for i in range(count):
            store_i8(y + i * step1, load_u8(x + i * step0))
    else:
        for i in range(count):
            move(y + i * step1, x + i * step0, size)


def repeat(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """dst = src0 tiled; parameter 1 is the size of an element."""
    ne0 = word(record, NE_DST)
    n0, n1, n2, n3 = word(record, NE0), word(record, NE0 + 1), word(record, NE0 + 2), word(record, NE0 + 3)
    step0, step1, size = word(record, NB0), word(record, NB_DST), word(record, PARAMS + 1)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        x = row_address(record, SRC, NB0, i1 % n1, i2 % n2, i3 % n3)
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        for i in range(0, ne0, n0):
            _copy_units(x, step0, y + i * step1, step1, size, n0)


def concat(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """dst = src0 and src1 joined along dimension (parameter 0); parameter 1 is the size of an element."""
    ne0 = word(record, NE_DST)
    axis, size, step = word(record, PARAMS), word(record, PARAMS + 1), word(record, NB_DST)
    before = word(record, NE0 + axis)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        if axis == 0:
            x = row_address(record, SRC, NB0, i1, i2, i3)
            _copy_units(x, word(record, NB0), y, step, size, before)
            x = row_address(record, SRC + 1, NB1, i1, i2, i3)
            _copy_units(x, word(record, NB1), y + before * step, step, size, ne0 - before)
            continue
        i = i1 if axis == 1 else (i2 if axis == 2 else i3)
        shift = before if i >= before else 0
        j1, j2, j3 = i1, i2, i3
        if axis == 1:
            j1 -= shift
        elif axis == 2:
            j2 -= shift
        else:
            j3 -= shift
        if shift != 0:
            _copy_units(row_address(record, SRC + 1, NB1, j1, j2, j3), word(record, NB1), y, step, size, ne0)
        else:
            _copy_units(row_address(record, SRC, NB0, j1, j2, j3), word(record, NB0), y, step, size, ne0)


def get_rows(record: int, _thread: int, threads: int, scratch: int, _shared: int, sync: int) -> None:
    """dst(:, i, p, q) = src0(:, src1(i, p, q), p, q)."""
    ne0 = word(record, NE_DST)
    kind, limit, table = word(record, TYPE0), word(record, NE0 + 1), calls.table_of(sync)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        index = load_i32(index_address(record, i1, i2, i3))
        if index < 0 or index >= limit:
            report_bad_index(record, sync, index)
            continue
        x = row_address(record, SRC, NB0, index, i2, i3)
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        calls.dequantize(table, x, kind, y, ne0, scratch)


@jit
def index_address(record: int, i0: int, i1: int, i2: int) -> int:
    """Address of an element of src1."""
    return word(record, SRC + 1) + i0 * word(record, NB1) + i1 * word(record, NB1 + 1) + i2 * word(record, NB1 + 2)


def set_rows(record: int, _thread: int, threads: int, scratch: int, _shared: int, sync: int) -> None:
    """dst(:, src1(i, p, q), p, q) = src0(:, i, p, q); parameter 0 is the type of the indices."""
    ne0 = word(record, NE0)
    kind, limit = word(record, TYPE_DST), word(record, NE_DST + 1)
    n2, n3 = word(record, NE1 + 1), word(record, NE1 + 2)
    wide = word(record, TYPE1) == I64
    for i1, i2, i3 in each_row(record, NE0, threads):
        place = index_address(record, i1, i2 % n2, i3 % n3)
        index = load_i64(place) if wide else load_i32(place)
        if index < 0 or index >= limit:
            report_bad_index(record, sync, index)
            continue
        x = row_address(record, SRC, NB0, i1, i2, i3)
        y = row_address(record, DST, NB_DST, index, i2, i3)
        _set_row(record, x, y, kind, ne0, calls.table_of(sync), scratch)


@jit
def _set_row(record: int, x: int, y: int, kind: int, count: int, table: int, scratch: int) -> None:
    source, step0, step1 = word(record, TYPE0), word(record, NB0), word(record, NB_DST)
    if kind != F32 and kind != F16 and kind != BF16:
        calls.quantize(table, x, y, kind, count)
        return
    for i in range(0, count, 16):
        value = take(x + i * step0, step0, source, count - i, scratch)
        put(y + i * step1, step1, kind, value, count - i, scratch)


def set_elements(record: int, _thread: int, threads: int, _scratch: int, _shared: int, sync: int) -> None:
    """SET_ROWS for many rows of one element, as a transposed cache is written: a scatter."""
    rows = word(record, NE0 + 1)
    source, kind, limit = word(record, TYPE0), word(record, TYPE_DST), word(record, NE_DST + 1)
    x, y, places = word(record, SRC), word(record, DST), word(record, SRC + 1)
    step0, step1, step2 = word(record, NB0 + 1), word(record, NB_DST + 1), word(record, NB1)
    wide = word(record, TYPE1) == I64
    for i in each_item(record, rows, portion(rows, threads)):
        index = load_i64(places + i * step2) if wide else load_i32(places + i * step2)
        if index < 0 or index >= limit:
            report_bad_index(record, sync, index)
            continue
        store_one(y + index * step1, kind, load_one(x + i * step0, source))
