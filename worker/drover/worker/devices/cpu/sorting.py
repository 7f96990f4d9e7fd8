"""Orders: ARGSORT and TOP_K, by sorting the bits of floats a byte at a time, or by a heap of the few largest.

The lower index comes first among equals. Formulas: docs/protocol.md section 6.4.
"""

from typing import Any

from drover.worker.devices.cpu.record import DST, NB0, NB_DST, NE0, NE_DST, PARAMS, SRC
from drover.worker.devices.cpu.simd import (
    I16,
    I64,
    emits,
    f32x16,
    i64,
    jit,
    load_f32,
    load_f32x16,
    load_i32,
    load_u8,
    load_u32,
    splat_f32x16,
    store_i32,
)
from drover.worker.devices.cpu.sync import each_row
from drover.worker.devices.cpu.vector import move, row_address, word

FEW = 24
"""As many as a heap finds sooner than sorting does."""
LONGEST_ROW = 1 << 20
_BYTES, _VALUES = 4, 256
_COUNTS = 4 * _BYTES * _VALUES

# What sorts (parameter 0): from the least, from the largest.
RISING, FALLING = range(2)


def sorting_scratch(count: int) -> int:
    """Private bytes each thread needs to sort rows: counts, and twice the keys with their places."""
    return _COUNTS + 16 * count


def argsort(record: int, _thread: int, threads: int, scratch: int, _shared: int, _sync: int) -> None:
    """Indices that put every row in order, as many as the result has room for."""
    count, kept = word(record, NE0), word(record, NE_DST)
    sorted_ = scratch + _COUNTS
    for i1, i2, i3 in each_row(record, NE0, threads):
        x, order = row_address(record, SRC, NB0, i1, i2, i3), row_address(record, DST, NB_DST, i1, i2, i3)
        _count_bytes(x, count, word(record, PARAMS) == FALLING, scratch)
        for place in range(_BYTES):
            _spread(sorted_ + 8 * count * (place % 2), sorted_ + 8 * count * (1 - place % 2), count, place, scratch)
        for i in range(kept):
            store_i32(order + 4 * i, load_i32(sorted_ + 8 * i + 4))


@jit
def _count_bytes(x: int, count: int, falling: bool, scratch: int) -> None:
    """Keys, as unsigned numbers in the order of the floats, each with its index; how often a byte has each value."""
    for i in range(0, _COUNTS, 4):
        store_i32(scratch + i, 0)
    pairs = scratch + _COUNTS
    for i in range(count):
        bits = load_u32(x + 4 * i)
        if bits == 0x80000000:  # −0 is 0
            bits = 0
        key = bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000)
        if falling:
            key ^= 0xFFFFFFFF
        store_i32(pairs + 8 * i, key)
        store_i32(pairs + 8 * i + 4, i)
        for place in range(_BYTES):
            at = scratch + 4 * (_VALUES * place + (key >> (8 * place) & 255))
            store_i32(at, load_i32(at) + 1)


@jit
def _spread(source: int, target: int, count: int, place: int, scratch: int) -> None:
    """Put pairs in the order of one byte of their keys, those of one byte as they came."""
    counts = scratch + 4 * _VALUES * place
    total = 0
    for value in range(_VALUES):
        many = load_i32(counts + 4 * value)
        store_i32(counts + 4 * value, total)
        total += many
    for i in range(count):
        at = counts + 4 * load_u8(source + 8 * i + place)
        to = load_i32(at)
        move(target + 8 * to, source + 8 * i, 8)
        store_i32(at, to + 1)


def top_few(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Where the largest of every row are: a heap of them, the last of their order at its root."""
    count, kept = word(record, NE0), word(record, NE_DST)
    for i1, i2, i3 in each_row(record, NE0, threads):
        x, chosen = row_address(record, SRC, NB0, i1, i2, i3), row_address(record, DST, NB_DST, i1, i2, i3)
        for i in range(kept):
            store_i32(chosen + 4 * i, i)
        for start in range(kept // 2 - 1, -1, -1):
            _sift(x, chosen, start, kept)
        _scan(x, chosen, kept, count)


@jit
def _scan(x: int, chosen: int, kept: int, count: int) -> None:
    """Exchange the root for whatever is larger."""
    least = load_f32(x + 4 * load_i32(chosen))
    for start in range(kept, count, 16):
        if not any_greater(load_f32x16(x + 4 * start), splat_f32x16(least)):
            continue
        for i in range(start, min(start + 16, count)):
            if load_f32(x + 4 * i) > least:
                store_i32(chosen, i)
                _sift(x, chosen, 0, kept)
                least = load_f32(x + 4 * load_i32(chosen))


@emits(i64, f32x16, f32x16)
def any_greater(b: Any, x: Any, y: Any) -> Any:
    """1 if x > y in any lane, else 0."""
    lanes = b.bitcast(b.fcmp_ordered(">", x, y), I16)
    return b.zext(b.icmp_unsigned("!=", lanes, I16(0)), I64)


@jit
def _sift(x: int, heap: int, root: int, count: int) -> None:
    """Restore a heap whose root may come too early."""
    while 2 * root + 1 < count:
        child = 2 * root + 1
        if child + 1 < count and _before(x, heap, child, child + 1):
            child += 1
        if not _before(x, heap, root, child):
            break
        parent, other = load_i32(heap + 4 * root), load_i32(heap + 4 * child)
        store_i32(heap + 4 * root, other)
        store_i32(heap + 4 * child, parent)
        root = child


@jit
def _before(x: int, heap: int, a: int, b: int) -> bool:
    """Whether one member of the heap comes before another: it is larger, or as large and further left."""
    i, j = load_i32(heap + 4 * a), load_i32(heap + 4 * b)
    left, right = load_f32(x + 4 * i), load_f32(x + 4 * j)
    return left > right or (left == right and i < j)
