"""What chooses, and what is chosen: the largest of a row, rows added by number, the scores of a sparse attention.

Formulas: docs/protocol.md sections 6.4 and 6.7.
"""

from drover.worker.devices.cpu import calls
from drover.worker.devices.cpu.blocks import ROOM_BYTES
from drover.worker.devices.cpu.products import multiply, transpose
from drover.worker.devices.cpu.record import (
    DST,
    F32,
    NB0,
    NB1,
    NB2,
    NB3,
    NB_DST,
    NE0,
    NE1,
    NE3,
    NE_DST,
    SRC,
    TYPE1,
    TYPE3,
)
from drover.worker.devices.cpu.simd import (
    fma,
    jit,
    load_f32,
    load_f32x16,
    load_i32,
    maximum,
    splat_f32x16,
    store,
    store_i32,
    zero_f32x16,
)
from drover.worker.devices.cpu.sync import each_item, each_row, report_bad_index
from drover.worker.devices.cpu.vector import greatest, keep, load_row, row_address, store_row, word

CELLS = 64
"""Cells that are scored at a time,"""
SCORED_TOKENS = 32
"""for so many tokens."""
MOST_HEADS = 1024
"""Heads; what a thread's scratch for scores is proportional to."""

_LOWEST = float("-inf")
_STRETCH = 256


def add_id(record: int, _thread: int, threads: int, _scratch: int, _shared: int, sync: int) -> None:
    """dst(:, u, t) = src0(:, u, t) + src1(:, src2(u, t))."""
    ne0 = word(record, NE_DST)
    limit = word(record, NE1 + 1)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        index = load_i32(row_address(record, SRC + 2, NB2 - 1, i1, i2, i3))
        if index < 0 or index >= limit:
            report_bad_index(record, sync, index)
            continue
        x = row_address(record, SRC, NB0, i1, i2, i3)
        b = word(record, SRC + 1) + index * word(record, NB1 + 1)
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        for i in range(0, ne0, 16):
            store_row(y + 4 * i, F32, load_f32x16(x + 4 * i) + load_f32x16(b + 4 * i), ne0 - i)


def argmax(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Where the first largest of every row is."""
    count = word(record, NE0)
    for i1, i2, i3 in each_row(record, NE0, threads):
        place = _first_largest(row_address(record, SRC, NB0, i1, i2, i3), count)
        store_i32(row_address(record, DST, NB_DST - 1, i1, i2, i3), place)


@jit
def _first_largest(x: int, count: int) -> int:
    """The stretch with the largest first, then its place in there."""
    top, at = load_f32(x), 0
    for start in range(0, count, _STRETCH):
        best = splat_f32x16(_LOWEST)
        for i in range(start, min(start + _STRETCH, count), 16):
            best = maximum(keep(load_f32x16(x + 4 * i), count - i, _LOWEST), best)
        largest = greatest(best)
        if largest > top:
            top, at = largest, start
    for i in range(at, count):
        if load_f32(x + 4 * i) == top:
            return i
    return 0


def scores_scratch(size: int, heads: int) -> int:
    """Private bytes each thread needs for `lightning_indexer`."""
    return 4 * (16 * size + CELLS * size + CELLS * heads) + ROOM_BYTES


def lightning_indexer(record: int, _thread: int, _threads: int, scratch: int, _shared: int, sync: int) -> None:
    """Operands: q, k, weights, mask; dst(c, t) = Σ_h max(0, q_h · k_c) · w_h + mask(c, t)."""
    size, cells, tokens = word(record, NE0), word(record, NE_DST), word(record, NE_DST + 1)
    blocks, parts = (cells + CELLS - 1) // CELLS, (tokens + SCORED_TOKENS - 1) // SCORED_TOKENS
    keys, products = scratch + 64 * size, scratch + 64 * size + 4 * CELLS * size
    table, room = calls.table_of(sync), products + 4 * CELLS * word(record, NE0 + 1)
    for item in each_item(record, blocks * parts * word(record, NE_DST + 3), 1):
        first, part, stream = item % blocks * CELLS, item // blocks % parts, item // (blocks * parts)
        count = min(CELLS, cells - first)
        for start in range(0, CELLS, 16):
            for row in range(min(16, count - start)):
                k = row_address(record, SRC + 1, NB1, 0, first + start + row, stream)
                calls.dequantize(table, k, word(record, TYPE1), scratch + 4 * size * row, size, room)
            for i in range(0, size, 16):
                transpose(scratch + 4 * i, 4 * size, keys + 4 * (CELLS * i + start), 4 * CELLS)
        for token in range(SCORED_TOKENS * part, min(SCORED_TOKENS * (part + 1), tokens)):
            _score(record, token, stream, first, count, keys, products)


@jit
def _score(record: int, token: int, stream: int, first: int, count: int, keys: int, products: int) -> None:
    """The scores of one token for some cells, whose keys are columns."""
    size, heads = word(record, NE0), word(record, NE0 + 1)
    kind = word(record, TYPE3)
    wide = 4 if kind == F32 else 2
    for i in range(0, CELLS * heads, 16):
        store(products + 4 * i, zero_f32x16())
    q = row_address(record, SRC, NB0, 0, token, stream)
    multiply(q, word(record, NB0 + 1), keys, 4 * CELLS, products, 4 * CELLS, size, heads, CELLS)
    weights = row_address(record, SRC + 2, NB2, token, 0, stream)
    mask = row_address(record, SRC + 3, NB3, token, 0, stream % word(record, NE3 + 3)) + wide * first
    y = row_address(record, DST, NB_DST, token, 0, stream) + 4 * first
    for i in range(0, count, 16):
        total = zero_f32x16()
        for head in range(heads):
            product = maximum(load_f32x16(products + 4 * (CELLS * head + i)), zero_f32x16())
            total = fma(product, splat_f32x16(load_f32(weights + head * word(record, NB2))), total)
        store_row(y + 4 * i, F32, total + load_row(mask + wide * i, kind), count - i)
