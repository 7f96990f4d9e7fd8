"""Rows of quantized blocks as floats, and floats as blocks, for operations that copy rows.

Layouts: docs/protocol.md section 5.1; quantisation: section 5.2. Matrix products decode weights on their own.
"""

from typing import Any

from llvmlite import ir
from numba import float32
from numba.core.typing.templates import signature

from drover.worker.devices.cpu import calls
from drover.worker.devices.cpu.kinds import (
    IQ4_XS,
    NVFP4,
    Q2_K,
    Q3_K,
    TYPES,
    block_bytes,
    bytes_of,
    has_constants,
    is_k,
    offset_of,
)
from drover.worker.devices.cpu.record import BF16, F16, F32, I32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0
from drover.worker.devices.cpu.simd import (
    F32 as FLOAT,
)
from drover.worker.devices.cpu.simd import (
    I32 as I32_TYPE,
)
from drover.worker.devices.cpu.simd import (
    I64,
    absolute,
    broadcast,
    constant,
    emits_for,
    f32,
    f32x16,
    i64,
    jit,
    load_f32,
    load_f32x16,
    max_lanes,
    maximum,
    nearest,
    shuffle,
    splat_f32x16,
    store,
    store_f16,
    store_i8,
    to_i8,
    to_i32,
    void,
    write,
)
from drover.worker.devices.cpu.vector import load_row, move, store_row
from drover.worker.devices.cpu.weights import (
    clear,
    copy,
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

READABLE = TYPES | {I32}
"""Types `dequantize` knows (I32 stays as it is)."""
WRITABLE = frozenset((Q4_0, Q8_0))
"""Quantized types `quantize` knows."""
ROOM_BYTES = 1024
_VALUES = 256
"""Of the room: floats start here, behind what is left of a row."""


def dequantize(table: int, source: int, kind: int, target: int, count: int, room: int) -> None:
    """A row of `count` elements (whole blocks) as floats; `room` is `ROOM_BYTES` of scratch."""
    if kind in (F32, I32):
        move(target, source, 4 * count)
    elif kind in (F16, BF16):
        for i in range(0, count, 16):
            store_row(target + 4 * i, F32, load_row(source + 2 * i, kind), count - i)
    elif is_k(kind):
        for block in range(count // 256):
            _read_k(table, source + block_bytes(kind) * block, kind, target + 1024 * block, room)
    else:
        whole = count // 128 * 128
        size = bytes_of(kind, 128)
        for i in range(0, whole, 128):
            _read_fours(source + i // 128 * size, kind, target + 4 * i)
        if whole < count:
            clear(room, _VALUES)
            copy(source + whole // 128 * size, room, bytes_of(kind, count - whole))
            _read_fours(room, kind, room + _VALUES)
            move(target + 4 * whole, room + _VALUES, 4 * (count - whole))


def _sixteenth(b: Any, q: Any, i: int) -> Any:
    return b.uitofp(shuffle(b, q, range(16 * i, 16 * i + 16)), f32x16.ir)


@emits_for(lambda block, offset, added, out: signature(void, block, f32, i64, i64), 4)
def _store_fours(b: Any, block: Any, offset: Any, added: Any, out: Any) -> None:
    """Four blocks of 32 as floats; constants are added if `added` is not 0."""
    d, m = b.extract_value(block, 2), b.extract_value(block, 3)
    m = b.select(b.icmp_signed("!=", added, I64(0)), m, constant(f32x16, 0.0))
    middle = broadcast(b, offset, 16)
    for half in (0, 1):
        for i in range(4):
            lanes = [4 * i] * 16
            q = b.fsub(_sixteenth(b, b.extract_value(block, half), i), middle)
            x = b.fadd(b.fmul(q, shuffle(b, d, lanes)), shuffle(b, m, lanes))
            write(b, b.add(out, I64(128 * i + 64 * half)), x)


@emits_for(lambda block, offset, out: signature(void, block, f32, i64), 3)
def _store_halves(b: Any, block: Any, offset: Any, out: Any) -> None:
    """Like `_store_fours`, where both halves of a block have factors."""
    middle = broadcast(b, offset, 16)
    for half in (0, 1):
        for i in range(4):
            q = b.fsub(_sixteenth(b, b.extract_value(block, half), i), middle)
            x = b.fmul(q, shuffle(b, b.extract_value(block, 2 + half), [4 * i] * 16))
            write(b, b.add(out, I64(128 * i + 64 * half)), x)


@emits_for(lambda block, offset, out: signature(void, block, f32, i64), 3)
def _store_k(b: Any, block: Any, offset: Any, out: Any) -> None:
    """A K block as floats; minima are taken away if q counts from 0."""
    scales, minima, d, dm = (b.extract_value(block, i) for i in range(4, 8))
    middle = broadcast(b, offset, 16)
    counts = b.fcmp_ordered("==", offset, ir.Constant(FLOAT, 0.0))
    for i in range(16):
        m = b.fmul(dm, b.sitofp(b.extract_element(minima, I32_TYPE(i * minima.type.count // 16)), FLOAT))
        m = broadcast(b, b.select(counts, m, ir.Constant(FLOAT, 0.0)), 16)
        s = broadcast(b, b.fmul(d, b.sitofp(b.extract_element(scales, I32_TYPE(i)), FLOAT)), 16)
        q = b.fsub(_sixteenth(b, b.extract_value(block, i // 4), i % 4), middle)
        write(b, b.add(out, I64(64 * i)), b.fsub(b.fmul(s, q), m))


@jit
def _read_fours(source: int, kind: int, target: int) -> None:
    offset = float32(offset_of(kind))
    if kind == NVFP4:
        _store_halves(decode_nvfp4(source), offset, target)
    else:
        _store_fours(decode_fours(kind, source), offset, 1 if has_constants(kind) else 0, target)


@jit
def _read_k(table: int, source: int, kind: int, target: int, room: int) -> None:
    offset = float32(offset_of(kind))
    if kind == Q4_K:
        _store_k(decode_q4_k(source), offset, target)
    elif kind == Q5_K:
        _store_k(decode_q5_k(source), offset, target)
    elif kind == Q2_K:
        _store_k(decode_q2_k(source), offset, target)
    elif kind == Q3_K:
        _store_k(decode_q3_k(source), offset, target)
    elif kind == Q6_K:
        _store_k(decode_q6_k(source), offset, target)
    elif kind == IQ4_XS:
        _store_k(decode_iq4_xs(source), offset, target)
    else:
        calls.look_up(table, kind, source, 1, room)
        _store_k(decode_levels(room), offset, target)


def quantize(source: int, target: int, kind: int, count: int) -> None:
    """A row of `count` floats (whole blocks) as Q8_0 or Q4_0."""
    for block in range(count // 32):
        if kind == Q8_0:
            _write_q8_0(source + 128 * block, target + 34 * block)
        else:
            _write_q4_0(source + 128 * block, target + 18 * block)


@jit
def _write_q8_0(source: int, target: int) -> None:
    low, high = load_f32x16(source), load_f32x16(source + 64)
    largest = max_lanes(maximum(absolute(low), absolute(high)))
    inverse = splat_f32x16(float32(127.0) / largest if largest != 0.0 else float32(0.0))
    store_f16(target, float32(largest / float32(127.0)))
    store(target + 2, to_i8(to_i32(nearest(low * inverse))))
    store(target + 18, to_i8(to_i32(nearest(high * inverse))))


@jit
def _write_q4_0(source: int, target: int) -> None:
    extreme = float32(0.0)
    for i in range(32):
        x = load_f32(source + 4 * i)
        if abs(x) > abs(extreme):
            extreme = x
    d = float32(extreme / float32(-8.0))
    inverse = float32(1.0) / d if d != 0.0 else float32(0.0)
    store_f16(target, d)
    for i in range(16):
        low = min(15, int(load_f32(source + 4 * i) * inverse + float32(8.5)))
        high = min(15, int(load_f32(source + 64 + 4 * i) * inverse + float32(8.5)))
        store_i8(target + 2 + i, low | high << 4)
