"""Rows of weights times a few columns: a block of weights is decoded once and multiplied with up to eight columns.

One source for every number of columns: the accumulators are one value of type `Columns`, and numba compiles a kernel
for each size of it. Sums of K types are added up in the order in which ggml does it for few columns, so that results
are equal to the last bit; the others in an order of their own.
"""

from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import signature
from numba.extending import models, register_model

from drover.worker.devices.cpu import calls
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
    block_bytes,
    bytes_of,
    has_constants,
    has_levels,
)
from drover.worker.devices.cpu.quantize import (
    FLOATS,
    FOUR_UNIT,
    FOURS,
    K_SCALE,
    K_UNIT,
    KS,
    SUMS_OF_16,
    SUMS_OF_32,
    form_of,
    stride_of,
)
from drover.worker.devices.cpu.simd import (
    AVX512,
    F32,
    I32,
    I64,
    Vector,
    add_byte_pairs,
    add_pairs,
    broadcast,
    call,
    constant,
    dot_bf16,
    dot_bytes,
    dot_pairs,
    emits,
    emits_for,
    f32x16,
    fused,
    halves,
    i8x64,
    i16x8,
    i16x16,
    i16x32,
    i32x8,
    i32x16,
    i64,
    jit,
    joined,
    prefetch,
    read,
    shuffle,
    void,
    write,
)
from drover.worker.devices.cpu.weights import (
    AHEAD,
    LEVEL_UNIT,
    clear,
    copy,
    decode_bf16,
    decode_f16,
    decode_f32,
    decode_fours,
    decode_iq4_xs,
    decode_levels,
    decode_nvfp4,
    decode_q2_k,
    decode_q3_k,
    decode_q4_k,
    decode_q5_k,
    decode_q6_k,
)

_TAIL_BYTES: Final = 512
_NEAR_BYTES: Final = 36864
"""What of the first-level cache columns may fill."""
_WIDEST: Final = 8 if AVX512 else 4
"""Columns at a time: as many as registers hold accumulators for."""
_FEW: Final = 2
"""Up to so many columns a sum is split, so that additions do not wait for one another."""


class Columns(types.Type):
    """The accumulators of `count` columns: a vector each."""

    def __init__(self, vector: Vector, count: int) -> None:
        self.vector = vector
        self.count = count
        super().__init__(name=f"{count} of {vector.name}")


@register_model(Columns)
class _ColumnsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, columns: Columns) -> None:
        super().__init__(manager, columns, ir.ArrayType(columns.vector.ir, columns.count))


def _zeros(vector: Vector, count: int) -> Any:
    def zeros(b: Any) -> Any:
        return ir.Constant(ir.ArrayType(vector.ir, count), [constant(vector, 0.0)] * count)

    zeros.__name__ = f"zeros_{vector.name}_{count}"
    return emits(Columns(vector, count))(zeros)


one, two, four, eight = (_zeros(f32x16, n) for n in (1, 2, 4, 8))


def _first(*kinds: Any) -> Any:
    return signature(kinds[0], *kinds) if isinstance(kinds[0], Columns) else None


def _column(b: Any, y: Any, stride: Any, i: int) -> Any:
    return b.add(y, b.mul(stride, I64(i)))


def _and_nothing(b: Any, x: Any) -> Any:
    """Eight lanes, then zeros."""
    return joined(b, x, constant(i32x8, 0))


def _minima_by_four(b: Any, sums: Any, minima: Any, at: Any) -> Any:
    """Products of the minima in the next lanes, two to a lane."""
    taken = add_pairs(b, minima, read(b, b.add(at, I64(SUMS_OF_32)), i16x8.ir))
    return joined(b, sums, joined(b, taken, shuffle(b, constant(i32x8, 0), range(4))))


def _minima_in_one(b: Any, sums: Any, minima: Any, at: Any) -> Any:
    """Products of the minima in the next lane, all of them."""
    taken = add_pairs(b, minima, read(b, b.add(at, I64(SUMS_OF_32)), i16x8.ir))
    whole = call(b, "llvm.vector.reduce.add.v4i32", I32, taken)
    return joined(b, sums, b.insert_element(constant(i32x8, 0), whole, I32(0)))


def _minima_by_two(b: Any, sums: Any, minima: Any, at: Any) -> Any:
    """Like `_minima_by_four`, where there is a minimum for 16 elements."""
    return joined(b, sums, add_pairs(b, minima, read(b, b.add(at, I64(SUMS_OF_16)), i16x16.ir)))


def _offset_taken(b: Any, sums: Any, minima: Any, at: Any) -> Any:
    """What q counts from taken away, two sums of 16 elements to a lane."""
    taken = add_pairs(b, minima, read(b, b.add(at, I64(SUMS_OF_16)), i16x16.ir))
    return _and_nothing(b, b.sub(sums, taken))


def _dot_k(mend: Any) -> Any:
    """An instruction that adds the products of a K block; `mend` says what becomes of the minima.

    The first eight lanes are ggml's: lane i sums elements 4 i to 4 i + 3 of every 32, as integers over a block, and one
    multiplication and addition of floats follows. Lanes from 8 on hold the minima.
    """

    def dot(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
        q = [b.extract_value(block, i) for i in range(4)]
        scales, minima, d, dm = (b.extract_value(block, i) for i in range(4, 8))
        s = [shuffle(b, scales, [4 * j + i // 8 for i in range(32)]) for j in range(4)]
        factors = joined(b, broadcast(b, d, 8), broadcast(b, b.fneg(dm), 8))
        for i in range(totals.type.count):
            at = _column(b, y, stride, i)
            whole = constant(i32x16, 0)
            for j in range(4):
                x = read(b, b.add(at, I64(64 + 64 * j)), i8x64.ir)
                whole = dot_pairs(b, whole, add_byte_pairs(b, q[j], x), s[j])
            sums = mend(b, b.add(*halves(b, whole)), minima, at)
            scale = broadcast(b, read(b, b.add(at, I64(K_SCALE)), F32), 16)
            total = fused(b, b.sitofp(sums, f32x16.ir), b.fmul(factors, scale), b.extract_value(totals, i))
            totals = b.insert_value(totals, total, i)
        return totals

    dot.__name__ = f"dot_k{mend.__name__}"
    return emits_for(_first, 4)(dot)


_dot_q2_k, _dot_q4_k, _dot_q5_k, _dot_q6_k = map(
    _dot_k, (_minima_by_two, _minima_by_four, _minima_in_one, _offset_taken)
)


def _magnitudes(b: Any, x: Any, offset: Any) -> tuple[Any, Any]:
    """What bytes that count from `offset` amount to, and where they are negative."""
    signed = b.sub(x, offset)
    negative = b.icmp_signed("<", signed, constant(i8x64, 0))
    return b.select(negative, b.neg(signed), signed), negative


def _turned(b: Any, x: Any, negative: Any) -> Any:
    return b.select(negative, b.neg(x), x)


@emits_for(_first, 4)
def _dot_signed(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
    """Like those of `_dot_k`, for bytes that count from 128: signs go over to the activations."""
    q = [_magnitudes(b, b.extract_value(block, i), constant(i8x64, -128)) for i in range(4)]
    scales, d = b.extract_value(block, 4), b.extract_value(block, 6)
    s = [shuffle(b, scales, [4 * j + i // 8 for i in range(32)]) for j in range(4)]
    for i in range(totals.type.count):
        at = _column(b, y, stride, i)
        whole = constant(i32x16, 0)
        for j in range(4):
            x = _turned(b, read(b, b.add(at, I64(64 + 64 * j)), i8x64.ir), q[j][1])
            whole = dot_pairs(b, whole, add_byte_pairs(b, q[j][0], x), s[j])
        sums = _and_nothing(b, b.add(*halves(b, whole)))
        scale = b.fmul(d, read(b, b.add(at, I64(K_SCALE)), F32))
        total = fused(b, b.sitofp(sums, f32x16.ir), broadcast(b, scale, 16), b.extract_value(totals, i))
        totals = b.insert_value(totals, total, i)
    return totals


@emits_for(_first, 4)
def _dot_nvfp4(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
    """Like `_dot_fours`, where both halves of a block have factors."""
    parts = [_magnitudes(b, b.extract_value(block, i), constant(i8x64, 12)) for i in (0, 1)]
    factors = [b.extract_value(block, i) for i in (2, 3)]
    for i in range(totals.type.count):
        at = _column(b, y, stride, i)
        value = constant(f32x16, 0.0)
        for place, (part, negative), factor in zip((128, 192), parts, factors, strict=True):
            x = _turned(b, read(b, b.add(at, I64(place)), i8x64.ir), negative)
            sums = dot_bytes(b, constant(i32x16, 0), part, x)
            value = fused(b, b.sitofp(sums, f32x16.ir), factor, value)
        totals = b.insert_value(totals, fused(b, value, read(b, at, f32x16.ir), b.extract_value(totals, i)), i)
    return totals


@emits_for(_first, 4)
def _dot_fours(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
    """Add the products of four blocks of 32, added constants left out."""
    low, high, d = (b.extract_value(block, i) for i in range(3))
    for i in range(totals.type.count):
        at = _column(b, y, stride, i)
        whole = read(b, b.add(at, I64(64)), i32x16.ir)
        whole = dot_bytes(b, whole, low, read(b, b.add(at, I64(128)), i8x64.ir))
        whole = dot_bytes(b, whole, high, read(b, b.add(at, I64(192)), i8x64.ir))
        scaled = b.fmul(b.sitofp(whole, f32x16.ir), read(b, at, f32x16.ir))
        totals = b.insert_value(totals, fused(b, scaled, d, b.extract_value(totals, i)), i)
    return totals


@emits_for(_first, 4)
def _dot_constants(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
    """Add the added constants of four blocks."""
    m = b.extract_value(block, 3)
    for i in range(totals.type.count):
        sums = read(b, b.add(_column(b, y, stride, i), I64(256)), f32x16.ir)
        totals = b.insert_value(totals, fused(b, m, sums, b.extract_value(totals, i)), i)
    return totals


@emits_for(_first, 4)
def _dot_floats(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
    """Add the products of 64 floats."""
    w = [b.extract_value(block, i) for i in range(4)]
    for i in range(totals.type.count):
        at = _column(b, y, stride, i)
        x = [read(b, b.add(at, I64(64 * j)), f32x16.ir) for j in range(4)]
        total = b.extract_value(totals, i)
        if totals.type.count <= _FEW:
            ends = [fused(b, w[j + 1], x[j + 1], b.fmul(w[j], x[j])) for j in (0, 2)]
            total = b.fadd(total, b.fadd(*ends))
        else:
            for j in range(4):
                total = fused(b, w[j], x[j], total)
        totals = b.insert_value(totals, total, i)
    return totals


@emits_for(_first, 4)
def _dot_bfloats(b: Any, totals: Any, w: Any, y: Any, stride: Any) -> Any:
    """Add the products of 128 bfloats at w."""
    blocks = [read(b, b.add(w, I64(64 * j)), i16x32.ir) for j in range(4)]
    for i in range(totals.type.count):
        at = _column(b, y, stride, i)
        x = [read(b, b.add(at, I64(64 * j)), i16x32.ir) for j in range(4)]
        total = b.extract_value(totals, i)
        if totals.type.count <= _FEW:
            zero = constant(f32x16, 0.0)
            ends = [dot_bf16(b, dot_bf16(b, zero, blocks[j], x[j]), blocks[j + 1], x[j + 1]) for j in (0, 2)]
            total = b.fadd(total, b.fadd(*ends))
        else:
            for j in range(4):
                total = dot_bf16(b, total, blocks[j], x[j])
        totals = b.insert_value(totals, total, i)
    return totals


def _sum(b: Any, x: Any) -> Any:
    while x.type.count > 2:
        x = b.fadd(*halves(b, x))
    return b.fadd(b.extract_element(x, I32(0)), b.extract_element(x, I32(1)))


def _sum_k(b: Any, x: Any) -> Any:
    """Lanes 0 to 7 and lanes 8 to 15, each summed by halves, added."""
    for n in (4, 2, 1):
        low, high = ([part * 2 * n + start + i for part in (0, 1) for i in range(n)] for start in (0, n))
        x = b.fadd(shuffle(b, x, low), shuffle(b, x, high))
    return b.fadd(b.extract_element(x, I32(0)), b.extract_element(x, I32(1)))


def _store(total: Any) -> Any:
    def store(b: Any, totals: Any, out: Any, stride: Any, more: Any) -> None:
        """The sum of each column, `stride` bytes apart; added to what is there if `more` is not 0."""
        adding = b.icmp_signed("!=", more, I64(0))
        for i in range(totals.type.count):
            at = _column(b, out, stride, i)
            before = b.select(adding, read(b, at, F32), ir.Constant(F32, 0.0))
            write(b, at, b.fadd(total(b, b.extract_value(totals, i)), before))

    store.__name__ = f"store{total.__name__}"
    return emits_for(lambda t, *rest: signature(void, t, i64, i64, i64) if isinstance(t, Columns) else None, 4)(store)


_store_sums, _store_k_sums = _store(_sum), _store(_sum_k)


# ---- `rows` rows of k elements, `row` bytes apart, times columns `stride` bytes apart; results `step` apart.
# `more` is 0 where results are stored and 1 where they are added; `none` the zero accumulators; `tail` room for a unit.


@jit
def rows_k(
    calls_: int,
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
            calls.look_up(calls_, kind, a, k // 256, room)
            a = room
        for _ in range(k // 256):
            if kind == Q4_K:
                totals = _dot_q4_k(totals, decode_q4_k(a), at, stride)
            elif kind == Q5_K:
                totals = _dot_q5_k(totals, decode_q5_k(a), at, stride)
            elif kind == Q2_K:
                totals = _dot_q2_k(totals, decode_q2_k(a), at, stride)
            elif kind == Q3_K:
                totals = _dot_q6_k(totals, decode_q3_k(a), at, stride)
            elif kind == Q6_K:
                totals = _dot_q6_k(totals, decode_q6_k(a), at, stride)
            elif kind == IQ4_XS:
                totals = _dot_signed(totals, decode_iq4_xs(a), at, stride)
            else:
                totals = _dot_signed(totals, decode_levels(a), at, stride)
            a += size
            at += K_UNIT
        _store_k_sums(totals, out + 4 * r, step, more)


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
                totals = _dot_nvfp4(totals, decode_nvfp4(a), at, stride)
            else:
                block = decode_fours(kind, a)
                totals = _dot_fours(totals, block, at, stride)
                if has_constants(kind):
                    totals = _dot_constants(totals, block, at, stride)
            a += size
            at += FOUR_UNIT
        _store_sums(totals, out + 4 * r, step, more)


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
            totals = _dot_floats(totals, block, at, stride)
            a += size
            at += 256
        _store_sums(totals, out + 4 * r, step, more)


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
            totals = _dot_bfloats(totals, a, at, stride)
            a += 256
            at += 256
        _store_sums(totals, out + 4 * r, step, more)


# ---- any type, any number of columns


@jit
def scratch_bytes(kind: int, k: int) -> int:
    """Scratch that `times_columns` needs for rows of k elements."""
    return k // 256 * LEVEL_UNIT if has_levels(kind) else _TAIL_BYTES


def times_columns(
    calls_: int,
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
        count = 8 if columns >= 8 and _WIDEST >= 8 else 4 if columns >= 4 else 2 if columns >= 2 else 1
        part = _part(form, k, count)
        for first in range(0, k, part):
            some = min(part, k - first)
            a = w + bytes_of(kind, first)
            x = y + stride_of(form, first)
            more = 1 if first > 0 else 0
            # The calls stand here, not in a function for each count: numba would compile them once more.
            if count == 8:
                if form == KS:
                    rows_k(calls_, kind, a, row, rows, some, x, stride, out, step, more, eight(), tail)
                elif form == FOURS:
                    rows_fours(kind, a, row, rows, some, x, stride, out, step, more, eight(), tail)
                elif form == FLOATS:
                    rows_floats(kind, a, row, rows, some, x, stride, out, step, more, eight(), tail)
                else:
                    rows_bfloats(a, row, rows, some, x, stride, out, step, more, eight(), tail)
            elif count == 4:
                if form == KS:
                    rows_k(calls_, kind, a, row, rows, some, x, stride, out, step, more, four(), tail)
                elif form == FOURS:
                    rows_fours(kind, a, row, rows, some, x, stride, out, step, more, four(), tail)
                elif form == FLOATS:
                    rows_floats(kind, a, row, rows, some, x, stride, out, step, more, four(), tail)
                else:
                    rows_bfloats(a, row, rows, some, x, stride, out, step, more, four(), tail)
            elif count == 2:
                if form == KS:
                    rows_k(calls_, kind, a, row, rows, some, x, stride, out, step, more, two(), tail)
                elif form == FOURS:
                    rows_fours(kind, a, row, rows, some, x, stride, out, step, more, two(), tail)
                elif form == FLOATS:
                    rows_floats(kind, a, row, rows, some, x, stride, out, step, more, two(), tail)
                else:
                    rows_bfloats(a, row, rows, some, x, stride, out, step, more, two(), tail)
            elif form == KS:
                rows_k(calls_, kind, a, row, rows, some, x, stride, out, step, more, one(), tail)
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
