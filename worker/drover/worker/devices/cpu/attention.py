"""FLASH_ATTN_EXT: softmax(scale · q kᵀ + mask) v in one pass over the cells of the cache, with running maxima.

The queries that share a head of k and v (all tokens, all heads of the group) are rows of one matrix, cut into tiles
of 64; a tile meets the cells 64 at a time, and both products of such a block are small matrix products. Keys and values
are widened to floats once a block and serve all rows of the tile. A block masked for every row is skipped, and a cell
masked for every row counts as zeros, since what it holds may never have been written. With few rows and many threads
the cells are split as well, and the parts joined at the end. Definition: docs/protocol.md section 6.6.
"""

from numba import float32, float64

from drover.worker.devices.cpu import calls, in_order
from drover.worker.devices.cpu.blocks import ROOM_BYTES
from drover.worker.devices.cpu.kinds import is_float
from drover.worker.devices.cpu.norm import head_slope
from drover.worker.devices.cpu.products import dots, multiply, transpose
from drover.worker.devices.cpu.record import (
    BF16,
    COUNTER2,
    DST,
    F16,
    F32,
    NB0,
    NB1,
    NB2,
    NB3,
    NB_DST,
    NE0,
    NE1,
    NE2,
    NE3,
    PARAMS,
    Q8_0,
    SRC,
    TYPE1,
    TYPE2,
    TYPE3,
)
from drover.worker.devices.cpu.simd import (
    atomic_add,
    fma,
    jit,
    load_f32,
    load_f32x16,
    load_i32,
    maximum,
    prefetch,
    round_to_f16_f32x16,
    splat_f32x16,
    store,
    store_f32,
    store_i32,
    sum_lanes,
    zero_f32x16,
)
from drover.worker.devices.cpu.sync import barrier, each_item
from drover.worker.devices.cpu.vector import (
    exp,
    exp_as_libm,
    first_lane,
    greatest,
    keep,
    load_row,
    param,
    row_address,
    tanh,
    widen,
    word,
)

ROWS = 64
"""Rows of a tile."""
CELLS = 64
"""Cells of a block."""
TRANSPOSE_FROM = 4
"""Rows from which transposing the keys pays; below, each row is multiplied with each key."""

# Parameters: floats, except FEW (see norm.head_slope), SPLITS (parts the cells are cut into) and AS_GGML.
SCALE, BASE, BASE_ODD, FEW, SOFTCAP, SPLITS, AS_GGML = range(7)

ROUND_QUERIES = 1
"""AS_GGML: queries are rounded as products with the type of the keys would (F16, blocks of eight bits) first."""
IN_ORDER = 2
"""AS_GGML: cells are summed one after another in half precision (see `in_order`)."""

# What is kept for a row of a tile: its maximum so far, and at these bytes the sum under it, the slope of its head and
# the number of its line of the mask.
STATE, SLOPE, LINE = 16, 8, 12

_NONE = float("-inf")


def scratch_bytes(dk: int, dv: int) -> int:
    """Private bytes each thread needs; must match `_tile`."""
    floats = ROWS * dk + CELLS * dk + 16 * dk + CELLS * dv + 2 * ROWS * CELLS + ROWS * dv + CELLS + 4 * ROWS
    return 4 * floats + ROOM_BYTES


def shared_bytes(dv: int, rows: int, splits: int) -> int:
    """Bytes for the parts of all `rows` (of all heads and streams) when the cells are split."""
    return 4 * rows * splits * (dv + 16) if splits > 1 else 0


def attention(record: int, _thread: int, threads: int, scratch: int, shared: int, sync: int) -> None:
    """Run a FLASH_ATTN_EXT record."""
    streams, kv_heads = word(record, NE0 + 3), max(word(record, NE1 + 2), word(record, NE2 + 2))
    rows = word(record, NE0 + 1) * word(record, NE0 + 2) // kv_heads
    tiles = (rows + ROWS - 1) // ROWS
    splits = word(record, PARAMS + SPLITS)
    items = streams * kv_heads * tiles * splits
    for item in each_item(record, items, 1):
        split, item = item % splits, item // splits
        head, item = item % kv_heads, item // kv_heads
        tile = tiles - 1 - item % tiles  # the last tokens see the most cells: longest work first
        _tile(record, item // tiles, head, kv_heads, tile, rows, split, splits, scratch, shared, calls.table_of(sync))
    if splits > 1:
        barrier(sync, threads)
        _join(record, streams, kv_heads, rows, splits, shared)


@jit
def _tile(
    record: int,
    stream: int,
    head: int,
    kv_heads: int,
    tile: int,
    all_rows: int,
    split: int,
    splits: int,
    scratch: int,
    shared: int,
    table: int,
) -> None:
    dk, dv, cells = word(record, NE1), word(record, NE2), word(record, NE1 + 1)
    group = word(record, NE0 + 2) // kv_heads
    first = tile * ROWS
    rows = min(ROWS, all_rows - first)
    queries = scratch
    keys = queries + 4 * ROWS * dk
    narrow = keys + 4 * CELLS * dk
    values = narrow + 4 * 16 * dk
    scores = values + 4 * CELLS * dv
    result = scores + 4 * ROWS * CELLS
    masks = result + 4 * ROWS * dv
    used = masks + 4 * ROWS * CELLS
    state = used + 4 * CELLS
    room = state + STATE * ROWS
    _load_queries(record, stream, head, group, first, rows, dk, queries, table, keys)
    for i in range(0, rows * dv, 16):
        store(result + 4 * i, zero_f32x16())
    for r in range(rows):
        place = state + STATE * r
        store_f32(place, _NONE)
        store_f32(place + in_order.NORM, 0.0)
        store_f32(place + SLOPE, _row_slope(record, head * group + (first + r) % group))
        store_i32(place + LINE, _mask_line(record, group, first, r))
    k = word(record, SRC + 1) + _kv_head(record, NE1, head, kv_heads) * word(record, NB1 + 2)
    k += _kv_stream(record, NE1, stream) * word(record, NB1 + 3)
    v = word(record, SRC + 2) + _kv_head(record, NE2, head, kv_heads) * word(record, NB2 + 2)
    v += _kv_stream(record, NE2, stream) * word(record, NB2 + 3)
    blocks = (cells + CELLS - 1) // CELLS
    for block in range(blocks * split // splits, blocks * (split + 1) // splits):
        start = block * CELLS
        count = min(CELLS, cells - start)
        if not _load_mask(record, stream, head * group, group, first, rows, start, count, masks, used):
            continue
        _scores(record, k + start * word(record, NB1 + 1), rows, dk, queries, keys, narrow, scores, used, table, room)
        _bend(param(record, SCALE), param(record, SOFTCAP), rows, scores)
        if word(record, PARAMS + AS_GGML) & IN_ORDER == 0:
            _soften(rows, dv, scores, masks, state, result)
        step = word(record, NB2 + 1)
        for i in range(0, CELLS, 16):
            _load_cells(
                v + (start + i) * step, step, word(record, TYPE2), dv, values + 4 * i * dv, used + 4 * i, table, room
            )
        if word(record, PARAMS + AS_GGML) & IN_ORDER != 0:
            _sum_in_order(rows, dv, scores, masks, state, values, result)
        else:
            multiply(scores, 4 * CELLS, values, 4 * dv, result, 4 * dv, count, rows, dv)
    if splits > 1:
        row = (stream * kv_heads + head) * all_rows + first
        _keep_part(row, rows, split, splits, dv, result, state, shared)
    else:
        _finish(record, stream, head * group, group, first, rows, dv, result, state)


@jit
def _kv_head(record: int, extents: int, head: int, kv_heads: int) -> int:
    return head // (kv_heads // word(record, extents + 2))


@jit
def _kv_stream(record: int, extents: int, stream: int) -> int:
    return stream * word(record, extents + 3) // word(record, NE0 + 3)


@jit
def _load_queries(
    record: int, stream: int, head: int, group: int, first: int, rows: int, dk: int, queries: int, table: int, room: int
) -> None:
    """The rows of a tile, rounded to the type of the keys if they shall be; `room` holds a row."""
    rounds = word(record, PARAMS + AS_GGML) & ROUND_QUERIES != 0
    for r in range(rows):
        token, member = (first + r) // group, (first + r) % group
        q = row_address(record, SRC, NB0, token, head * group + member, stream)
        target = queries + 4 * r * dk
        if rounds and not is_float(word(record, TYPE1)):
            calls.quantize(table, q, room, Q8_0, dk)
            widen(room, Q8_0, target, dk)
            q = target
        for i in range(0, dk, 16):
            x = load_f32x16(q + 4 * i)
            if rounds and word(record, TYPE1) == F16:
                x = round_to_f16_f32x16(x)
            store(target + 4 * i, x)


@jit
def _load_mask(
    record: int,
    stream: int,
    head: int,
    group: int,
    first: int,
    rows: int,
    start: int,
    count: int,
    masks: int,
    used: int,
) -> bool:
    """The mask of every token (and, where masks differ by head, of every row) of a tile over a block, as floats.

    `used` gets the greatest mask value of each cell; the answer is whether any cell is used at all.
    """
    none = splat_f32x16(_NONE)
    mask = word(record, SRC + 3)
    if mask == 0:
        for i in range(0, CELLS, 16):
            open_ = keep(zero_f32x16(), count - i, _NONE)
            store(masks + 4 * i, open_)
            store(used + 4 * i, open_)
        return True
    kind = word(record, TYPE3)
    size = 4 if kind == F32 else 2
    for i in range(0, CELLS, 16):
        store(used + 4 * i, none)
    per_head = word(record, NE3 + 2) != 1
    for line in range(_mask_line(record, group, first, rows - 1) + 1):
        token, member = first // group + line, 0
        if per_head:
            token, member = (first + line) // group, (head + (first + line) % group) % word(record, NE3 + 2)
        place = row_address(record, SRC + 3, NB3, token, member, stream % word(record, NE3 + 3))
        for i in range(0, CELLS, 16):
            value = keep(load_row(place + (start + i) * size, kind), count - i, _NONE)
            store(masks + 4 * (line * CELLS + i), value)
            store(used + 4 * i, maximum(value, load_f32x16(used + 4 * i)))
    most = maximum(load_f32x16(used), load_f32x16(used + 64))
    most = maximum(maximum(most, load_f32x16(used + 128)), load_f32x16(used + 192))
    return greatest(most) > _NONE


@jit
def _mask_line(record: int, group: int, first: int, r: int) -> int:
    """Which line of `masks` belongs to row r of a tile."""
    if word(record, SRC + 3) == 0:
        return 0
    if word(record, NE3 + 2) != 1:
        return r
    return (first + r) // group - first // group


@jit
def _load_cells(source: int, step: int, kind: int, width: int, target: int, used: int, table: int, room: int) -> None:
    """Widen the rows of 16 cells; zeros for unused ones."""
    ahead = CELLS * step
    for i in range(16):
        line = target + 4 * i * width
        if load_f32(used + 4 * i) > _NONE:
            place = source + i * step
            for j in range(0, 2 * width, 64):
                prefetch(place + ahead + j)
            if kind in (F32, F16, BF16, Q8_0):
                widen(place, kind, line, width)
            else:
                calls.dequantize(table, place, kind, line, width, room)
        else:
            for j in range(0, width, 16):
                store(line + 4 * j, zero_f32x16())


@jit
def _scores(
    record: int,
    k: int,
    rows: int,
    dk: int,
    queries: int,
    keys: int,
    narrow: int,
    scores: int,
    used: int,
    table: int,
    room: int,
) -> None:
    """scores = queries · keysᵀ, a line of `CELLS` for every row."""
    step, kind = word(record, NB1 + 1), word(record, TYPE1)
    ordered = word(record, PARAMS + AS_GGML) & IN_ORDER != 0
    few = ordered or rows < TRANSPOSE_FROM
    for i in range(0, CELLS, 16):
        lines = keys + 4 * i * dk if few else narrow
        _load_cells(k + i * step, step, kind, dk, lines, used + 4 * i, table, room)
        for r in range(rows if few else 0):
            query, line = queries + 4 * r * dk, scores + 4 * (r * CELLS + i)
            if ordered:
                in_order.dots(query, lines, 4 * dk, dk, line)
            else:
                store(line, dots(query, lines, 4 * dk, dk // 16))
        for j in range(0, 0 if few else dk, 16):
            transpose(narrow + 4 * j, 4 * dk, keys + 4 * (j * CELLS + i), 4 * CELLS)
    if not few:
        for i in range(0, rows * CELLS, 16):
            store(scores + 4 * i, zero_f32x16())
        multiply(queries, 4 * dk, keys, 4 * CELLS, scores, 4 * CELLS, dk, rows, CELLS)


@jit
def _bend(scale: float, cap: float, rows: int, scores: int) -> None:
    """Scale the scores, and bend them so that none exceeds `cap` if there is one."""
    for i in range(0, 4 * rows * CELLS, 64):
        x = load_f32x16(scores + i) * splat_f32x16(scale)
        if cap != 0.0:
            x = tanh(x / splat_f32x16(cap)) * splat_f32x16(cap)
        store(scores + i, x)


@jit
def _row_slope(record: int, head: int) -> float:
    return head_slope(head, word(record, PARAMS + FEW), param(record, BASE), param(record, BASE_ODD))


@jit
def _soften(rows: int, dv: int, scores: int, masks: int, state: int, result: int) -> None:
    """Turn scores into weights relative to the running maximum; rescale what was summed under an older one."""
    for r in range(rows):
        line, at = scores + 4 * r * CELLS, state + STATE * r
        mask = masks + 4 * CELLS * load_i32(at + LINE)
        slope = splat_f32x16(load_f32(at + SLOPE))
        s0 = fma(slope, load_f32x16(mask), load_f32x16(line))
        s1 = fma(slope, load_f32x16(mask + 64), load_f32x16(line + 64))
        s2 = fma(slope, load_f32x16(mask + 128), load_f32x16(line + 128))
        s3 = fma(slope, load_f32x16(mask + 192), load_f32x16(line + 192))
        old = load_f32(at)
        top = max(old, greatest(maximum(maximum(s0, s1), maximum(s2, s3))))
        if top == _NONE:
            for i in range(0, CELLS, 16):
                store(line + 4 * i, zero_f32x16())
            continue
        high = splat_f32x16(top)
        s0, s1, s2, s3 = exp(s0 - high), exp(s1 - high), exp(s2 - high), exp(s3 - high)
        store(line, s0)
        store(line + 64, s1)
        store(line + 128, s2)
        store(line + 192, s3)
        norm = load_f32(at + in_order.NORM)
        if top > old:
            factor = exp_as_libm(splat_f32x16(old - top))
            norm = float32(norm * first_lane(factor))
            store_f32(at, top)
            for i in range(0, dv, 16):
                place = result + 4 * (r * dv + i)
                store(place, load_f32x16(place) * factor)
        # Each vector is summed in single, vectors in double precision, as ggml does.
        total = float64(sum_lanes(s0)) + sum_lanes(s1) + sum_lanes(s2) + sum_lanes(s3)
        store_f32(at + in_order.NORM, float32(float64(norm) + total))


@jit
def _sum_in_order(rows: int, dv: int, scores: int, masks: int, state: int, values: int, result: int) -> None:
    """What `_soften` and the product do, in ggml's order and precision."""
    for r in range(rows):
        line, at = scores + 4 * r * CELLS, state + STATE * r
        mask = masks + 4 * CELLS * load_i32(at + LINE)
        slope = splat_f32x16(load_f32(at + SLOPE))
        for i in range(0, CELLS, 16):
            store(line + 4 * i, fma(slope, load_f32x16(mask + 4 * i), load_f32x16(line + 4 * i)))
            in_order.add_cells(line + 4 * i, values + 4 * i * dv, dv, result + 4 * r * dv, at)


@jit
def _finish(
    record: int, stream: int, head: int, group: int, first: int, rows: int, dv: int, result: int, state: int
) -> None:
    """Divide by the sums and store."""
    for r in range(rows):
        token, member = (first + r) // group, (first + r) % group
        factor = splat_f32x16(
            _share(record, head + member, load_f32(state + STATE * r), load_f32(state + STATE * r + in_order.NORM))
        )
        place = row_address(record, DST, NB_DST, head + member, token, stream)
        for i in range(0, dv, 16):
            store(place + 4 * i, load_f32x16(result + 4 * (r * dv + i)) * factor)


@jit
def _share(record: int, head: int, top: float, norm: float) -> float:
    """What a row is multiplied with at the end; the sink of its head joins the sum. 0 for a row without cells."""
    sinks = word(record, SRC + 4)
    if top == _NONE:
        return 0.0
    if sinks == 0:
        return 1.0 / norm
    sink = load_f32(sinks + 4 * head)
    high = max(top, sink)
    factor = first_lane(exp(splat_f32x16(top - high)))
    return factor / (norm * factor + first_lane(exp(splat_f32x16(sink - high))))


@jit
def _keep_part(row: int, rows: int, split: int, splits: int, dv: int, result: int, state: int, shared: int) -> None:
    """Leave sums, maximum and divisor of a tile over some cells for `_join`."""
    for r in range(rows):
        place = shared + 4 * (dv + 16) * ((row + r) * splits + split)
        store_f32(place, load_f32(state + STATE * r))
        store_f32(place + in_order.NORM, load_f32(state + STATE * r + in_order.NORM))
        for i in range(0, dv, 16):
            store(place + 64 + 4 * i, load_f32x16(result + 4 * (r * dv + i)))


@jit
def _join(record: int, streams: int, kv_heads: int, rows: int, splits: int, shared: int) -> None:
    """Add up the parts of every row."""
    dv, group = word(record, NE2), word(record, NE0 + 2) // kv_heads
    while True:
        row = atomic_add(record + 8 * COUNTER2, 1)
        if row >= streams * kv_heads * rows:
            break
        inner, stream, head = row % rows, row // (rows * kv_heads), row // rows % kv_heads
        part = shared + 4 * (dv + 16) * row * splits
        step = 4 * (dv + 16)
        top = _NONE
        for split in range(splits):
            top = max(top, load_f32(part + step * split))
        member = head * group + inner % group
        place = row_address(record, DST, NB_DST, member, inner // group, stream)
        norm = 0.0
        for split in range(splits):
            norm += load_f32(part + step * split + in_order.NORM) * _weight(load_f32(part + step * split), top)
        share = splat_f32x16(_share(record, member, top, norm))
        for i in range(0, dv, 16):
            total = zero_f32x16()
            for split in range(splits):
                weight = splat_f32x16(_weight(load_f32(part + step * split), top))
                total = fma(weight, load_f32x16(part + step * split + 64 + 4 * i), total)
            store(place + 4 * i, total * share)


@jit
def _weight(maximum_: float, top: float) -> float:
    if maximum_ == _NONE:
        return 0.0
    return first_lane(exp(splat_f32x16(maximum_ - top)))
