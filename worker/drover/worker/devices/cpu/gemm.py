"""Many columns at once on processors with AMX: a panel of weights as bfloat tiles, times activations as tiles of pairs.

A panel is some rows of weights over the whole of k; a thread takes one panel at a time and multiplies it with every
column of its batch. Tiles are 16 rows of 64 bytes, kept 1 KiB apart, so that loads never share a cache set. Where
`COMPILED` is false nothing here may be called: the instructions are left out.
"""

from typing import Any, Final

import numba
from llvmlite import ir
from numba.core.typing.templates import signature

from drover.worker.devices.cpu.fours import decode_fours, decode_nvfp4
from drover.worker.devices.cpu.kinds import (
    F16_ID,
    F32_ID,
    NVFP4,
    block_bytes,
    bytes_of,
    has_constants,
    is_float,
    offset_of,
)
from drover.worker.devices.cpu.products import transpose
from drover.worker.devices.cpu.simd import (
    DOT_BF16,
    F32,
    FEATURES,
    I16,
    I64,
    bf16x32,
    broadcast,
    emits,
    emits_for,
    f32,
    f32x16,
    fused,
    i64,
    jit,
    jit_inline,
    load_i8x64,
    narrow_f16,
    read,
    shuffle,
    store,
    void,
    widen_f16,
    write,
    zero_i32x16,
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
from drover.worker.devices.cpu.weights import clear, copy

COMPILED: Final = TILES and DOT_BF16 and "amx-bf16" in FEATURES
"""Whether the processor has the instructions; the system must still permit them."""

_PANEL_BYTES: Final = 1 << 19
_PANEL_ROWS: Final = 128
_TAIL: Final = 6144
_ROOM: Final = 8192
"""A thread's scratch: five tiles, the tail of a row from `_TAIL` on, the panel from `_ROOM` on."""


def panel_scratch(kind: int, k: int) -> int:
    """Bytes of scratch that a thread needs for rows of k weights."""
    return int(_ROOM + panel_rows(kind, k, 1 << 30, 1) * padded(kind, k) * 2)


@jit
def packed_bytes(kind: int, k: int, columns: int) -> int:
    """Bytes of the packed activations of one batch."""
    return (columns + 31) // 32 * 32 * padded(kind, k) * 2


@jit
def parts(kind: int) -> int:
    """How many bfloats stand for one product: F16 has more digits than one, so w·x is w₁·x₁ + w₁·x₂ + w₂·x₁."""
    return 3 if kind == F16_ID else 1


@jit
def padded(kind: int, k: int) -> int:
    """How many bfloats a panel holds of a row of k weights of this type."""
    unit = 32 if is_float(kind) else 128
    return (k + unit - 1) // unit * unit * parts(kind)


@jit
def panel_rows(kind: int, k: int, rows: int, threads: int) -> int:
    """Rows of a panel: it fits half the second-level cache, and there is work for every thread."""
    most = min(_PANEL_ROWS, _PANEL_BYTES // (2 * padded(kind, k)))
    fair = (rows + 2 * threads - 1) // (2 * threads)
    return max(32, min(most, fair) // 32 * 32)


# ---- instructions


_step_wide, _step_narrow = steps("tdpbf16ps", COMPILED, ((0, 1), (2, 3)))
"""32 rows by 32 columns, or by 16: the result of each pair of tiles in a register of its own."""


def _store_bf16(b: Any, a: Any, low: Any, high: Any) -> None:
    both = shuffle(b, low, range(32), high)
    if DOT_BF16:
        write(b, a, b.fptrunc(both, bf16x32.ir))


@emits(void, i64, i64)
def _bf16_of_f32(b: Any, source: Any, out: Any) -> None:
    _store_bf16(b, out, read(b, source, f32x16.ir), read(b, b.add(source, I64(64)), f32x16.ir))


def _halves(b: Any, source: Any) -> Any:
    """32 half-precision floats, widened."""
    pair = [widen_f16(b, read(b, b.add(source, I64(32 * i)), ir.VectorType(I16, 16))) for i in range(2)]
    return shuffle(b, pair[0], range(32), pair[1])


def _two_parts(b: Any, x: Any) -> tuple[Any, Any]:
    """The nearest bfloats of 32 floats, and those of what is missing."""
    first = b.fptrunc(x, bf16x32.ir)
    return first, b.fptrunc(b.fsub(x, b.fpext(first, ir.VectorType(F32, 32))), bf16x32.ir)


@emits(void, i64, i64)
def _weights_of_f16(b: Any, source: Any, out: Any) -> None:
    """The three parts of 32 weights, a tile apart: w₁, w₁, w₂."""
    if DOT_BF16:
        first, second = _two_parts(b, _halves(b, source))
        for i, part in enumerate((first, first, second)):
            write(b, b.add(out, I64(TILE_BYTES * i)), part)


def _activations(halves16: bool) -> Any:
    def split(b: Any, source: Any, out: Any) -> None:
        """The three parts of 32 activations rounded to half precision, a tile apart: x₁, x₂, x₁."""
        if not DOT_BF16:
            return
        if halves16:
            x = _halves(b, source)
        else:
            pair = [read(b, b.add(source, I64(64 * i)), f32x16.ir) for i in range(2)]
            pair = [widen_f16(b, narrow_f16(b, x)) for x in pair]
            x = shuffle(b, pair[0], range(32), pair[1])
        first, second = _two_parts(b, x)
        for i, part in enumerate((first, second, first)):
            write(b, b.add(out, I64(TILE_BYTES * i)), part)

    split.__name__ = f"split_f{16 if halves16 else 32}"
    return emits(void, i64, i64)(split)


_split_f16, _split_f32 = _activations(True), _activations(False)


@emits(void, i64, i64)
def _bf16_of_f16(b: Any, source: Any, out: Any) -> None:
    if DOT_BF16:
        write(b, out, b.fptrunc(_halves(b, source), bf16x32.ir))


def _lane(b: Any, x: Any, i: int) -> Any:
    return shuffle(b, x, [i] * 16)


def _bytes_f32(b: Any, q: Any, sixteenth: int) -> Any:
    part = shuffle(b, q, range(16 * sixteenth, 16 * sixteenth + 16))
    return b.uitofp(part, f32x16.ir)


@emits_for(lambda block, offset, constants, out: signature(void, block, f32, f32, i64), 4)
def _expand_fours(b: Any, block: Any, offset: Any, constants: Any, out: Any) -> None:
    """Four blocks of 32 as bfloats: a line of four tiles; `constants` is 1 where there are any."""
    low, high, d, m = (b.extract_value(block, i) for i in range(4))
    m = b.fsub(b.fmul(m, broadcast(b, constants, 16)), b.fmul(d, broadcast(b, offset, 16)))
    for i in range(4):
        pair = [fused(b, _bytes_f32(b, u, i), _lane(b, d, 4 * i), _lane(b, m, 4 * i)) for u in (low, high)]
        _store_bf16(b, b.add(out, I64(TILE_BYTES * i)), *pair)


@emits_for(lambda block, offset, out: signature(void, block, f32, i64), 3)
def _expand_halves(b: Any, block: Any, offset: Any, out: Any) -> None:
    """Like `_expand_fours`, where both halves of a block have factors."""
    parts = [(b.extract_value(block, i), b.extract_value(block, i + 2)) for i in (0, 1)]
    middle = broadcast(b, offset, 16)
    for i in range(4):
        pair = [b.fmul(b.fsub(_bytes_f32(b, u, i), middle), _lane(b, d, 4 * i)) for u, d in parts]
        _store_bf16(b, b.add(out, I64(TILE_BYTES * i)), *pair)


# ---- weights into a panel


@jit
def _expand(kind: int, w: int, row: int, rows: int, k: int, out: int, tail: int) -> None:
    """At most 16 rows of k elements to a row of tiles, 1 KiB apart; zeros up to `padded`. `tail` is room for a unit.

    Rows stand inside, so that what is written at a time lies close together.
    """
    if is_float(kind):
        _expand_floats(kind, w, row, rows, k, out, tail)
    else:
        _expand_blocks(kind, w, row, rows, k, out, tail)


@jit
def _expand_blocks(kind: int, w: int, row: int, rows: int, k: int, out: int, tail: int) -> None:
    size = bytes_of(kind, 128)
    whole = k // 128
    rest = bytes_of(kind, k % 128)
    offset = numba.float32(offset_of(kind))
    constants = numba.float32(1 if has_constants(kind) else 0)
    clear(tail, size)
    for i in range(whole + (rest > 0)):
        for r in range(rows):
            a = w + r * row + i * size
            if i == whole:
                copy(a, tail, rest)
                a = tail
            place = out + i * 4 * TILE_BYTES + r * 64
            if kind == NVFP4:
                _expand_halves(decode_nvfp4(a), offset, place)
            else:
                _expand_fours(decode_fours(kind, a), offset, constants, place)


@jit
def _expand_floats(kind: int, w: int, row: int, rows: int, k: int, out: int, tail: int) -> None:
    size = block_bytes(kind)
    whole = k // 32
    clear(tail, 128)
    for r in range(rows):
        if kind == F16_ID:
            for i in range(whole):
                _weights_of_f16(w + r * row + i * 64, out + 3 * i * TILE_BYTES + r * 64)
        else:
            for i in range(whole):
                store(out + i * TILE_BYTES + r * 64, load_i8x64(w + r * row + i * 64))
        if k % 32 > 0:
            copy(w + r * row + whole * 32 * size, tail, k % 32 * size)
            if kind == F16_ID:
                _weights_of_f16(tail, out + 3 * whole * TILE_BYTES + r * 64)
            else:
                store(out + whole * TILE_BYTES + r * 64, load_i8x64(tail))


# ---- activations into tiles of pairs


def pack(
    _table: int,
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
    """This thread's share of some columns to tiles of 16 columns; zeros pad both ways.

    They lie `step` bytes apart from x on, or, if `places` is not 0, at the distances from x that are listed there.
    """
    room = scratch + _TAIL
    n, width = parts(kind), padded(kind, k)
    for tile in range(tid, (columns + 31) // 32 * 2, nth):
        first = tile * 16
        at = out + first * width * 2
        for group in range(width // (32 * n)):
            for column in range(16):
                if first + column >= columns or group * 32 >= k:
                    for i in range(n):
                        store(scratch + i * TILE_BYTES + 64 * column, zero_i32x16())
                else:
                    source = column_at(x, step, places, first + column)
                    left = k - group * 32
                    if x_kind == F16_ID:
                        _pack_group(F16_ID, n, source + group * 64, left, scratch + 64 * column, room)
                    else:
                        _pack_group(F32_ID, n, source + group * 128, left, scratch + 64 * column, room)
            for i in range(n):
                transpose(scratch + i * TILE_BYTES, 64, at + (group * n + i) * TILE_BYTES, 64)


@jit_inline
def _pack_group(kind: int, n: int, source: int, left: int, out: int, room: int) -> None:
    if left < 32:
        clear(room, 128)
        copy(source, room, left * (2 if kind == F16_ID else 4))
        source = room
    if n == 3:
        if kind == F16_ID:
            _split_f16(source, out)
        else:
            _split_f32(source, out)
    elif kind == F16_ID:
        _bf16_of_f16(source, out)
    else:
        _bf16_of_f32(source, out)


# ---- the product


def multiply_panel(
    _table: int, kind: int, w: int, row: int, rows: int, k: int, x: int, columns: int, out: int, step: int, scratch: int
) -> None:
    """`rows` rows of weights, `row` bytes apart, times packed columns; a column of results every `step` bytes."""
    panel = scratch + _ROOM
    width = padded(kind, k)
    groups = width // 32
    for r in range(0, rows, 16):
        _expand(kind, w + r * row, row, min(16, rows - r), k, panel + r * width * 2, scratch + _TAIL)
    for c in range(0, columns, 32):
        x0 = x + c * width * 2
        for r in range(0, rows, 32):
            w0 = panel + r * width * 2
            zero_results()
            if columns - c <= 16:
                for g in range(groups):
                    at = g * TILE_BYTES
                    _step_narrow(w0 + at, w0 + groups * TILE_BYTES + at, x0 + at)
            else:
                for g in range(groups):
                    at = g * TILE_BYTES
                    far = groups * TILE_BYTES + at
                    _step_wide(w0 + at, w0 + far, x0 + at, x0 + far)
            store_results(scratch)
            at = out + c * step + 4 * r
            write_results(scratch, min(32, rows - r), min(32, columns - c), at, step, scratch + 4 * TILE_BYTES)
