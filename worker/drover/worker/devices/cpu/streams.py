"""Hyper-connections: several residual streams mixed into one, one laid onto several, and the matrices that mix them.

Formulas: docs/protocol.md section 6.7 (DSV4_HC_…).
"""

from typing import Any

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
    PARAMS,
    SRC,
)
from drover.worker.devices.cpu.simd import (
    emits,
    f32x16,
    fma,
    jit_inline,
    load_f32,
    load_f32x16,
    maximum,
    shuffle,
    splat_f32x16,
    store,
    zero_f32x16,
)
from drover.worker.devices.cpu.sync import each_item, portion
from drover.worker.devices.cpu.vector import exp, param, row_address, sigmoid, store_row, word

CHANNELS = 512
"""Channels of a token that a thread takes at a time."""
_HC = 4
"""Streams that HC_COMB mixes: a matrix is one vector, a row of it four lanes."""


def hc_pre(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """dst(:, t) = parameter 0 · Σ_i src0(:, i, t) · w, w one weight or (parameter 1) the sigmoid of one per channel."""
    size, streams, gated = word(record, NE0), word(record, NE0 + 1), word(record, PARAMS + 1) != 0
    parts = (size + CHANNELS - 1) // CHANNELS
    items = parts * word(record, NE0 + 2)
    scale = splat_f32x16(param(record, 0))
    for item in each_item(record, items, portion(items, threads)):
        start, token = item % parts * CHANNELS, item // parts
        y = row_address(record, DST, NB_DST, token, 0, 0)
        for i in range(start, min(start + CHANNELS, size), 16):
            total = zero_f32x16()
            for stream in range(streams):
                x = load_f32x16(row_address(record, SRC, NB0, stream, token, 0) + 4 * i)
                if gated:
                    w = sigmoid(load_f32x16(row_address(record, SRC + 1, NB1, stream, token, 0) + 4 * i))
                else:
                    w = splat_f32x16(load_f32(row_address(record, SRC + 1, NB1 - 1, stream, token, 0)))
                total = fma(x, w, total)
            store_row(y + 4 * i, F32, total * scale, size - i)


def hc_post(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """dst(:, i, t) = src2(i, t) · src0(:, t) + Σ_s src3(i, s, t) · src1(:, s, t), or without src3 + src1(:, i, t)."""
    size, streams = word(record, NE1), word(record, NE1 + 1)
    parts = (size + CHANNELS - 1) // CHANNELS
    items = parts * word(record, NE1 + 2)
    mixed = word(record, SRC + 3) != 0
    for item in each_item(record, items, portion(items, threads)):
        start, token = item % parts * CHANNELS, item // parts
        x = row_address(record, SRC, NB0, token, 0, 0)
        for target in range(streams):
            share = splat_f32x16(load_f32(row_address(record, SRC + 2, NB2 - 1, target, token, 0)))
            y = row_address(record, DST, NB_DST, target, token, 0)
            for i in range(start, min(start + CHANNELS, size), 16):
                total = load_f32x16(x + 4 * i) * share
                if mixed:
                    for source in range(streams):
                        w = load_f32(row_address(record, SRC + 3, NB3 - 1, target, source, token))
                        r = load_f32x16(row_address(record, SRC + 1, NB1, source, token, 0) + 4 * i)
                        total = fma(r, splat_f32x16(w), total)
                else:
                    total = total + load_f32x16(row_address(record, SRC + 1, NB1, target, token, 0) + 4 * i)
                store_row(y + 4 * i, F32, total, size - i)


def hc_comb(record: int, _thread: int, threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Operands: mix, scales, bias; a doubly stochastic matrix for each token. Parameters: ε, rounds."""
    ne1, ne2 = word(record, NE0 + 1), word(record, NE0 + 2)
    tokens = ne1 * ne2 * word(record, NE0 + 3)
    scale = splat_f32x16(load_f32(word(record, SRC + 1) + 8))
    bias = load_f32x16(word(record, SRC + 2) + 8 * _HC)
    for token in each_item(record, tokens, portion(tokens, threads)):
        mix = row_address(record, SRC, NB0, token % ne1, token // ne1 % ne2, token // (ne1 * ne2))
        z = fma(load_f32x16(mix + 8 * _HC), scale, bias)
        store(word(record, DST) + 4 * _HC * _HC * token, _balanced(z, param(record, 0), word(record, PARAMS + 1)))


@jit_inline
def _balanced(z: Any, epsilon: float, rounds: int) -> Any:
    """Softmax of every row, then columns and rows by turns divided by their sums."""
    small = splat_f32x16(epsilon)
    top = maximum(z, swapped1(z))
    e = exp(z - maximum(top, swapped2(top)))
    z = _by_columns(e / _row_sums(e) + small, small)
    for _ in range(rounds - 1):
        z = _by_columns(z / (_row_sums(z) + small), small)
    return z


@jit_inline
def _by_columns(z: Any, small: Any) -> Any:
    pairs = z + swapped4(z)
    return z / (pairs + swapped8(pairs) + small)


@jit_inline
def _row_sums(z: Any) -> Any:
    pairs = z + swapped1(z)
    return pairs + swapped2(pairs)


def _swapped(distance: int) -> Any:
    """Every lane exchanged with that whose number differs in one bit."""

    def swapped(b: Any, x: Any) -> Any:
        return shuffle(b, x, [lane ^ distance for lane in range(16)])

    swapped.__name__ = f"swapped{distance}"
    return emits(f32x16, f32x16)(swapped)


swapped1, swapped2, swapped4, swapped8 = map(_swapped, (1, 2, 4, 8))
