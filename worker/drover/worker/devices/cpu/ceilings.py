"""What the processor can do at most, measured: bytes read from memory, operations of the units for floats and tiles.

Compiled when first asked for; a worker that is not profiled never does.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, Final

from drover.worker.devices.cpu.fours import AHEAD
from drover.worker.devices.cpu.gemm import COMPILED
from drover.worker.devices.cpu.products import loop
from drover.worker.devices.cpu.simd import (
    constant,
    emits,
    f32x16,
    fused,
    i64,
    jit,
    load_f32x16,
    prefetch,
    splat_f32x16,
    store_f32,
    sum_lanes,
)
from drover.worker.devices.cpu.tiles import TILE_BYTES, configure, permitted, release, steps
from drover.worker.devices.device import Ceiling
from drover.worker.devices.host import HostBuffer

_READ_BYTES: Final = 256 << 20
"""For each thread: more than caches hold."""
_STEPS: Final = 3_000_000
_CHAINS: Final = 12
"""Sums that do not wait for one another."""
_FLOATS_A_STEP: Final = _CHAINS * 16 * 2
_TILES_A_STEP: Final = 4 * 16 * 16 * 32 * 2
_ROUNDS: Final = 5

_multiply_tiles, _ = steps("tdpbf16ps", COMPILED, ((0, 1), (2, 3)))


def measure(threads: int) -> list[Ceiling]:
    """The best of a few rounds, all threads at once."""
    data = [HostBuffer(_READ_BYTES) for _ in range(threads)]
    for some in data:
        some.array[:] = 0  # pages that were never written are one page of zeros
    places = [some.address for some in data]
    found = [
        Ceiling("memory read", _best(_read, places, _READ_BYTES), "B/s"),
        Ceiling("F32 multiplied and added", _best(_add_floats, places, _STEPS * _FLOATS_A_STEP), "FLOP/s"),
    ]
    if COMPILED and permitted():
        work = _STEPS // 8 * _TILES_A_STEP
        found.append(Ceiling("BF16 tiles multiplied and added", _best(_add_tiles, places, work), "FLOP/s"))
    return found


def _best(function: Callable[[int], None], places: list[int], work: int) -> float:
    """Work per second of all threads together."""
    function(places[0])  # compiled, pages there
    with ThreadPoolExecutor(len(places)) as pool:
        seconds = []
        for _ in range(_ROUNDS):
            start = perf_counter()
            list(pool.map(function, places))
            seconds.append(perf_counter() - start)
    return len(places) * work / min(seconds)


@jit
def _read(at: int) -> None:
    a = b = c = d = splat_f32x16(0.0)
    for i in range(at, at + _READ_BYTES - AHEAD, 256):
        for line in range(0, 256, 64):
            prefetch(i + AHEAD + line)
        a, b = a + load_f32x16(i), b + load_f32x16(i + 64)
        c, d = c + load_f32x16(i + 128), d + load_f32x16(i + 192)
    store_f32(at, sum_lanes(a + b + c + d))


@emits(f32x16, i64)
def _chains(b: Any, count: Any) -> Any:
    """`_CHAINS` sums of `count` products of numbers near 1."""
    factor = constant(f32x16, 1.0000001)

    def step(_index: Any, sums: list[Any]) -> list[Any]:
        return [fused(b, total, factor, factor) for total in sums]

    sums = loop(b, count, [constant(f32x16, float(i)) for i in range(_CHAINS)], step)
    total = sums[0]
    for other in sums[1:]:
        total = b.fadd(total, other)
    return total


@jit
def _add_floats(at: int) -> None:
    store_f32(at, sum_lanes(_chains(_STEPS)))


@jit
def _add_tiles(at: int) -> None:
    configure(at)
    tiles = at + TILE_BYTES
    for _ in range(_STEPS // 8):
        _multiply_tiles(tiles, tiles + TILE_BYTES, tiles + 2 * TILE_BYTES, tiles + 3 * TILE_BYTES)
    release()
