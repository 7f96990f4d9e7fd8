"""K types times many columns by tiles of bytes: whole sums of a block as ggml forms them for 8 columns and more.

A weight of a block is its byte times its scale, a whole number of up to 13 bits: two tiles hold the lower 7 and the
upper bits. Activations are rounded to 8 bits as for few columns. The sum over a block is exact, and per block follows
one step in floats: total += y · (d · sum − dm · minima). A panel is some rows of weights over the whole of k; a thread
takes one at a time and multiplies it with every column of its batch.
"""

from typing import Any, Final

from numba.core.typing.templates import signature

from drover.worker.devices.cpu import calls
from drover.worker.devices.cpu.kinds import (
    F16_ID,
    IQ4_XS,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    TQ1_0,
    TQ2_0,
    block_bytes,
    offset_of,
)
from drover.worker.devices.cpu.products import loop, transpose
from drover.worker.devices.cpu.quantize import K_SCALE, K_UNIT, KS, SUMS_OF_16, SUMS_OF_32
from drover.worker.devices.cpu.simd import (
    F32,
    FEATURES,
    I16,
    I32,
    I64,
    broadcast,
    constant,
    dot_pairs,
    emits,
    emits_for,
    f32x16,
    fused,
    halves,
    i8x64,
    i16x32,
    i32x16,
    i64,
    jit,
    read,
    shuffle,
    store,
    void,
    write,
    zero_f32x16,
)
from drover.worker.devices.cpu.tiles import (
    TILE_BYTES,
    TILES,
    column_at,
    steps,
    store_results,
    write_results,
    zero_results,
)
from drover.worker.devices.cpu.weights import (
    as_k,
    clear,
    decode_iq4_xs,
    decode_levels,
    decode_q2_k,
    decode_q3_k,
    decode_q4_k,
    decode_q5_k,
    decode_q6_k,
    decode_tq1_0,
    decode_tq2_0,
)

COMPILED: Final = TILES and "amx-int8" in FEATURES
"""Whether the processor has the instructions; the system must still permit them."""

_PANEL_BYTES: Final = 5 << 18
_PANEL_ROWS: Final = 128
_W_UNIT: Final = 9 * TILE_BYTES
"""A block of 16 rows: four tiles of lower bits, four of upper bits, and a tile of heads."""
_X_UNIT: Final = 5 * TILE_BYTES
"""A block of 16 columns: four tiles, and a tile of heads, turned so that 16 columns are 16 lanes."""
_TOTALS: Final = 6 * TILE_BYTES
_ROOM: Final = _TOTALS + _PANEL_ROWS // 16 * 2 * TILE_BYTES
"""A thread's scratch: tiles, the totals of a panel and 32 columns from `_TOTALS` on, the panel from `_ROOM` on."""
_DM: Final = K_SCALE + 4
"""Where dm stands in the head of a row; the rest of it is as in the head of a column."""


def panel_scratch(k: int) -> int:
    """Bytes of scratch that a thread needs for rows of k weights."""
    return int(_ROOM + panel_rows(k, 1 << 30, 1) * k // 256 * (_W_UNIT // 16))


@jit
def packed_bytes(k: int, columns: int) -> int:
    """Bytes of the packed activations of one batch."""
    return (columns + 31) // 32 * 2 * (k // 256) * _X_UNIT


@jit
def panel_rows(k: int, rows: int, threads: int) -> int:
    """Rows of a panel: it fits the second-level cache, and there is work for every thread."""
    most = min(_PANEL_ROWS, _PANEL_BYTES // (k // 256 * (_W_UNIT // 16)))
    fair = (rows + 2 * threads - 1) // (2 * threads)
    return max(32, min(most, fair) // 32 * 32)


# ---- instructions


_step_wide, _step_narrow = steps("tdpbssd", COMPILED, ((0, 2), (1, 3)))
"""16 rows, lower and upper bits, by 32 columns, or by 16: registers 0 and 2 sum lower bits, 1 and 3 upper bits."""


@emits_for(lambda block, offset, out, head: signature(void, block, i64, i64, i64), 4)
def _expand(b: Any, block: Any, offset: Any, out: Any, head: Any) -> None:
    """A block of one row: lines of four tiles of lower and four of upper bits at `out`, and its head."""
    scales, minima, factors = (b.extract_value(block, i) for i in range(4, 7))
    taken = broadcast(b, b.trunc(offset, I16), 32)
    for j in range(4):
        weighted = []
        for h, bytes_ in enumerate(halves(b, b.extract_value(block, j))):
            s = shuffle(b, scales, [4 * j + 2 * h + i // 16 for i in range(32)])
            weighted.append(b.mul(b.sub(b.zext(bytes_, i16x32.ir), taken), s))
        lower = [b.and_(x, constant(i16x32, 127)) for x in weighted]
        upper = [b.ashr(x, constant(i16x32, 7)) for x in weighted]
        for base, pair in ((0, lower), (4, upper)):
            low, high = (b.bitcast(x, i8x64.ir) for x in pair)
            line = shuffle(b, low, range(0, 128, 2), high)
            write(b, b.add(out, I64((base + j) * TILE_BYTES)), line)
    write(b, b.add(head, I64(SUMS_OF_32 if minima.type.count == 8 else SUMS_OF_16)), minima)
    write(b, b.add(head, I64(K_SCALE)), b.extract_element(factors, I32(0)))
    write(b, b.add(head, I64(_DM)), b.extract_element(factors, I32(1)))


def _finish(start: int, pairs: int) -> Any:
    """An instruction that adds the sums of a block to totals, 16 rows by 16 columns; `pairs` of minima at `start`."""

    def finish(b: Any, sums: Any, rows: Any, columns: Any, totals: Any) -> None:
        def line(base: Any, dword: int, kind: Any) -> Any:
            return read(b, b.add(base, I64(64 * dword)), kind)

        scale = line(columns, K_SCALE // 4, f32x16.ir)
        sums_of_x = [line(columns, start // 4 + i, i16x32.ir) for i in range(pairs)]

        def row(index: Any, _: list[Any]) -> list[Any]:
            shift = b.mul(index, I64(64))
            head = b.add(rows, shift)

            def each(offset: int, kind: Any) -> Any:
                return broadcast(b, read(b, b.add(head, I64(offset)), kind), 16)

            lower, upper = (read(b, b.add(b.add(sums, shift), I64(i * TILE_BYTES)), i32x16.ir) for i in (0, 1))
            whole = b.add(lower, b.shl(upper, constant(i32x16, 7)))
            value = b.fmul(each(K_SCALE, F32), b.sitofp(whole, f32x16.ir))
            if pairs:
                taken = constant(i32x16, 0)
                for i, x in enumerate(sums_of_x):
                    taken = dot_pairs(b, taken, b.bitcast(each(start + 4 * i, I32), i16x32.ir), x)
                value = fused(b, each(_DM, F32), b.sitofp(taken, f32x16.ir), value)
            place = b.add(totals, shift)
            write(b, place, fused(b, scale, value, read(b, place, f32x16.ir)))
            return []

        loop(b, I64(16), [], row)

    finish.__name__ = f"finish_{pairs}"
    return emits(void, *[i64] * 4)(finish)


_finish_plain, _finish_by_32, _finish_by_16 = _finish(0, 0), _finish(SUMS_OF_32, 4), _finish(SUMS_OF_16, 8)


# ---- packing


def pack(
    table: int,
    kind: int,
    tid: int,
    nth: int,
    x: int,
    x_kind: int,
    step: int,
    columns: int,
    places: int,
    k: int,
    out: int,
    scratch: int,
) -> None:
    """This thread's share of some columns (see `gemm.pack`) in units of 16 columns; missing columns are zeros.

    `scratch` holds 16 units and a block of floats.
    """
    blocks = k // 256
    room = scratch + 16 * K_UNIT
    size = 2 if x_kind == F16_ID else 4
    for item in range(tid, (columns + 31) // 32 * 2 * blocks, nth):
        first, block = item // blocks * 16, item % blocks
        for column in range(16):
            unit = scratch + column * K_UNIT
            if first + column < columns:
                source = column_at(x, step, places, first + column) + block * 256 * size
                calls.prepare(table, kind, KS, source, x_kind, 256, unit, room)
            else:
                clear(unit, K_UNIT)
        at = out + item * _X_UNIT
        for i in range(4):
            transpose(scratch + 64 + 64 * i, K_UNIT, at + i * TILE_BYTES, 64)
        transpose(scratch, K_UNIT, at + 4 * TILE_BYTES, 64)


@jit
def _fill_panel(table: int, kind: int, w: int, row: int, rows: int, blocks: int, panel: int, room: int) -> None:
    """Rows of weights to units, those of one block side by side; `room` is for a block of looked-up levels."""
    groups = (rows + 15) // 16
    offset = offset_of(kind)
    for group in range(groups):
        for r in range(min(16, rows - 16 * group)):
            a = w + (16 * group + r) * row
            for i in range(blocks):
                unit = panel + (i * groups + group) * _W_UNIT
                out, head = unit + 64 * r, unit + 8 * TILE_BYTES + 64 * r
                if kind == Q4_K:
                    _expand(decode_q4_k(a), offset, out, head)
                elif kind == Q5_K:
                    _expand(decode_q5_k(a), offset, out, head)
                elif kind == Q2_K:
                    _expand(decode_q2_k(a), offset, out, head)
                elif kind == Q3_K:
                    _expand(decode_q3_k(a), offset, out, head)
                elif kind == Q6_K:
                    _expand(decode_q6_k(a), offset, out, head)
                elif kind == TQ1_0:
                    _expand(decode_tq1_0(a), offset, out, head)
                elif kind == TQ2_0:
                    _expand(decode_tq2_0(a), offset, out, head)
                elif kind == IQ4_XS:
                    _expand(as_k(decode_iq4_xs(a)), offset, out, head)
                else:
                    calls.look_up(table, kind, a, 1, room)
                    _expand(as_k(decode_levels(room)), offset, out, head)
                a += block_bytes(kind)


# ---- the product


def multiply_panel(
    table: int, kind: int, w: int, row: int, rows: int, k: int, x: int, columns: int, out: int, step: int, scratch: int
) -> None:
    """`rows` rows of weights, `row` bytes apart, times packed columns; a column of results every `step` bytes."""
    panel, totals = scratch + _ROOM, scratch + _TOTALS
    blocks, groups = k // 256, (rows + 15) // 16
    _fill_panel(table, kind, w, row, rows, blocks, panel, scratch)
    for c in range(0, columns, 32):
        for i in range(0, groups * 2 * TILE_BYTES, 64):
            store(totals + i, zero_f32x16())
        for i in range(blocks):
            x0 = x + (c // 16 * blocks + i) * _X_UNIT
            for group in range(groups):
                unit = panel + (i * groups + group) * _W_UNIT
                _add_block(kind, unit, x0, blocks * _X_UNIT, columns - c > 16, totals + group * 2 * TILE_BYTES, scratch)
        for r in range(0, rows, 32):
            place = out + c * step + 4 * r
            tiles = totals + r // 16 * 2 * TILE_BYTES
            write_results(tiles, min(32, rows - r), min(32, columns - c), place, step, scratch)


@jit
def _add_block(kind: int, unit: int, x0: int, far: int, wide: bool, totals: int, sums: int) -> None:
    """16 rows times 32 columns (or 16, if not `wide`), one block of each; the second 16 columns lie `far` bytes off."""
    zero_results()
    for i in range(0, 4 * TILE_BYTES, TILE_BYTES):
        if wide:
            _step_wide(unit + i, unit + 4 * TILE_BYTES + i, x0 + i, x0 + far + i)
        else:
            _step_narrow(unit + i, unit + 4 * TILE_BYTES + i, x0 + i)
    store_results(sums)
    for half in range(2 if wide else 1):
        at, heads = sums + half * 2 * TILE_BYTES, x0 + half * far + 4 * TILE_BYTES
        if kind in (Q4_K, Q5_K):
            _finish_by_32(at, unit + 8 * TILE_BYTES, heads, totals + half * TILE_BYTES)
        elif kind == Q2_K:
            _finish_by_16(at, unit + 8 * TILE_BYTES, heads, totals + half * TILE_BYTES)
        else:
            _finish_plain(at, unit + 8 * TILE_BYTES, heads, totals + half * TILE_BYTES)
