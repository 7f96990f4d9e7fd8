"""More cases for the kernels of recurrent, sparse and hyper-connected models, and of operations on places.

Layouts with gaps, operands that repeat, results in place, and extents that leave every rest after vectors of 16. The
cpu device computes all of `CASES` by kernels, and leaves `REFUSED` to the reference device.
"""

from collections.abc import Iterator

import numpy as np

from drover.ggml.ops import Op, Tri
from drover.ggml.types import BF16, F16, F32, I8, I32, I64, Q4_0, Q8_0, TensorType
from worker.devices.cases import (
    Array,
    Case,
    Spec,
    Values,
    below,
    case,
    causal,
    exactly,
    gapped,
    normal,
    permuted,
    positive,
    scattered,
    spaced,
    tensor,
)


def small(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return normal(rng, size) / 8


def fading(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return -positive(rng, size)


def shares(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return rng.uniform(0.2, 0.95, size).astype(np.float32)


# ---- states


def convolutions() -> Iterator[Case]:
    for channels in (1, 6, 16, 40):
        for tokens in (1, 5, 16, 150):
            for taps in (1, 4, 9, 20):
                x, w = gapped(F32, tokens + taps - 1, channels, 2), gapped(F32, taps, channels)
                name = f"{channels}x{tokens}x{taps}"
                yield case(name, Op.SSM_CONV, gapped(F32, channels, tokens, 2), x, w)


def scan(name: str, n: int, d: int, heads: int, groups: int, tokens: int, kept: int, *, by_place: bool = False) -> Case:
    """Inputs as parts of one projection, as models send them; two sequences that swap their states."""
    src = (
        tensor(F32, n, d, heads, 3),
        _part(d, heads, tokens, 2),
        spaced(F32, heads, tokens, 2),
        tensor(F32, n if by_place else 1, heads, values=fading),
        _part(n, groups, tokens, 2),
        _part(n, groups, tokens, 2),
        tensor(I32, 2, values=exactly(2, 0)),
    )
    dst = tensor(F32, (d * heads * tokens + kept * n * d * heads) * 2)
    return case(name, Op.SSM_SCAN, dst, *src, ints={0: kept})


def _part(n: int, rows: int, tokens: int, sequences: int) -> Spec:
    """Some rows of each token's, which are more."""
    row = 4 * n
    nb2 = row * (rows + 1)
    return tensor(F32, n, rows, tokens, sequences, nb=(4, row, nb2, nb2 * tokens), shift=4)


def scans() -> Iterator[Case]:
    yield scan("mamba-1", 16, 1, 40, 1, 5, 1, by_place=True)
    yield scan("mamba-1-odd", 7, 1, 5, 1, 3, 1, by_place=True)
    yield scan("mamba-2", 128, 64, 4, 2, 3, 1)
    yield scan("mamba-2-one-token", 64, 16, 3, 3, 1, 1)
    yield scan("mamba-2-odd", 21, 5, 6, 2, 4, 1)
    yield scan("rows-over-heads", 16, 24, 3, 1, 3, 2)
    yield scan("more-kept-than-tokens", 16, 8, 2, 1, 2, 4)
    yield scan("some-kept", 32, 8, 2, 1, 6, 3)


def delta_net(
    name: str, size: int, heads: int, query_heads: int, *, gate: int, kept: int = 1, queries: int = 2
) -> Case:
    tokens = 3
    src = (
        gapped(F32, size, query_heads, tokens, queries, values=small),
        permuted(F32, size, query_heads, tokens, queries, values=small),
        gapped(F32, size, heads, tokens, 2),
        permuted(F32, gate, heads, tokens, 2, values=fading),
        tensor(F32, 1, heads, tokens, 2, values=positive),
        tensor(F32, size, size, heads, 2),
    )
    dst = tensor(F32, size * heads, tokens * 2 + kept * size * 2)
    return case(name, Op.GATED_DELTA_NET, dst, *src, ints={0: kept})


def delta_nets() -> Iterator[Case]:
    for size in (16, 48, 64, 128):
        yield delta_net(f"head-gate-{size}", size, 2, 2, gate=1)
        yield delta_net(f"channel-gate-{size}", size, 2, 2, gate=size)
    yield delta_net("shared-queries", 32, 6, 2, gate=1, kept=2)
    yield delta_net("more-kept-than-tokens", 32, 2, 1, gate=32, kept=5)
    yield delta_net("one-query-stream", 32, 2, 2, gate=1, queries=1)


def linear_attentions() -> Iterator[Case]:
    for size, heads, tokens, sequences in ((64, 2, 6, 3), (16, 3, 1, 1), (48, 1, 4, 2)):
        x, near, fade = (gapped(F32, size, heads, tokens, values=v) for v in (small, normal, shares))
        state, name = tensor(F32, size * size * heads, sequences), f"{size}x{heads}x{tokens}x{sequences}"
        dst = tensor(F32, size * heads, tokens + size * sequences)
        yield case(name, Op.RWKV_WKV7, dst, x, fade, x, near, x, x, state)
        yield case(name, Op.RWKV_WKV6, dst, x, near, x, tensor(F32, size, heads), fade, state)
        yield case(name, Op.GATED_LINEAR_ATTN, dst, x, near, x, fade, state, floats={0: 0.3})
    x, state, dst = gapped(F32, 21, 2, 4, values=small), tensor(F32, 21 * 21 * 2, 2), tensor(F32, 42, 4 + 42)
    yield case("odd", Op.RWKV_WKV6, dst, x, x, x, tensor(F32, 42), x, state)
    yield case("odd", Op.GATED_LINEAR_ATTN, dst, x, x, x, x, state, floats={0: 0.3})


# ---- choices


def rows_by_number() -> Iterator[Case]:
    for n in (1, 16, 37):
        ids = gapped(I32, 3, 5, values=below(7))
        a, b = gapped(F32, n, 3, 5), gapped(F32, n, 7)
        yield case(f"{n}", Op.ADD_ID, gapped(F32, n, 3, 5), a, b, ids)
        yield case(f"{n}-onto", Op.ADD_ID, a, a, b, ids, onto=0)
    ids = tensor(I32, 8, 700, values=lambda rng, size: rng.integers(0, 4, size))
    yield case("many", Op.ADD_ID, tensor(F32, 40, 8, 700), tensor(F32, 40, 8, 700), tensor(F32, 40, 4), ids)


def few(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return rng.integers(-2, 3, size).astype(np.float32)


def largest() -> Iterator[Case]:
    for name, values in (("far-apart", scattered), ("ties", few)):
        for n, k in ((1, 1), (60, 1), (60, 7), (60, 60), (1000, 130)):
            yield case(f"{name}-{k}-of-{n}", Op.TOP_K, gapped(I32, k, 4, 2), gapped(F32, n, 4, 2, values=values))
        for n in (1, 17, 256, 300, 1111):
            dst, x = permuted(I32, 5, 2, axes=(1, 0, 2, 3)), gapped(F32, n, 5, 2, values=values)
            yield case(f"{name}-{n}", Op.ARGMAX, dst, x)
    nothing = tensor(F32, 40, 2, values=lambda rng, size: np.full(size, -np.inf))
    yield case("minus-infinity", Op.ARGMAX, tensor(I32, 2), nothing)


def indexers() -> Iterator[Case]:
    kinds: tuple[TensorType, ...] = (F32, F16, BF16, Q8_0, Q4_0)
    for kind in kinds:
        for size, heads, tokens, cells in ((128, 8, 1, 70), (32, 3, 40, 9), (64, 5, 2, 130)):
            q, k = permuted(F32, size, heads, tokens, 2), gapped(kind, size, 1, cells, 2)
            w, mask = permuted(F32, heads, tokens, 1, 2, axes=(1, 0, 2, 3)), tensor(F16, cells, tokens, values=causal)
            dst = gapped(F32, cells, tokens, 1, 2)
            yield case(f"{kind.name}-{size}x{heads}x{tokens}x{cells}", Op.LIGHTNING_INDEXER, dst, q, k, w, mask)
    q, k, w = tensor(F32, 16, 2, 3, 2), tensor(F16, 16, 1, 20, 2), tensor(F32, 2, 3, 1, 2)
    for mask in (gapped(F32, 20, 3, 1, 2), tensor(BF16, 20, 3)):
        yield case(f"mask-{mask.type.name}", Op.LIGHTNING_INDEXER, tensor(F32, 20, 3, 1, 2), q, k, w, mask)


# ---- streams


def streams() -> Iterator[Case]:
    for size in (1, 31, 1100):
        for count in (1, 4, 5):
            x, dst, w = gapped(F32, size, count, 3), gapped(F32, size, 3), gapped(F32, count, 3)
            name = f"{count}x{size}"
            yield case(name, Op.DSV4_HC_PRE, dst, x, w, floats={0: 1.5})
            yield case(f"{name}-gated", Op.DSV4_HC_PRE, dst, x, x, ints={1: 1}, floats={0: 1.5})
            yield case(name, Op.DSV4_HC_POST, x, dst, x, w)
            comb = permuted(F32, count, count, 3, axes=(1, 0, 2, 3))
            yield case(f"{name}-comb", Op.DSV4_HC_POST, x, dst, x, w, comb)
    for tokens in (1, 50):
        for rounds in (0, 1, 20):
            src = (gapped(F32, 24, tokens, 2), tensor(F32, 3), tensor(F32, 24))
            dst = tensor(F32, 4, 4, tokens, 2)
            yield case(f"{tokens}x{rounds}", Op.DSV4_HC_COMB, dst, *src, ints={1: rounds}, floats={0: 1e-4})


# ---- places and sums


def integers(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return rng.integers(-100, 100, size)


def places() -> Iterator[Case]:
    for n in (1, 16, 100):
        yield case(f"{n}", Op.ARANGE, tensor(F32, n), floats={0: -2, 1: 100, 2: 0.25})
    wide = {0: 1, 1: 3, 2: 2, 3: 1, 4: 1, 5: 0, 6: 0, 7: 2}
    for kind, values in ((F32, normal), (F16, normal), (I8, integers), (I32, integers), (I64, integers)):
        src, dst = gapped(kind, 5, 3, 2, 1, values=values), gapped(kind, 9, 6, 3, 3, values=values)
        yield case(f"{kind.name}-zeros", Op.PAD, dst, src, ints=wide)
        yield case(f"{kind.name}-around", Op.PAD, dst, src, ints=wide | {8: 1})
    yield case("nothing-inside", Op.PAD, tensor(F32, 4, 2), tensor(F32, 0, 2), ints={0: 1, 1: 3})
    yield case("more-than-once-around", Op.PAD, tensor(F32, 14, 2), tensor(F32, 3, 2), ints={0: 7, 1: 4, 8: 1})
    for kind in (F32, F16, BF16):
        for ne in ((20, 35), (35, 20), (1, 3)):
            name, x = f"{kind.name}-{ne[0]}x{ne[1]}", gapped(kind, *ne, 2)
            for part in Tri:
                yield case(f"{name}-{part.name}", Op.TRI, gapped(kind, *ne, 2), x, ints={0: part})
            yield case(f"{name}-onto", Op.TRI, x, x, ints={0: Tri.LOWER}, onto=0)
            yield case(name, Op.DIAG_MASK_INF, x, x, ints={0: 5}, onto=0)
            yield case(name, Op.DIAG_MASK_ZERO, gapped(kind, *ne, 2), x, ints={0: 0})
            yield case(name, Op.DIAG, gapped(kind, ne[0], ne[0], 2, 3), gapped(kind, ne[0], 1, 2, 3))


def windows() -> Iterator[Case]:
    kinds: tuple[tuple[TensorType, Values], ...] = ((F32, normal), (F16, normal), (BF16, normal), (I32, integers))
    for kind, values in kinds:
        size = kind.type_size
        ints = {0: 21 * size, 1: 210 * size, 2: 630 * size, 3: 22 * size}
        a, b = gapped(kind, 21, 10, 3, values=values), gapped(kind, 17, 4, 2, values=values)
        whole = tensor(kind, 21, 10, 3, values=values)
        for op in (Op.SET, Op.ACC) if kind != I32 else (Op.SET,):
            yield case(f"{kind.name}", op, whole, a, b, ints=ints)
            yield case(f"{kind.name}-onto", op, whole, whole, b, ints=ints, onto=0)
            yield case(f"{kind.name}-row", op, whole, a, tensor(kind, 9, values=values), ints=ints | {0: 0})
    turned = permuted(F32, 17, 4, 2, axes=(1, 0, 2, 3))
    whole, ints = tensor(F32, 21, 10, 3), {0: 84, 1: 840, 2: 2520, 3: 88}
    yield case("turned", Op.ACC, whole, whole, turned, ints=ints)


def pools() -> Iterator[Case]:
    image = permuted(F32, 11, 9, 3, 2, axes=(1, 0, 2, 3))
    for kind in (0, 1):
        for k0, k1, s0, s1, p0, p1 in ((1, 1, 1, 1, 0, 0), (3, 2, 2, 1, 1, 0), (2, 4, 3, 2, 2, 2)):
            out = (11 + 2 * p0 - k0) // s0 + 1, (9 + 2 * p1 - k1) // s1 + 1
            ints = {0: kind, 1: k0, 2: k1, 3: s0, 4: s1, 5: p0, 6: p1}
            yield case(f"{kind}-{k0}x{k1}", Op.POOL_2D, gapped(F32, *out, 3, 2), image, ints=ints)
            line = {0: kind, 1: k0, 2: s0, 3: p0}
            yield case(f"{kind}-{k0}", Op.POOL_1D, gapped(F32, out[0], 9, 3, 2), image, ints=line)


def sums() -> Iterator[Case]:
    for kind in (F32, F16, BF16):
        for name, x in (("gaps", gapped(kind, 37, 5, 3)), ("turned", permuted(kind, 37, 5, 3, axes=(1, 0, 2, 3)))):
            yield case(f"{kind.name}-{name}", Op.SUM, tensor(F32, 1), x)
        yield case(f"{kind.name}-many", Op.SUM, tensor(kind, 1), tensor(kind, 100, 200, values=positive))
    yield case("nothing", Op.SUM, tensor(F32, 1), tensor(F32, 0, 3))
    for n in (1, 16, 37, 1000):
        x = gapped(F32, n, 5, 3)
        yield case(f"{n}", Op.CUMSUM, gapped(F32, n, 5, 3), x)
        yield case(f"{n}-onto", Op.CUMSUM, x, x, onto=0)
    three = gapped(I32, 30, 400, values=lambda rng, size: rng.integers(0, 3, size))
    turned = permuted(I32, 30, 400, axes=(1, 0, 2, 3), values=lambda rng, size: rng.integers(0, 3, size))
    yield case("some-of-many", Op.COUNT_EQUAL, tensor(I64, 1), three, turned)
    for n, channels, groups in ((17, 8, 3), (16, 7, 7), (5, 2, 4)):
        x = gapped(F32, n, 3, channels, 2)
        yield case(f"{channels}-by-{groups}", Op.GROUP_NORM, gapped(F32, n, 3, channels, 2), x, ints={0: groups})
        yield case(f"{channels}-by-{groups}-onto", Op.GROUP_NORM, x, x, ints={0: groups}, floats={1: 1e-5}, onto=0)


def systems() -> Iterator[Case]:
    for n, k in ((1, 1), (6, 5), (17, 40), (64, 64), (30, 97)):
        lower = gapped(F32, n, n, 2, 2, values=lambda rng, size: normal(rng, size) / 8 + 2 * np.eye(size[-1]))
        b = gapped(F32, k, n, 2, 2)
        yield case(f"{k}-by-{n}", Op.SOLVE_TRI, gapped(F32, k, n, 2, 2), lower, b)
        yield case(f"{k}-by-{n}-onto", Op.SOLVE_TRI, b, lower, b, onto=1)


FAMILIES = (
    convolutions,
    scans,
    delta_nets,
    linear_attentions,
    rows_by_number,
    largest,
    indexers,
    streams,
    places,
    windows,
    pools,
    sums,
    systems,
)
CASES: tuple[Case, ...] = tuple(found for family in FAMILIES for found in family())


def refused() -> Iterator[Case]:
    """Layouts that a kernel does not honour, or has no room for."""
    turned = permuted(F32, 20, 6, axes=(1, 0, 2, 3))
    yield case("turned", Op.CUMSUM, tensor(F32, 20, 6), turned)
    yield case("turned", Op.ARGMAX, tensor(I32, 6), turned)
    yield case("turned", Op.TOP_K, tensor(I32, 3, 6), turned)
    yield case("turned", Op.TRI, tensor(F32, 20, 6), turned, ints={0: Tri.UPPER})
    yield case("turned", Op.SSM_CONV, tensor(F32, 6, 18), turned, tensor(F32, 3, 6))
    yield scan("none-kept", 16, 8, 2, 1, 2, 0)
    yield delta_net("none-kept", 32, 2, 2, gate=1, kept=0)
    yield delta_net("odd", 20, 2, 2, gate=1)
    q, k, w = tensor(F32, 20, 2, 3), tensor(F16, 20, 1, 9), tensor(F32, 2, 3)
    yield case("odd", Op.LIGHTNING_INDEXER, tensor(F32, 9, 3), q, k, w, tensor(F16, 9, 3, values=causal))
    shifted = tensor(F32, 20, 6)
    yield case("rows-over-rows", Op.ACC, shifted, shifted, tensor(F32, 8, 3), ints={0: 16, 1: 480, 2: 480}, onto=0)


REFUSED: tuple[Case, ...] = tuple(refused())
