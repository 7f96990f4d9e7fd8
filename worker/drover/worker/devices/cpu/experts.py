"""MUL_MAT_ID: dst(:, u, t) = as(:, :, ids(u, t))ᵀ · b(:, u mod B, t); docs/protocol.md section 6.5.

The pairs (u, t) are sorted by expert first. An expert with few columns goes through the row kernels, up to eight
columns at a time gathered from those that were prepared once and for all experts; one with many goes through tiles.
Rows of results are written where they belong, so nothing of the size of the result is kept. An expert's number out of
range is reported, and its pair left out.
"""

from typing import Final

from drover.ggml.tensor import Shape
from drover.worker.devices.cpu import calls, matmul
from drover.worker.devices.cpu.matmul import K_TILE_COLUMNS
from drover.worker.devices.cpu.quantize import column_bytes, form_of, stride_of
from drover.worker.devices.cpu.record import (
    COUNTER2,
    DST,
    NB0,
    NB1,
    NB2,
    NB_DST,
    NE0,
    NE1,
    NE2,
    SRC,
    TYPE0,
    TYPE1,
)
from drover.worker.devices.cpu.rows import scratch_bytes as row_scratch
from drover.worker.devices.cpu.simd import atomic_add, jit, load_i32, load_i64, store_i64
from drover.worker.devices.cpu.sync import barrier, each_item, each_stretch, report_bad_index
from drover.worker.devices.cpu.tiles import configure, release
from drover.worker.devices.cpu.vector import move, word
from drover.worker.devices.device import Node

_TOGETHER: Final = 8
"""Columns of an expert that pass its rows together."""
_MOST_ROWS: Final = 64
_PANEL_ROWS: Final = 128

# What the threads share, in words of 8 bytes after the numbers of experts in use and of packed columns: for each
# expert its first pair (and the end), the experts in use, where their packed columns start; the pairs by expert, the
# distances of their columns from the first, and the expert of each pair, read once: clients may write meanwhile.
_USED, _TILES, _HEAD = 0, 1, 8


def supported(node: Node) -> bool:
    """Whether `mul_mat_id` can execute a node whose shapes have been checked."""
    ids = node.src[2]
    return ids is not None and min(ids.ne) > 0 and matmul.supported(node)


def scratch_bytes(kind: int, ne0: Shape, ids: Shape) -> int:
    """Bytes that each thread needs for experts of these shapes and so many indices."""
    k, pairs = ne0[0], ids[0] * ids[1]
    few = row_scratch(kind, k) + (_TOGETHER + 1) * column_bytes(k) + 4 * _TOGETHER * _MOST_ROWS
    panel = matmul.panel_scratch(kind, k)
    return max(few, (panel + 63) // 64 * 64 + 4 * _PANEL_ROWS * pairs if pairs >= K_TILE_COLUMNS else 0)


def shared_bytes(kind: int, ne0: Shape, ne1: Shape, ids: Shape) -> int:
    """Bytes that all threads share for operands of these shapes."""
    k, pairs = ne0[0], ids[0] * ids[1]
    return int(
        _lists_bytes(ne0[2], pairs)
        + ne1[1] * ne1[2] * stride_of(form_of(kind), k)
        + (
            matmul.packed_bytes(kind, k, pairs + 31 * min(ne0[2], pairs // K_TILE_COLUMNS))
            if pairs >= K_TILE_COLUMNS
            else 0
        )
    )


@jit
def _lists_bytes(experts: int, pairs: int) -> int:
    return (8 * (_HEAD + 3 * experts + 1 + 3 * pairs) + 63) // 64 * 64


def mul_mat_id(record: int, tid: int, nth: int, scratch: int, shared: int, sync: int) -> None:
    """Execute one record; `scratch` is this thread's alone, `shared` all threads', sized by the functions above."""
    least = matmul.least_for_tiles(record, word(record, NE2) * word(record, NE2 + 1))
    if tid == 0:
        _sort(record, shared, least, sync)
    barrier(sync, nth)
    _prepare(record, nth, scratch, shared, least, sync)
    barrier(sync, nth)
    _multiply(record, nth, scratch, shared, least, sync)


@jit
def _starts(shared: int) -> int:
    return shared + 8 * _HEAD


@jit
def _used(record: int, shared: int) -> int:
    return _starts(shared) + 8 * (word(record, NE0 + 2) + 1)


@jit
def _packed(record: int, shared: int) -> int:
    return _used(record, shared) + 8 * word(record, NE0 + 2)


@jit
def _pairs(record: int, shared: int) -> int:
    return _packed(record, shared) + 8 * word(record, NE0 + 2)


@jit
def _distances(record: int, shared: int) -> int:
    return _pairs(record, shared) + 8 * word(record, NE2) * word(record, NE2 + 1)


@jit
def _columns(record: int, shared: int) -> int:
    """Where the prepared columns start."""
    return shared + _lists_bytes(word(record, NE0 + 2), word(record, NE2) * word(record, NE2 + 1))


@jit
def _tiles(record: int, shared: int) -> int:
    """Where the packed columns start."""
    stride = stride_of(form_of(word(record, TYPE0)), word(record, NE0))
    return _columns(record, shared) + word(record, NE1 + 1) * word(record, NE1 + 2) * stride


@jit
def _sort(record: int, shared: int, least: int, sync: int) -> None:
    """List the pairs by expert, count twice over: first how many each has, then where each stands."""
    experts, ranks, tokens = word(record, NE0 + 2), word(record, NE2), word(record, NE2 + 1)
    starts, pairs, distances = _starts(shared), _pairs(record, shared), _distances(record, shared)
    chosen = distances + 8 * ranks * tokens
    for e in range(experts + 1):
        store_i64(starts + 8 * e, 0)
    for place in range(ranks * tokens):
        e = load_i32(_id_address(record, place))
        if e < 0 or e >= experts:
            report_bad_index(record, sync, e)
            e = -1
        store_i64(chosen + 8 * place, e)
        if e >= 0:
            store_i64(starts + 8 * e + 8, load_i64(starts + 8 * e + 8) + 1)
    used, packed = 0, 0
    for e in range(experts):
        count = load_i64(starts + 8 * e + 8)
        store_i64(starts + 8 * e + 8, load_i64(starts + 8 * e) + count)
        store_i64(_packed(record, shared) + 8 * e, packed)
        if count > 0:
            store_i64(_used(record, shared) + 8 * used, e)
            used += 1
        if count >= least:
            packed += (count + 31) // 32 * 32
    listed = load_i64(starts + 8 * experts)
    store_i64(shared + 8 * _USED, used)
    store_i64(shared + 8 * _TILES, packed)
    for place in range(ranks * tokens - 1, -1, -1):
        e = load_i64(chosen + 8 * place)
        if e < 0:
            continue
        at = load_i64(starts + 8 * e + 8) - 1  # ends move down to where they started: the starts of the next experts
        store_i64(starts + 8 * e + 8, at)
        store_i64(pairs + 8 * at, place)
        store_i64(distances + 8 * at, _distance(record, place))
    for e in range(experts):
        store_i64(starts + 8 * e, load_i64(starts + 8 * e + 8))
    store_i64(starts + 8 * experts, listed)


@jit
def _id_address(record: int, place: int) -> int:
    ranks = word(record, NE2)
    return word(record, SRC + 2) + place % ranks * word(record, NB2) + place // ranks * word(record, NB2 + 1)


@jit
def _distance(record: int, place: int) -> int:
    """How far the column of a pair lies from the first."""
    ranks = word(record, NE2)
    return place % ranks % word(record, NE1 + 1) * word(record, NB1 + 1) + place // ranks * word(record, NB1 + 2)


@jit
def _prepare(record: int, nth: int, scratch: int, shared: int, least: int, sync: int) -> None:
    """Columns for the experts that have few, then packed ones for each that has many."""
    kind, k, x_kind = word(record, TYPE0), word(record, NE0), word(record, TYPE1)
    form, x, table = form_of(kind), word(record, SRC + 1), calls.table_of(sync)
    stride, rows = stride_of(form, k), word(record, NE1 + 1)
    starts, used = _starts(shared), load_i64(shared + 8 * _USED)
    few = False
    for i in range(used):
        e = load_i64(_used(record, shared) + 8 * i)
        few = few or load_i64(starts + 8 * e + 8) - load_i64(starts + 8 * e) < least
    columns = rows * word(record, NE1 + 2) if few else 0
    while True:
        item = atomic_add(record + 8 * COUNTER2, 1)
        if item < columns:
            source = x + item % rows * word(record, NB1 + 1) + item // rows * word(record, NB1 + 2)
            calls.prepare(table, kind, form, source, x_kind, k, _columns(record, shared) + item * stride, scratch)
            continue
        if item >= columns + used:
            break
        e = load_i64(_used(record, shared) + 8 * (item - columns))
        first = load_i64(starts + 8 * e)
        count = load_i64(starts + 8 * e + 8) - first
        if count >= least:
            places = _distances(record, shared) + 8 * first
            out = _tiles(record, shared) + matmul.packed_bytes(kind, k, load_i64(_packed(record, shared) + 8 * e))
            matmul.pack(table, kind, 0, 1, x, x_kind, 0, count, places, k, out, scratch)


@jit
def _multiply(record: int, nth: int, scratch: int, shared: int, least: int, sync: int) -> None:
    if load_i64(shared + 8 * _TILES) > 0:
        _multiply_panels(record, nth, scratch, shared, least, sync)
    else:
        _multiply_rows(record, nth, scratch, shared, sync)


@jit
def _multiply_rows(record: int, nth: int, scratch: int, shared: int, sync: int) -> None:
    rows, used = word(record, NE0 + 1), load_i64(shared + 8 * _USED)
    for i, first, some in each_stretch(record, used, rows, matmul.LEAST_ROWS, rows * used, _MOST_ROWS, nth):
        _by_rows(record, load_i64(_used(record, shared) + 8 * i), first, some, scratch, shared, sync)


@jit
def _multiply_panels(record: int, nth: int, scratch: int, shared: int, least: int, sync: int) -> None:
    """The same where an expert at least has enough columns for tiles."""
    kind, k, rows = word(record, TYPE0), word(record, NE0), word(record, NE0 + 1)
    starts, used = _starts(shared), load_i64(shared + 8 * _USED)
    configure(scratch)
    chunk = matmul.panel_rows(kind, k, rows * used, nth)
    chunks = (rows + chunk - 1) // chunk
    for item in each_item(record, chunks * used, 1):
        e, first = load_i64(_used(record, shared) + 8 * (item // chunks)), item % chunks * chunk
        some = min(chunk, rows - first)
        if load_i64(starts + 8 * e + 8) - load_i64(starts + 8 * e) >= least:
            _by_tiles(record, e, first, some, scratch, shared, sync)
        else:
            for start in range(first, first + some, _MOST_ROWS):
                _by_rows(record, e, start, min(_MOST_ROWS, first + some - start), scratch, shared, sync)
    release()


@jit
def _weights(record: int, e: int, first: int) -> int:
    return word(record, SRC) + e * word(record, NB0 + 2) + first * word(record, NB0 + 1)


@jit
def _result(record: int, shared: int, i: int, first: int) -> int:
    """Where results of a listed pair go, from a row on."""
    place, ranks = load_i64(_pairs(record, shared) + 8 * i), word(record, NE2)
    row = word(record, DST) + 4 * first
    return row + place % ranks * word(record, NB_DST + 1) + place // ranks * word(record, NB_DST + 2)


@jit
def _prepared(record: int, shared: int, i: int) -> int:
    """The prepared column of a listed pair."""
    place, ranks, rows = load_i64(_pairs(record, shared) + 8 * i), word(record, NE2), word(record, NE1 + 1)
    stride = stride_of(form_of(word(record, TYPE0)), word(record, NE0))
    return _columns(record, shared) + (place // ranks * rows + place % ranks % rows) * stride


@jit
def _by_rows(record: int, e: int, first: int, rows: int, scratch: int, shared: int, sync: int) -> None:
    """Some rows of an expert times its columns, a few at a time."""
    kind, k, table = word(record, TYPE0), word(record, NE0), calls.table_of(sync)
    stride, row, w = stride_of(form_of(kind), k), word(record, NB0 + 1), _weights(record, e, first)
    gathered = scratch + (row_scratch(kind, k) + 63) // 64 * 64
    results = gathered + _TOGETHER * column_bytes(k)
    start, end = load_i64(_starts(shared) + 8 * e), load_i64(_starts(shared) + 8 * e + 8)
    for i in range(start, end, _TOGETHER):
        count = min(_TOGETHER, end - i)
        y, out, step = _prepared(record, shared, i), _result(record, shared, i, first), 0
        if count > 1:
            for j in range(count):
                move(gathered + j * stride, _prepared(record, shared, i + j), stride)
            y, out, step = gathered, results, 4 * _MOST_ROWS
        calls.times_columns(table, kind, w, row, rows, k, y, stride, count, out, step, scratch)
        if count > 1:
            for j in range(count):
                move(_result(record, shared, i + j, first), results + j * step, 4 * rows)


@jit
def _by_tiles(record: int, e: int, first: int, rows: int, scratch: int, shared: int, sync: int) -> None:
    """Some rows of an expert times all its columns."""
    kind, k, table = word(record, TYPE0), word(record, NE0), calls.table_of(sync)
    row, w, step = word(record, NB0 + 1), _weights(record, e, first), 4 * _PANEL_ROWS
    x = _tiles(record, shared) + matmul.packed_bytes(kind, k, load_i64(_packed(record, shared) + 8 * e))
    start = load_i64(_starts(shared) + 8 * e)
    count = load_i64(_starts(shared) + 8 * e + 8) - start
    pairs = word(record, NE2) * word(record, NE2 + 1)
    results, panel = scratch, scratch + step * pairs
    matmul.multiply_panel(table, kind, w, row, rows, k, x, count, results, step, panel)
    for i in range(count):
        move(_result(record, shared, start + i, first), results + i * step, 4 * rows)
