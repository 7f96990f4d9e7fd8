"""Rows of weights times a few columns: a block of weights is decoded once and multiplied with up to eight columns.

One source for every number of columns: the accumulators are one value of type `Columns`, and numba compiles a kernel
for each size of it. Sums of K types are added up in the order in which ggml does it for few columns, so that results
are equal to the last bit; the others in an order of their own.
"""

from typing import Any, Final

from drover.worker.devices.cpu import calls
from drover.worker.devices.cpu.columns import (
    dot_bfloats,
    dot_constants,
    dot_floats,
    dot_fours,
    dot_nvfp4,
    dot_q2_k,
    dot_q4_k,
    dot_q5_k,
    dot_q6_k,
    dot_signed,
    dot_ternary,
    eight,
    four,
    one,
    store_k_sums,
    store_k_sums_and_minima,
    store_sums,
    two,
)
from drover.worker.devices.cpu.fours import AHEAD, decode_fours, decode_nvfp4
from drover.worker.devices.cpu.kinds import (
    F16_ID,
    F32_ID,
    IQ4_XS,
    NVFP4,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    TQ1_0,
    TQ2_0,
    block_bytes,
    bytes_of,
    has_constants,
    has_levels,
)
from drover.worker.devices.cpu.quantize import (
    FLOATS,
    FOUR_UNIT,
    FOURS,
    K_UNIT,
    KS,
    form_of,
    stride_of,
)
from drover.worker.devices.cpu.simd import (
    AVX512,
    jit,
    prefetch,
)
from drover.worker.devices.cpu.weights import (
    LEVEL_UNIT,
    clear,
    copy,
    decode_bf16,
    decode_f16,
    decode_f32,
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

_TAIL_BYTES: Final = 512
_NEAR_BYTES: Final = 36864
"""What of the first-level cache columns may fill."""
WIDEST: Final = 8 if AVX512 else 4
"""Columns at a time: as many as registers hold accumulators for."""


# ---- `rows` rows of k elements, `row` bytes apart, times columns `stride` bytes apart; results `step` apart.
# `more` is 0 where results are stored and 1 where they are added; `none` the zero accumulators; `tail` room for a unit.


@jit
def rows_k(
    table: int,
    kind: int,
    w: int,
    row: int,
    rows: int,
    k: int,
    y: int,
    stride: int,
    out: int,
    step: int,
    more: int,
    none: Any,
    room: int,
) -> None:
    """Types with blocks of 256; `room` is for a row of looked-up levels."""
    looked_up = has_levels(kind)
    size = LEVEL_UNIT if looked_up else block_bytes(kind)
    for r in range(rows):
        a, at, totals = w + r * row, y, none
        if looked_up:
            calls.look_up(table, kind, a, k // 256, room)
            a = room
        for _ in range(k // 256):
            if kind == Q4_K:
                totals = dot_q4_k(totals, decode_q4_k(a), at, stride)
            elif kind == Q5_K:
                totals = dot_q5_k(totals, decode_q5_k(a), at, stride)
            elif kind == Q2_K:
                totals = dot_q2_k(totals, decode_q2_k(a), at, stride)
            elif kind == Q3_K:
                totals = dot_q6_k(totals, decode_q3_k(a), at, stride)
            elif kind == Q6_K:
                totals = dot_q6_k(totals, decode_q6_k(a), at, stride)
            elif kind == TQ1_0:
                totals = dot_ternary(totals, decode_tq1_0(a), at, stride)
            elif kind == TQ2_0:
                totals = dot_ternary(totals, decode_tq2_0(a), at, stride)
            elif kind == IQ4_XS:
                totals = dot_signed(totals, decode_iq4_xs(a), at, stride)
            else:
                totals = dot_signed(totals, decode_levels(a), at, stride)
            a += size
            at += K_UNIT
        if kind in (Q2_K, Q4_K, Q5_K):
            store_k_sums_and_minima(totals, out + 4 * r, step, more)
        else:
            store_k_sums(totals, out + 4 * r, step, more)


@jit
def rows_fours(
    kind: int,
    w: int,
    row: int,
    rows: int,
    k: int,
    y: int,
    stride: int,
    out: int,
    step: int,
    more: int,
    none: Any,
    tail: int,
) -> None:
    """Types with blocks of 32 to 128."""
    size = bytes_of(kind, 128)
    whole = k // 128
    rest = bytes_of(kind, k % 128)
    clear(tail, size)
    for r in range(rows):
        a, at, totals = w + r * row, y, none
        for i in range(whole + (rest > 0)):
            if i == whole:
                copy(a, tail, rest)
                a = tail
            if kind == NVFP4:
                totals = dot_nvfp4(totals, decode_nvfp4(a), at, stride)
            else:
                block = decode_fours(kind, a)
                totals = dot_fours(totals, block, at, stride)
                if has_constants(kind):
                    totals = dot_constants(totals, block, at, stride)
            a += size
            at += FOUR_UNIT
        store_sums(totals, out + 4 * r, step, more)


@jit
def rows_floats(
    kind: int,
    w: int,
    row: int,
    rows: int,
    k: int,
    y: int,
    stride: int,
    out: int,
    step: int,
    more: int,
    none: Any,
    tail: int,
) -> None:
    """F32, F16 and BF16 weights, times floats."""
    size = 64 * block_bytes(kind)
    whole = k // 64
    rest = k % 64 * (size // 64)
    clear(tail, size)
    for r in range(rows):
        a, at, totals = w + r * row, y, none
        for i in range(whole + (rest > 0)):
            if i == whole:
                copy(a, tail, rest)
                a = tail
            if kind == F32_ID:
                block = decode_f32(a)
            elif kind == F16_ID:
                block = decode_f16(a)
            else:
                block = decode_bf16(a)
            totals = dot_floats(totals, block, at, stride)
            a += size
            at += 256
        store_sums(totals, out + 4 * r, step, more)


@jit
def rows_bfloats(
    w: int, row: int, rows: int, k: int, y: int, stride: int, out: int, step: int, more: int, none: Any, tail: int
) -> None:
    """BF16 weights, times bfloats."""
    whole = k // 128
    rest = k % 128 * 2
    clear(tail, 256)
    for r in range(rows):
        a, at, totals = w + r * row, y, none
        for i in range(whole + (rest > 0)):
            if i == whole:
                copy(a, tail, rest)
                a = tail
            for j in range(4):
                prefetch(a + AHEAD + 64 * j)
            totals = dot_bfloats(totals, a, at, stride)
            a += 256
            at += 256
        store_sums(totals, out + 4 * r, step, more)


# ---- any type, any number of columns


@jit
def scratch_bytes(kind: int, k: int) -> int:
    """Scratch that `times_columns` needs for rows of k elements."""
    return k // 256 * LEVEL_UNIT if has_levels(kind) else _TAIL_BYTES


def times_columns(
    table: int,
    kind: int,
    w: int,
    row: int,
    rows: int,
    k: int,
    y: int,
    stride: int,
    columns: int,
    out: int,
    step: int,
    tail: int,
) -> None:
    """Rows of any type, `row` bytes apart, times prepared columns, `stride` apart; results of a column `step` apart.

    Row r of a column goes to 4 r. `tail` is `scratch_bytes` of scratch.
    """
    form = form_of(kind)
    while columns > 0:
        count = 8 if columns >= 8 and WIDEST >= 8 else 4 if columns >= 4 else 2 if columns >= 2 else 1
        part = _part(form, k, count)
        for first in range(0, k, part):
            some = min(part, k - first)
            a = w + bytes_of(kind, first)
            x = y + stride_of(form, first)
            more = 1 if first > 0 else 0
            # The calls stand here, not in a function for each count: numba would compile them once more.
            if count == 8:
                if form == KS:
                    rows_k(table, kind, a, row, rows, some, x, stride, out, step, more, eight(), tail)
                elif form == FOURS:
                    rows_fours(kind, a, row, rows, some, x, stride, out, step, more, eight(), tail)
                elif form == FLOATS:
                    rows_floats(kind, a, row, rows, some, x, stride, out, step, more, eight(), tail)
                else:
                    rows_bfloats(a, row, rows, some, x, stride, out, step, more, eight(), tail)
            elif count == 4:
                if form == KS:
                    rows_k(table, kind, a, row, rows, some, x, stride, out, step, more, four(), tail)
                elif form == FOURS:
                    rows_fours(kind, a, row, rows, some, x, stride, out, step, more, four(), tail)
                elif form == FLOATS:
                    rows_floats(kind, a, row, rows, some, x, stride, out, step, more, four(), tail)
                else:
                    rows_bfloats(a, row, rows, some, x, stride, out, step, more, four(), tail)
            elif count == 2:
                if form == KS:
                    rows_k(table, kind, a, row, rows, some, x, stride, out, step, more, two(), tail)
                elif form == FOURS:
                    rows_fours(kind, a, row, rows, some, x, stride, out, step, more, two(), tail)
                elif form == FLOATS:
                    rows_floats(kind, a, row, rows, some, x, stride, out, step, more, two(), tail)
                else:
                    rows_bfloats(a, row, rows, some, x, stride, out, step, more, two(), tail)
            elif form == KS:
                rows_k(table, kind, a, row, rows, some, x, stride, out, step, more, one(), tail)
            elif form == FOURS:
                rows_fours(kind, a, row, rows, some, x, stride, out, step, more, one(), tail)
            elif form == FLOATS:
                rows_floats(kind, a, row, rows, some, x, stride, out, step, more, one(), tail)
            else:
                rows_bfloats(a, row, rows, some, x, stride, out, step, more, one(), tail)
        y += count * stride
        out += count * step
        columns -= count


@jit
def _part(form: int, k: int, count: int) -> int:
    """How much of k to take at a time, so that the columns stay in the first-level cache while rows pass."""
    if count < 8:
        return k
    most = _NEAR_BYTES // (count * (stride_of(form, 256) // 256)) // 256 * 256
    return most if k > most * 3 // 2 else k
