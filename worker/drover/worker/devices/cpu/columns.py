"""The accumulators of a few columns, and the instructions that add products of one block of weights to them.

Sums of types with blocks of 256 are added up in the order in which ggml does it for few columns.
"""

from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import signature
from numba.extending import models, register_model

from drover.worker.devices.cpu.quantize import (
    K_SCALE,
    SUMS_OF_16,
    SUMS_OF_32,
)
from drover.worker.devices.cpu.simd import (
    AVX512,
    F32,
    I1,
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
    joined,
    read,
    shuffle,
    verbatim,
    void,
    write,
)

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


def _by_turns(b: Any, x: Any, y: Any) -> Any:
    """Eight lanes, each followed by one of another eight."""
    return shuffle(b, x, [i // 2 + 8 * (i % 2) for i in range(16)], y)


def _minima_by_four(b: Any, sums: Any, minima: Any, at: Any) -> Any:
    """Products of the minima in the lanes between, two to a lane."""
    taken = add_pairs(b, minima, read(b, b.add(at, I64(SUMS_OF_32)), i16x8.ir))
    return _by_turns(b, sums, joined(b, taken, shuffle(b, constant(i32x8, 0), range(4))))


def _minima_in_one(b: Any, sums: Any, minima: Any, at: Any) -> Any:
    """Products of the minima in the second lane, all of them."""
    taken = add_pairs(b, minima, read(b, b.add(at, I64(SUMS_OF_32)), i16x8.ir))
    whole = call(b, "llvm.vector.reduce.add.v4i32", I32, taken)
    return _by_turns(b, sums, b.insert_element(constant(i32x8, 0), whole, I32(0)))


def _minima_by_two(b: Any, sums: Any, minima: Any, at: Any) -> Any:
    """Like `_minima_by_four`, where there is a minimum for 16 elements."""
    return _by_turns(b, sums, add_pairs(b, minima, read(b, b.add(at, I64(SUMS_OF_16)), i16x16.ir)))


def _offset_taken(b: Any, sums: Any, minima: Any, at: Any) -> Any:
    """What q counts from taken away, two sums of 16 elements to a lane."""
    return _and_nothing(b, b.add(sums, add_pairs(b, minima, read(b, b.add(at, I64(SUMS_OF_16)), i16x16.ir))))


def _looked_up(b: Any, x: Any, places: list[int]) -> Any:
    """Bytes of each 16, at these places; 0 where a place is negative."""
    found = verbatim(b, "vpshufb $2, $1, $0", "=v,v,v", i8x64.ir, b.bitcast(x, i8x64.ir), constant(i8x64, places))
    return b.bitcast(found, i16x32.ir)


def _by_sixteens(b: Any, block: Any) -> list[Any]:
    """The scales of each 64 elements, from one for 16."""
    scales = b.extract_value(block, 4)
    if not AVX512:
        return [shuffle(b, scales, [4 * j + i // 8 for i in range(32)]) for j in range(4)]
    eights = [shuffle(b, scales, [8 * half + i % 8 for i in range(32)]) for half in (0, 1)]
    places = [[8 * j + i // 16 * 2 + i % 2 for i in range(64)] for j in (0, 1)]
    return [_looked_up(b, x, at) for x in eights for at in places]


def _by_thirty_twos(b: Any, block: Any) -> list[Any]:
    """The same, from one for 32."""
    if not AVX512:
        return _by_sixteens(b, block)
    scales, nothing = b.extract_value(block, 7), -128
    places = [[n for i in range(32) for n in (2 * j + i // 16, nothing)] for j in range(4)]
    return [_looked_up(b, scales, at) for at in places]


def _all_one(b: Any, block: Any) -> list[Any]:
    return [constant(i16x32, 1)] * 4


def _dot_k(mend: Any, spread: Any = _by_sixteens) -> Any:
    """An instruction that adds the products of a K block; `mend` says what becomes of the minima, `spread` of scales.

    Eight lanes are ggml's: lane i sums elements 4 i to 4 i + 3 of every 32, as integers over a block, and one
    multiplication and addition of floats follows. Between them, or behind if there are no minima, lie the others.
    """

    def dot(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
        q = [b.extract_value(block, i) for i in range(4)]
        minima, factors, s = b.extract_value(block, 5), b.extract_value(block, 6), spread(b, block)
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

    dot.__name__ = f"dot_k{mend.__name__}{spread.__name__}"
    return emits_for(_first, 4)(dot)


dot_q2_k, dot_q6_k, dot_ternary = _dot_k(_minima_by_two), _dot_k(_offset_taken), _dot_k(_offset_taken, _all_one)
dot_q4_k, dot_q5_k = _dot_k(_minima_by_four, _by_thirty_twos), _dot_k(_minima_in_one, _by_thirty_twos)


def _sizes(b: Any, x: Any) -> tuple[Any, Any]:
    """Signed bytes without their signs, and where they are negative."""
    negative = b.icmp_signed("<", x, constant(i8x64, 0))
    return b.select(negative, b.neg(x), x), negative


def _turned(b: Any, x: Any, negative: Any) -> Any:
    return b.select(negative, b.neg(x), x)


@emits_for(_first, 4)
def dot_signed(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
    """Like those of `_dot_k`, for a signed block: signs go over to the activations."""
    q = [b.extract_value(block, i) for i in range(4)]
    negative = [b.bitcast(b.extract_value(block, (6, i)), ir.VectorType(I1, 64)) for i in range(4)]
    d = b.extract_value(block, 5)
    s = _by_sixteens(b, block)
    for i in range(totals.type.count):
        at = _column(b, y, stride, i)
        whole = constant(i32x16, 0)
        for j in range(4):
            x = _turned(b, read(b, b.add(at, I64(64 + 64 * j)), i8x64.ir), negative[j])
            whole = dot_pairs(b, whole, add_byte_pairs(b, q[j], x), s[j])
        sums = _and_nothing(b, b.add(*halves(b, whole)))
        scale = b.fmul(d, read(b, b.add(at, I64(K_SCALE)), F32))
        total = fused(b, b.sitofp(sums, f32x16.ir), broadcast(b, scale, 16), b.extract_value(totals, i))
        totals = b.insert_value(totals, total, i)
    return totals


@emits_for(_first, 4)
def dot_nvfp4(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
    """Like `dot_fours`, where both halves of a block have factors."""
    parts = [_sizes(b, b.sub(b.extract_value(block, i), constant(i8x64, 12))) for i in (0, 1)]
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
def dot_fours(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
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
def dot_constants(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
    """Add the added constants of four blocks."""
    m = b.extract_value(block, 3)
    for i in range(totals.type.count):
        sums = read(b, b.add(_column(b, y, stride, i), I64(256)), f32x16.ir)
        totals = b.insert_value(totals, fused(b, m, sums, b.extract_value(totals, i)), i)
    return totals


@emits_for(_first, 4)
def dot_floats(b: Any, totals: Any, block: Any, y: Any, stride: Any) -> Any:
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
def dot_bfloats(b: Any, totals: Any, w: Any, y: Any, stride: Any) -> Any:
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


def _sum_minima(b: Any, x: Any) -> Any:
    """The same for every other lane and those between."""
    return _sum_k(b, shuffle(b, x, [*range(0, 16, 2), *range(1, 16, 2)]))


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


store_sums, store_k_sums, store_k_sums_and_minima = _store(_sum), _store(_sum_k), _store(_sum_minima)
