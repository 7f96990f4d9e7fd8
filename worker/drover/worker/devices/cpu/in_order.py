"""Attention for few queries as ggml computes it: cell after cell, each sum of values rounded to half precision.

Slower and less exact than sums of floats, and the reason why a worker of ours continues a text word for word as a
stock one does: its two best tokens are often closer than these roundings. docs/protocol.md section 5.3.
"""

from typing import Any

from numba import float32, float64

from drover.worker.devices.cpu.products import loop
from drover.worker.devices.cpu.simd import (
    F32,
    I64,
    add_products,
    broadcast,
    emits,
    f32x16,
    fma,
    fused,
    i64,
    jit,
    load_f32,
    load_f32x16,
    narrow_f16,
    read,
    round_to_f16_f32x16,
    splat_f32x16,
    store,
    store_f32,
    sum_lanes,
    void,
    widen_f16,
    write,
    zero_f32x16,
    zero_f64x16,
)
from drover.worker.devices.cpu.vector import exp_as_libm, first_lane, lane

NORM = 4
"""Of the state of a row: its maximum at 0, the sum of weights under it here."""
_CELLS = 16
_NONE = float("-inf")


@jit
def dots(q: int, keys: int, step: int, width: int, scores: int) -> None:
    """The products of a query with 16 rows of floats, `step` bytes apart, each summed in ggml's order."""
    for j in range(_CELLS):
        store_f32(scores + 4 * j, _dot(q, keys + j * step, width))


@jit
def _dot(x: int, y: int, width: int) -> Any:
    """Four vectors of sums over 64 elements at a time; what is left is added in double precision."""
    a, b, c, d = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    whole = width // 64 * 64
    for i in range(0, 4 * whole, 256):
        a = fma(load_f32x16(x + i), load_f32x16(y + i), a)
        b = fma(load_f32x16(x + i + 64), load_f32x16(y + i + 64), b)
        c = fma(load_f32x16(x + i + 128), load_f32x16(y + i + 128), c)
        d = fma(load_f32x16(x + i + 192), load_f32x16(y + i + 192), d)
    total = sum_lanes((a + c) + (b + d))
    if whole < width:
        rest = zero_f64x16()
        for i in range(4 * whole, 4 * width, 64):
            rest = add_products(load_f32x16(x + i), load_f32x16(y + i), rest)
        total = float32(float64(total) + sum_lanes(rest))
    return total


@jit
def add_cells(scores: int, values: int, width: int, result: int, state: int) -> None:
    """Add 16 cells of `width` floats, weighted by e^(score − maximum); a new maximum rescales what was summed before.

    Scores are turned into weights on the way.
    """
    top, norm = load_f32(state), load_f32(state + NORM)
    first = 0
    while first < _CELLS:
        end = first
        while end < _CELLS and not load_f32(scores + 4 * end) > top:
            end += 1
        if end > first and top > _NONE:
            norm = _weigh(scores, first, end, top, norm)
            _add(values + 4 * first * width, width, scores + 4 * first, end - first, result)
        if end < _CELLS:
            new = load_f32(scores + 4 * end)
            factor = first_lane(exp_as_libm(splat_f32x16(top - new)))
            norm = first_lane(fma(splat_f32x16(norm), splat_f32x16(factor), splat_f32x16(1.0)))
            for i in range(0, width, 16):
                place = result + 4 * i
                store(place, round_to_f16_f32x16(load_f32x16(place) * splat_f32x16(factor)))
            store_f32(scores + 4 * end, 1.0)
            _add(values + 4 * end * width, width, scores + 4 * end, 1, result)
            top = new
        first = end + 1
    store_f32(state, top)
    store_f32(state + NORM, norm)


@jit
def _weigh(scores: int, first: int, end: int, top: float, norm: float) -> Any:
    """Scores of some cells to weights under a maximum; `norm` and their sum, one after another."""
    weights = exp_as_libm(load_f32x16(scores) - splat_f32x16(top))
    for i in range(first, end):
        weight = lane(weights, i)
        store_f32(scores + 4 * i, weight)
        norm = float32(norm + weight)
    return norm


@jit
def _add(values: int, width: int, weights: int, cells: int, result: int) -> None:
    i = 0
    while i + 64 <= width:
        _add4(values + 4 * i, 4 * width, weights, cells, result + 4 * i)
        i += 64
    while i < width:
        _add1(values + 4 * i, 4 * width, weights, cells, result + 4 * i)
        i += 16


def _adder(vectors: int) -> Any:
    """An instruction that adds weighted cells to 16 · `vectors` sums, which stay in registers, rounded at each step."""

    def add(b: Any, values: Any, step: Any, weights: Any, cells: Any, result: Any) -> None:
        places = [b.add(result, I64(64 * v)) for v in range(vectors)]

        def body(i: Any, sums: list[Any]) -> list[Any]:
            weight = broadcast(b, read(b, b.add(weights, b.mul(i, I64(4))), F32), 16)
            line = b.add(values, b.mul(i, step))
            new = [fused(b, weight, read(b, b.add(line, I64(64 * v)), f32x16.ir), sums[v]) for v in range(vectors)]
            return [widen_f16(b, narrow_f16(b, x)) for x in new]

        sums = loop(b, cells, [read(b, place, f32x16.ir) for place in places], body)
        for place, total in zip(places, sums, strict=True):
            write(b, place, total)

    add.__name__ = f"add{vectors}"
    return emits(void, *[i64] * 5)(add)


_add4, _add1 = _adder(4), _adder(1)
