"""Attention sums for few queries as ggml forms them: cell after cell, each sum rounded to half precision.

Slower and less exact than sums of floats, and the reason why a worker of ours continues a text word for word as a
stock one does: its two best tokens are often closer than these roundings. docs/protocol.md section 5.3.
"""

from typing import Any

from numba import float32

from drover.worker.devices.cpu.products import loop
from drover.worker.devices.cpu.simd import (
    F32,
    I64,
    broadcast,
    emits,
    f32x16,
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
)
from drover.worker.devices.cpu.vector import exp, first_lane

NORM = 4
"""Of the state of a row: its maximum at 0, the sum of weights under it here."""
_CELLS = 16
_NONE = float("-inf")


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
            norm += _weigh(scores, first, end, top)
            _add(values + 4 * first * width, width, scores + 4 * first, end - first, result)
        if end < _CELLS:
            new = load_f32(scores + 4 * end)
            factor = first_lane(exp(splat_f32x16(top - new)))
            norm = float32(norm * factor)
            for i in range(0, width, 16):
                place = result + 4 * i
                store(place, round_to_f16_f32x16(load_f32x16(place) * splat_f32x16(factor)))
            top = new
        first = end
    store_f32(state, top)
    store_f32(state + NORM, norm)


@jit
def _weigh(scores: int, first: int, end: int, top: float) -> Any:
    """Scores of some cells to weights under a maximum; their sum."""
    total = float32(0.0)
    weights = exp(load_f32x16(scores) - splat_f32x16(top))
    if end - first == _CELLS:
        store(scores, weights)
        return sum_lanes(weights)
    for i in range(first, end):
        weight = first_lane(exp(splat_f32x16(load_f32(scores + 4 * i) - top)))
        store_f32(scores + 4 * i, weight)
        total += weight
    return total


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
