"""Rows of quantized blocks as floats, and floats as blocks, for operations that copy rows.

Layouts: docs/protocol.md section 5.1; quantisation: section 5.2. Matrix products decode weights on their own.
"""

from typing import Any

from llvmlite import ir
from numba import float32
from numba.core.typing.templates import signature

from drover.worker.devices.cpu import calls
from drover.worker.devices.cpu.fours import CODEBOOK, decode_fours, decode_nvfp4
from drover.worker.devices.cpu.kinds import (
    IQ4_NL,
    IQ4_XS,
    NVFP4,
    Q2_K,
    Q3_K,
    Q4_1,
    Q5_0,
    Q5_1,
    TQ1_0,
    TQ2_0,
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
    load_u8,
    max_lanes,
    maximum,
    min_lanes,
    minimum,
    nearest,
    shuffle,
    splat_f32x16,
    store,
    store_f16,
    store_i8,
    store_i32,
    to_i8,
    to_i32,
    void,
    write,
)
from drover.worker.devices.cpu.vector import load_row, move, store_row
from drover.worker.devices.cpu.weights import (
    as_k,
    clear,
    copy,
    decode_iq4_xs,
    decode_levels,
    decode_q2_k,
    decode_q3_k,
    decode_q4_k,
    decode_q5_k,
    decode_q6_k,
    decode_tq1_0,
    decode_tq2_0,
)

READABLE = TYPES | {I32}
"""Types `dequantize` knows (I32 stays as it is)."""
WRITABLE = frozenset((Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL))
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
    scales, minima, factors = (b.extract_value(block, i) for i in range(4, 7))
    d, dm = (b.extract_element(factors, I32_TYPE(i)) for i in (0, 1))
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
    elif kind == TQ1_0:
        _store_k(decode_tq1_0(source), offset, target)
    elif kind == TQ2_0:
        _store_k(decode_tq2_0(source), offset, target)
    elif kind == IQ4_XS:
        _store_k(as_k(decode_iq4_xs(source)), offset, target)
    else:
        calls.look_up(table, kind, source, 1, room)
        _store_k(as_k(decode_levels(room)), offset, target)


def quantize(_table: int, source: int, target: int, kind: int, count: int) -> None:
    """A row of `count` floats (whole blocks) as one of the `WRITABLE` types."""
    size = block_bytes(kind)
    for block in range(count // 32):
        x, out = source + 128 * block, target + size * block
        if kind == Q8_0:
            _write_q8_0(x, out)
        elif kind == Q4_0:
            _write_signed(x, out, 8)
        elif kind == Q5_0:
            _write_signed(x, out, 16)
        elif kind == Q4_1:
            _write_between(x, out, 15)
        elif kind == Q5_1:
            _write_between(x, out, 31)
        else:
            _write_iq4_nl(x, out)


@jit
def _write_q8_0(source: int, target: int) -> None:
    low, high = load_f32x16(source), load_f32x16(source + 64)
    largest = max_lanes(maximum(absolute(low), absolute(high)))
    inverse = splat_f32x16(float32(127.0) / largest if largest != 0.0 else float32(0.0))
    store_f16(target, float32(largest / float32(127.0)))
    store(target + 2, to_i8(to_i32(nearest(low * inverse))))
    store(target + 18, to_i8(to_i32(nearest(high * inverse))))


@jit
def _extreme(source: int) -> Any:
    """The first of 32 floats whose magnitude is largest."""
    extreme = float32(0.0)
    for i in range(32):
        x = load_f32(source + 4 * i)
        if abs(x) > abs(extreme):
            extreme = x
    return extreme


@jit
def _write_signed(source: int, target: int, half: int) -> None:
    """Q4_0 and Q5_0: the largest element becomes −half."""
    d = float32(_extreme(source) / float32(-half))
    store_f16(target, d)
    inverse = float32(1.0) / d if d != 0.0 else float32(0.0)
    _write_levels(source, float32(0.0), inverse, float32(float32(half) + float32(0.5)), 2 * half - 1, target + 2)


@jit
def _write_between(source: int, target: int, top: int) -> None:
    """Q4_1 and Q5_1: the least element becomes 0, the greatest `top`."""
    low, high = load_f32x16(source), load_f32x16(source + 64)
    least, greatest = min_lanes(minimum(low, high)), max_lanes(maximum(low, high))
    d = float32((greatest - least) / float32(top))
    store_f16(target, d)
    store_f16(target + 2, least)
    inverse = float32(1.0) / d if d != 0.0 else float32(0.0)
    _write_levels(source, least, inverse, float32(0.5), top, target + 4)


@jit
def _write_levels(source: int, least: Any, inverse: Any, shift: Any, top: int, target: int) -> None:
    """(x − least) · inverse + shift, cut to 0..top: the fifth bits, if levels have five, and nibbles behind them."""
    bits = 0
    nibbles = target + (4 if top == 31 else 0)
    for i in range(16):
        low = _level(load_f32(source + 4 * i), least, inverse, shift, top)
        high = _level(load_f32(source + 64 + 4 * i), least, inverse, shift, top)
        store_i8(nibbles + i, (low & 15) | (high & 15) << 4)
        bits |= (low >> 4) << i | (high >> 4) << (16 + i)
    if top == 31:
        store_i32(target, bits)


@jit
def _level(x: Any, least: Any, inverse: Any, shift: Any, top: int) -> int:
    level = float32(float32(float32(x - least) * inverse) + shift)
    return int(min(level, float32(top))) if level > 0.0 else 0


@jit
def _write_iq4_nl(source: int, target: int) -> None:
    """The plain scale first; the one that is kept fits the levels found under it best."""
    extreme = _extreme(source)
    if abs(extreme) < 1e-15:
        clear(target, 18)
        return
    factor = float32(1.0) / float32(extreme / float32(-127.0))
    by_x, by_level = float32(0.0), float32(0.0)
    for i in range(32):
        x = load_f32(source + 4 * i)
        q = _nearest(float32(factor * x))
        level = float32(CODEBOOK[q])
        weighted = float32(float32(x * x) * level)
        by_x = float32(by_x + float32(weighted * x))
        by_level = float32(by_level + float32(weighted * level))
        if i < 16:
            store_i8(target + 2 + i, q)
        else:
            store_i8(target + i - 14, load_u8(target + i - 14) | q << 4)
    store_f16(target, float32(by_x / by_level) if by_level != 0.0 else float32(0.0))


@jit
def _nearest(x: Any) -> int:
    """The number of the nearest level of IQ4_NL, the upper one of two equally near."""
    upper = 1
    while upper < 15 and float32(CODEBOOK[upper]) <= x:
        upper += 1
    return upper - 1 if float32(x - float32(CODEBOOK[upper - 1])) < float32(float32(CODEBOOK[upper]) - x) else upper
