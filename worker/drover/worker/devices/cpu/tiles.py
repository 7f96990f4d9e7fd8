"""The tile unit (AMX): its registers hold 16 rows of 64 bytes; loads, stores and the products of tiles.

Registers are named by number. Tiles in memory are 1 KiB each and contiguous, so that loads never share a cache set.
Where `TILES` is false nothing here may be called: the instructions are left out.
"""

from typing import Any, Final

from llvmlite import ir
from numba.core import types

from drover.worker.devices.cpu.products import transpose
from drover.worker.devices.cpu.simd import (
    AVX512,
    FEATURES,
    I8,
    I64,
    call,
    emits,
    i64,
    jit,
    load_i64,
    store_i8,
    store_i16,
    void,
)
from drover.worker.devices.cpu.weights import clear, copy

TILES: Final = AVX512 and "amx-tile" in FEATURES
"""Whether the processor has the tile registers; the system must still permit them."""
TILE_BYTES: Final = 1024
_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18
"""The system call that allows a process the tile registers, and its arguments."""

_syscall: Any = types.ExternalFunction("syscall", types.int64(types.int64, types.int64, types.int64))


@jit
def permitted() -> bool:
    """Ask for the tile registers; a call that has no effect but the first time."""
    return _syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


@emits(void, i64)
def _configure(b: Any, a: Any) -> None:
    if TILES:
        call(b, "llvm.x86.ldtilecfg", ir.VoidType(), b.inttoptr(a, I8.as_pointer()))


@emits(void)
def release(b: Any) -> None:
    """Give the tile registers back, which makes context switches cheaper."""
    if TILES:
        call(b, "llvm.x86.tilerelease", ir.VoidType())


@jit
def configure(scratch: int) -> None:
    """Every tile 16 rows of 64 bytes; `scratch` is where the configuration is written."""
    clear(scratch, 64)
    store_i8(scratch, 1)
    for tile in range(8):
        store_i16(scratch + 16 + 2 * tile, 64)
        store_i8(scratch + 48 + tile, 16)
    _configure(scratch)


def zero_tile(b: Any, tile: int) -> None:
    """Clear a register."""
    call(b, "llvm.x86.tilezero", ir.VoidType(), I8(tile))


def load_tile(b: Any, tile: int, a: Any) -> None:
    """Load a contiguous tile."""
    call(b, "llvm.x86.tileloadd64", ir.VoidType(), I8(tile), b.inttoptr(a, I8.as_pointer()), I64(64))


def store_tile(b: Any, tile: int, a: Any) -> None:
    """Store a contiguous tile."""
    call(b, "llvm.x86.tilestored64", ir.VoidType(), I8(tile), b.inttoptr(a, I8.as_pointer()), I64(64))


def steps(kind: str, compiled: bool, results: tuple[tuple[int, int], tuple[int, int]]) -> tuple[Any, Any]:
    """Instructions that multiply two tiles of weights with two of activations, and with one; addresses in that order.

    `kind` names the product; `results[w][x]` is the register that weights w times activations x are added to.
    """

    def emit(b: Any, w0: Any, w1: Any, *activations: Any) -> None:
        if not compiled:
            return
        loads = [(4, w0), (6, activations[0]), (5, w1), (7, activations[-1])]
        for tile, a in loads[: 2 + len(activations)]:
            load_tile(b, tile, a)
        for x in range(len(activations)):
            for w in range(2):
                call(b, f"llvm.x86.{kind}", ir.VoidType(), I8(results[w][x]), I8(4 + w), I8(6 + x))

    def wide(b: Any, w0: Any, w1: Any, x0: Any, x1: Any) -> None:
        emit(b, w0, w1, x0, x1)

    def narrow(b: Any, w0: Any, w1: Any, x0: Any) -> None:
        emit(b, w0, w1, x0)

    wide.__name__, narrow.__name__ = f"wide_{kind}", f"narrow_{kind}"
    return emits(void, *[i64] * 4)(wide), emits(void, *[i64] * 3)(narrow)


@emits(void)
def zero_results(b: Any) -> None:
    """Clear registers 0 to 3."""
    if TILES:
        for tile in range(4):
            zero_tile(b, tile)


@emits(void, i64)
def store_results(b: Any, a: Any) -> None:
    """Store registers 0 to 3, one behind the other."""
    if TILES:
        for tile in range(4):
            store_tile(b, tile, b.add(a, I64(TILE_BYTES * tile)))


@jit
def column_at(x: int, step: int, places: int, column: int) -> int:
    """Where a column starts: columns lie `step` bytes apart, or at listed distances from x."""
    return x + (load_i64(places + 8 * column) if places else column * step)


@jit
def write_results(tiles: int, rows: int, columns: int, out: int, step: int, room: int) -> None:
    """Four tiles (rows by columns: two above two) of 32-bit results to columns `step` bytes apart.

    Tiles over the edge go by way of `room`, a tile.
    """
    for i in range(4):
        r, c = i // 2 * 16, i % 2 * 16
        if rows >= r + 16 and columns >= c + 16:
            transpose(tiles + i * TILE_BYTES, 64, out + c * step + 4 * r, step)
        elif rows > r and columns > c:
            transpose(tiles + i * TILE_BYTES, 64, room, 64)
            for column in range(min(16, columns - c)):
                copy(room + 64 * column, out + (c + column) * step + 4 * r, 4 * min(16, rows - r))
