"""What the kernels that are not matrix products add to `simd`: elements by type number, and elementary functions.

Vectors here are 16 floats. Everything is portable LLVM IR: nothing needs a feature of the processor. Loads may read up
to 64 bytes past the last element (buffers have readable bytes behind them); stores never write past it.
"""

import struct
from collections.abc import Callable
from math import factorial, pi
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from drover.worker.devices.cpu.record import F16, F32, PARAMS, Q8_0
from drover.worker.devices.cpu.simd import (
    AVX512,
    I32,
    I64,
    broadcast,
    call,
    emits,
    f32,
    f32x16,
    fused,
    i32x16,
    i64,
    jit,
    jit_inline,
    load_bf16,
    load_bf16_f32x16,
    load_f16,
    load_f16_f32x16,
    load_f32,
    load_f32x16,
    load_i8_f32x16,
    narrow_bf16,
    narrow_f16,
    pointer,
    read,
    shuffle,
    splat_f32x16,
    store,
    store_bf16,
    store_bf16_f32x16,
    store_f16,
    store_f16_f32x16,
    store_f32,
    void,
)
from drover.worker.devices.cpu.simd import (
    F32 as FLOAT,
)

LANES = 16
V, VI = f32x16.ir, i32x16.ir
VD = ir.VectorType(ir.DoubleType(), LANES)


@emits(i64, i64, i64)
def word(b: Any, record: Any, index: Any) -> Any:
    """A word of a record."""
    return read(b, b.add(record, b.shl(index, I64(3))), I64)


@emits(f32, i64, i64)
def param(b: Any, record: Any, index: Any) -> Any:
    """Parameter `index` of a record, read as a float."""
    return read(b, b.add(record, b.shl(b.add(index, I64(PARAMS)), I64(3))), FLOAT)


@emits(i64, *[i64] * 6)
def row_address(b: Any, record: Any, base: Any, strides: Any, i1: Any, i2: Any, i3: Any) -> Any:
    """Address of a row of the tensor whose address and strides are these words of a record."""

    def word_at(index: Any) -> Any:
        return read(b, b.add(record, b.shl(index, I64(3))), I64)

    place = word_at(base)
    for dimension, index in enumerate((i1, i2, i3), start=1):
        place = b.add(place, b.mul(index, word_at(b.add(strides, I64(dimension)))))
    return place


@emits(void, i64, i64, i64)
def move(b: Any, target: Any, source: Any, count: Any) -> None:
    """Copy bytes; the ranges may overlap."""
    byte = ir.IntType(8)
    call(
        b,
        "llvm.memmove.p0.p0.i64",
        ir.VoidType(),
        pointer(b, target, byte),
        pointer(b, source, byte),
        count,
        ir.IntType(1)(0),
    )


# ---- by type number


@jit_inline
def load_row(address: int, kind: int) -> Any:
    """16 elements of type F32, F16 or BF16 as floats."""
    if kind == F32:
        return load_f32x16(address)
    if kind == F16:
        return load_f16_f32x16(address)
    return load_bf16_f32x16(address)


@jit_inline
def store_row(address: int, kind: int, x: Any, count: int) -> None:
    """Store the first `count` (16 and more: all) lanes as type F32, F16 or BF16."""
    if kind == F32:
        if count >= 16:
            store(address, x)
        else:
            store_some_f32(address, x, count)
    elif kind == F16:
        if count >= 16:
            store_f16_f32x16(address, x)
        else:
            store_some_f16(address, x, count)
    elif count >= 16:
        store_bf16_f32x16(address, x)
    else:
        store_some_bf16(address, x, count)


@jit_inline
def load_one(address: int, kind: int) -> float:
    """One element of type F32, F16 or BF16 as a float."""
    if kind == F32:
        return load_f32(address)
    if kind == F16:
        return load_f16(address)
    return load_bf16(address)


@jit_inline
def store_one(address: int, kind: int, x: float) -> None:
    """Store one float as type F32, F16 or BF16."""
    if kind == F32:
        store_f32(address, x)
    elif kind == F16:
        store_f16(address, x)
    else:
        store_bf16(address, x)


@jit
def widen(source: int, kind: int, target: int, count: int) -> None:
    """A contiguous row of F32, F16, BF16 or Q8_0 as floats; `count` is rounded up to 16."""
    if kind == Q8_0:
        for i in range(0, count, 16):
            block = source + 34 * (i // 32)
            scale = splat_f32x16(load_f16(block))
            store(target + 4 * i, scale * load_i8_f32x16(block + 2 + i % 32))
        return
    size = 4 if kind == F32 else 2
    for i in range(0, count, 16):
        store(target + 4 * i, load_row(source + size * i, kind))


def _lanes(b: Any, count: Any) -> Any:
    """A mask of the first `count` lanes; `count` is an i64."""
    numbers = ir.Constant(VI, list(range(LANES)))
    return b.icmp_signed("<", numbers, broadcast(b, b.trunc(count, I32), LANES))


def _store_some(b: Any, value: Any, address: Any, count: Any, name: str) -> None:
    place = pointer(b, address, value.type)
    call(b, f"llvm.masked.store.{name}.p0", ir.VoidType(), value, place, I32(1), _lanes(b, count))


def write_some(b: Any, address: Any, x: Any, count: Any) -> None:
    """Store the first `count` of 16 floats, in IR."""
    _store_some(b, x, address, count, "v16f32")


@emits(void, i64, f32x16, i64)
def store_some_f32(b: Any, address: Any, x: Any, count: Any) -> None:
    """Store the first `count` of 16 floats."""
    write_some(b, address, x, count)


@emits(void, i64, f32x16, i64)
def store_some_f16(b: Any, address: Any, x: Any, count: Any) -> None:
    """Store the first `count` of 16 half floats."""
    _store_some(b, narrow_f16(b, x), address, count, "v16i16")


@emits(void, i64, f32x16, i64)
def store_some_bf16(b: Any, address: Any, x: Any, count: Any) -> None:
    """Store the first `count` of 16 bfloats."""
    _store_some(b, narrow_bf16(b, x), address, count, "v16i16")


@emits(f32, f32x16)
def greatest(b: Any, x: Any) -> Any:
    """The largest lane, by halves; quicker than LLVM's reduction, which looks out for NaNs."""
    while x.type.count > 1:
        low, high = (shuffle(b, x, range(start, start + x.type.count // 2)) for start in (0, x.type.count // 2))
        x = b.select(b.fcmp_ordered(">", low, high), low, high)
    return b.extract_element(x, I32(0))


@emits(f32x16, f32x16, i64, f32)
def keep(b: Any, x: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of x, `other` in the rest."""
    return b.select(_lanes(b, count), x, broadcast(b, other, LANES))


@emits(f32, f32x16)
def first_lane(b: Any, x: Any) -> Any:
    """Lane 0."""
    return b.extract_element(x, I32(0))


@emits(f32, f32x16, i64)
def lane(b: Any, x: Any, index: Any) -> Any:
    """Lane `index`."""
    return b.extract_element(x, index)


# ---- elementary functions


def _const(value: float, vector: Any = V) -> Any:
    return ir.Constant(vector, [value] * LANES)


def _whole(value: int) -> Any:
    return ir.Constant(VI, [value] * LANES)


def _unary(name: str) -> Callable[..., Any]:
    def emit(b: Any, x: Any) -> Any:
        return call(b, f"llvm.{name}.v16f32", V, x)

    emit.__name__ = f"vector_{name}"
    return emits(f32x16, f32x16)(emit)


floor, ceil, truncate, nearest_away = map(_unary, ("floor", "ceil", "trunc", "round"))


_EXP_DIGITS = ("0x1.ffffecp-1", "0x1.fffdb6p-2", "0x1.555e66p-3", "0x1.573e2ep-5", "0x1.0e402p-7")
_EXP = [float.fromhex(digits) for digits in _EXP_DIGITS]
"""Coefficients of r to r⁵ in e^r − 1, |r| ≤ ln 2 / 2: those of Arm's optimized routines, as in ggml."""


def _exp(b: Any, x: Any) -> Any:
    """e^x = 2^n · e^r with |r| ≤ ln 2 / 2: rounding by a magic addend, a polynomial, the exponent put in place.

    Every step is ggml's vectorized one, so that what follows agrees to the last bit.
    """
    y = x
    if not AVX512:
        y = b.select(b.fcmp_ordered(">", x, _const(89.0)), _const(89.0), x)
        y = b.select(b.fcmp_ordered("<", y, _const(-87.3)), _const(-87.3), y)
    magic = _const(12582912.0)
    shifted = fused(b, y, _const(float.fromhex("0x1.715476p+0")), magic)
    n = b.fsub(shifted, magic)
    r = fused(b, n, _const(-float.fromhex("0x1.62e4p-1")), y)
    r = fused(b, n, _const(-float.fromhex("0x1.7f7d1cp-20")), r)
    c1, c2, c3, c4, c5 = map(_const, _EXP)
    u = b.fmul(r, r)
    p = fused(b, fused(b, c5, r, c4), u, fused(b, c3, r, c2))
    if AVX512:
        p = fused(b, p, u, fused(b, c1, r, _const(1.0)))
        every, rounding = ir.IntType(16)(-1), I32(4)
        scaled = call(b, "llvm.x86.avx512.mask.scalef.ps.512", V, p, n, _const(0.0), every, rounding)
        beyond = b.select(b.fcmp_ordered(">", n, _const(0.0)), _const(float("inf")), _const(0.0))
        return b.select(b.fcmp_ordered(">", call(b, "llvm.fabs.v16f32", V, n), _const(192.0)), beyond, scaled)
    exponent = b.shl(b.bitcast(shifted, VI), _whole(23))
    half_scale = b.bitcast(b.add(exponent, _whole(126 << 23)), V)
    p = fused(b, p, u, b.fmul(c1, r))
    return b.fmul(fused(b, half_scale, p, half_scale), _const(2.0))


@emits(f32x16, f32x16)
def exp(b: Any, x: Any) -> Any:
    """e^x to 2 ulp; 0 or next to nothing below −87.3, infinity where it overflows."""
    return _exp(b, x)


_STEPS = 32
"""Parts that an octave is cut into by `exp_as_libm`."""
_LIBM = [float.fromhex(digits) for digits in ("0x1.62e42ff0c52d6p-1", "0x1.ebfce50fac4f3p-3", "0x1.c6af84b912394p-5")]
"""Coefficients of t to t³ in 2^t − 1, |t| ≤ 1 / 64 (Arm's optimized routines, which the GNU C library uses)."""


@emits(f32x16, f32x16)
def exp_as_libm(b: Any, x: Any) -> Any:
    """e^x for x ≤ 0 exactly as the GNU C library's `expf`: double precision inside, and a table of 2^(i/32)."""

    def fma(*values: Any) -> Any:
        return call(b, "llvm.fma.v16f64", VD, *values)

    magic = _const(float.fromhex("0x1.8p52"), VD)
    scaled = b.fmul(b.fpext(x, VD), _const(_STEPS * float.fromhex("0x1.71547652b82fep+0"), VD))
    shifted = b.fadd(scaled, magic)
    t = b.fsub(scaled, b.fsub(shifted, magic))
    whole = ir.VectorType(I64, LANES)
    bits = b.bitcast(shifted, whole)
    index = b.and_(bits, ir.Constant(whole, [_STEPS - 1] * LANES))
    table = cgutils.global_constant(b.module, "powers", ir.Constant(ir.ArrayType(I64, _STEPS), _powers()))
    powers = ir.Constant(whole, ir.Undefined)
    for lane in range(LANES):
        place = b.gep(table, [I64(0), b.extract_element(index, I32(lane))])
        powers = b.insert_element(powers, b.load(place), I32(lane))
    power = b.bitcast(b.add(powers, b.shl(bits, ir.Constant(whole, [47] * LANES))), VD)
    c1, c2, c3 = (_const(c / _STEPS**k, VD) for k, c in enumerate(_LIBM, 1))
    y = fma(fma(c3, t, c2), b.fmul(t, t), fma(c1, t, _const(1.0, VD)))
    result = b.fptrunc(b.fmul(y, power), V)
    return b.select(b.fcmp_ordered("<", x, _const(-104.0)), _const(0.0), result)


def _powers() -> list[int]:
    """The bits of 2^(i/32), less what the index adds to the exponent's bits."""
    bits = [int.from_bytes(struct.pack("<d", 2.0 ** (i / _STEPS)), "little") for i in range(_STEPS)]
    return [value - (i << 47) for i, value in enumerate(bits)]


def _expm1(b: Any, x: Any) -> Any:
    p = _const(1 / factorial(7))
    for k in (6, 5, 4, 3, 2, 1):
        p = fused(b, p, x, _const(1 / factorial(k)))
    near = b.fcmp_ordered("<", call(b, "llvm.fabs.v16f32", V, x), _const(0.35))
    return b.select(near, b.fmul(p, x), b.fsub(_exp(b, x), _const(1.0)))


@emits(f32x16, f32x16)
def expm1(b: Any, x: Any) -> Any:
    """e^x − 1, exact near 0."""
    return _expm1(b, x)


@emits(f32x16, f32x16)
def tanh(b: Any, x: Any) -> Any:
    """Hyperbolic tangent: with z = e^2x − 1, z / (z + 2); 1 beyond 15."""
    bounded = b.select(b.fcmp_ordered(">", x, _const(15.0)), _const(15.0), x)
    z = _expm1(b, b.fadd(bounded, bounded))
    return b.fdiv(z, b.fadd(z, _const(2.0)))


@emits(f32x16, f32x16)
def sigmoid(b: Any, x: Any) -> Any:
    """1 / (1 + e^−x)."""
    return b.fdiv(_const(1.0), b.fadd(_const(1.0), _exp(b, b.fneg(x))))


@emits(f32x16, f32x16)
def silu(b: Any, x: Any) -> Any:
    """x / (1 + e^−x)."""
    return b.fdiv(x, b.fadd(_const(1.0), _exp(b, b.fneg(x))))


@emits(f32x16, f32x16)
def log(b: Any, x: Any) -> Any:
    """Natural logarithm: the exponent and 2·artanh((m − 1) / (m + 1)) of a mantissa around 1."""
    bits = b.bitcast(x, VI)
    origin = _whole(0x3F3504F3)
    exponent = b.ashr(b.sub(bits, origin), _whole(23))
    m = b.bitcast(b.sub(bits, b.shl(exponent, _whole(23))), V)
    s = b.fdiv(b.fsub(m, _const(1.0)), b.fadd(m, _const(1.0)))
    z = b.fmul(s, s)
    p = _const(2 / 9)
    for k in (7, 5, 3, 1):
        p = fused(b, p, z, _const(2 / k))
    y = fused(b, b.sitofp(exponent, V), _const(0.6931471805599453), b.fmul(p, s))
    y = b.select(b.fcmp_ordered("==", x, _const(0.0)), _const(float("-inf")), y)
    y = b.select(b.fcmp_unordered("<", x, _const(0.0)), _const(float("nan")), y)
    return b.select(b.fcmp_ordered("==", x, _const(float("inf"))), x, y)


@emits(f32x16, f32x16)
def erf(b: Any, x: Any) -> Any:
    """Error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    magnitude = call(b, "llvm.fabs.v16f32", V, x)
    t = b.fdiv(_const(1.0), fused(b, magnitude, _const(0.3275911), _const(1.0)))
    p = _const(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = fused(b, p, t, _const(coefficient))
    tail = b.fmul(b.fmul(p, t), _exp(b, b.fneg(b.fmul(x, x))))
    return call(b, "llvm.copysign.v16f32", V, b.fsub(_const(1.0), tail), x)


def _quarter_turns(b: Any, x: Any) -> tuple[Any, Any]:
    """The nearest number of quarter turns, and what remains of the angle; reduced in double precision."""
    wide = b.fpext(x, VD)
    turns = call(b, "llvm.rint.v16f64", VD, b.fmul(wide, _const(2 / pi, VD)))
    rest = call(b, "llvm.fma.v16f64", VD, turns, _const(-pi / 2, VD), wide)
    return b.fptosi(turns, VI), b.fptrunc(rest, V)


def _series(b: Any, z: Any, terms: list[float]) -> Any:
    p = _const(terms[-1])
    for term in reversed(terms[:-1]):
        p = fused(b, p, z, _const(term))
    return p


def _turned_sine(b: Any, x: Any, quarter: int) -> Any:
    """sin(x + quarter · π/2)."""
    turns, r = _quarter_turns(b, x)
    turns = b.add(turns, _whole(quarter))
    z = b.fmul(r, r)
    sine = b.fmul(r, _series(b, z, [(-1) ** k / factorial(2 * k + 1) for k in range(5)]))
    cosine = _series(b, z, [(-1) ** k / factorial(2 * k) for k in range(6)])
    odd = b.icmp_signed("!=", b.and_(turns, _whole(1)), _whole(0))
    back = b.icmp_signed("!=", b.and_(turns, _whole(2)), _whole(0))
    value = b.select(odd, cosine, sine)
    return b.select(back, b.fneg(value), value)


@emits(f32x16, f32x16)
def sin(b: Any, x: Any) -> Any:
    """Sine; right to single precision up to angles of about 1e8."""
    return _turned_sine(b, x, 0)


@emits(f32x16, f32x16)
def cos(b: Any, x: Any) -> Any:
    """Cosine; as `sin`."""
    return _turned_sine(b, x, 1)
