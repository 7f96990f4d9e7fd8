"""Operations that treat every element alike: arithmetic of two tensors, functions of one, gated units.

All layouts are honoured: elements are taken 16 at a time, by a vector load where they are neighbours, else one by one.
Formulas: docs/protocol.md section 6.4.
"""

from typing import Any

from drover.worker.devices.cpu.record import (
    DST,
    F32,
    NB0,
    NB1,
    NB_DST,
    NE1,
    NE_DST,
    PARAMS,
    SRC,
    TYPE0,
    TYPE1,
    TYPE_DST,
)
from drover.worker.devices.cpu.simd import (
    absolute,
    fma,
    jit,
    jit_inline,
    load_f32,
    load_f32x16,
    maximum,
    minimum,
    splat_f32x16,
    square_root,
    store,
    store_f32,
    where_greater,
)
from drover.worker.devices.cpu.sync import each_row
from drover.worker.devices.cpu.vector import (
    ceil,
    cos,
    erf,
    exp,
    expm1,
    floor,
    load_one,
    load_row,
    log,
    nearest_away,
    param,
    row_address,
    sigmoid,
    silu,
    sin,
    store_one,
    store_row,
    tanh,
    truncate,
    word,
)

# What BINARY does (parameter 0).
ADD, SUB, MUL, DIV = range(4)

# What UNARY does (parameter 0): the numbers of drover.ggml.ops.Unary, and from 32 on operations of their own.
ABS, SGN, NEG, STEP, TANH, ELU, RELU, SIGMOID, GELU, GELU_QUICK, SILU = range(11)
HARDSWISH, HARDSIGMOID, EXP, EXPM1, SOFTPLUS, GELU_ERF, XIELU, FLOOR, CEIL, ROUND, TRUNC = range(11, 22)
SQR, SQRT, LOG, SIN, COS, SCALE, CLAMP, LEAKY_RELU, FILL = range(32, 41)

# What GLU does (parameter 0): the numbers of drover.ggml.ops.Glu.
REGLU, GEGLU, SWIGLU, SWIGLU_OAI, GEGLU_ERF, GEGLU_QUICK, SWIGLU_CLAMP = range(7)


def binary(record: int, _thread: int, threads: int, scratch: int, _shared: int, _sync: int) -> None:
    """dst = src0 ∘ src1, src1 repeated in every dimension."""
    kind = word(record, PARAMS)
    ne0 = word(record, NE_DST)
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        x = row_address(record, SRC, NB0, i1, i2, i3)
        n1, n2, n3 = word(record, NE1 + 1), word(record, NE1 + 2), word(record, NE1 + 3)
        y = row_address(record, SRC + 1, NB1, i1 % n1, i2 % n2, i3 % n3)
        _binary_row(record, kind, x, y, row_address(record, DST, NB_DST, i1, i2, i3), ne0, scratch)


@jit
def _binary_row(record: int, kind: int, x: int, y: int, z: int, count: int, scratch: int) -> None:
    type0, type1, type2 = word(record, TYPE0), word(record, TYPE1), word(record, TYPE_DST)
    step0, step1, step2 = word(record, NB0), word(record, NB1), word(record, NB_DST)
    period = word(record, NE1)
    if period == count and type0 == type1 == type2 == F32 and step0 == step1 == step2 == 4:
        for i in range(0, count, 16):
            value = _combine(kind, load_f32x16(x + 4 * i), load_f32x16(y + 4 * i))
            store_row(z + 4 * i, F32, value, count - i)
        return
    if period == 1:
        step1, period = 0, count
    for start in range(0, count, period):
        for i in range(0, period, 16):
            left = period - i
            at = start + i
            a = take(x + at * step0, step0, type0, left, scratch)
            b = take(y + i * step1, step1, type1, left, scratch)
            put(z + at * step2, step2, type2, _combine(kind, a, b), left, scratch)


@jit_inline
def _combine(kind: int, x: Any, y: Any) -> Any:
    if kind == ADD:
        return x + y
    if kind == MUL:
        return x * y
    if kind == SUB:
        return x - y
    return x / y


@jit_inline
def take(address: int, step: int, kind: int, count: int, room: int) -> Any:
    """16 elements `step` bytes apart (0: one element 16 times) as floats; `room` is for 16 floats."""
    if step == (4 if kind == F32 else 2):
        return load_row(address, kind)
    if step == 0:
        return splat_f32x16(load_one(address, kind))
    for i in range(min(count, 16)):
        store_f32(room + 4 * i, load_one(address + i * step, kind))
    return load_f32x16(room)


@jit_inline
def put(address: int, step: int, kind: int, x: Any, count: int, room: int) -> None:
    """Store the first `count` (16 and more: all) of 16 elements `step` bytes apart."""
    if step == (4 if kind == F32 else 2):
        store_row(address, kind, x, count)
        return
    store(room, x)
    for i in range(min(count, 16)):
        store_one(address + i * step, kind, load_f32(room + 4 * i))


def unary(record: int, _thread: int, threads: int, scratch: int, _shared: int, _sync: int) -> None:
    """dst = f(src0)."""
    kind = word(record, PARAMS)
    ne0 = word(record, NE_DST)
    type0, type1 = word(record, TYPE0), word(record, TYPE_DST)
    step0, step1 = word(record, NB0), word(record, NB_DST)
    p, q = splat_f32x16(param(record, 1)), splat_f32x16(param(record, 2))
    r, s = splat_f32x16(param(record, 3)), splat_f32x16(param(record, 4))
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        x = row_address(record, SRC, NB0, i1, i2, i3)
        y = row_address(record, DST, NB_DST, i1, i2, i3)
        for i in range(0, ne0, 16):
            a = take(x + i * step0, step0, type0, ne0 - i, scratch)
            put(y + i * step1, step1, type1, _apply(kind, a, p, q, r, s), ne0 - i, scratch)


@jit_inline
def _apply(kind: int, x: Any, p: Any, q: Any, r: Any, s: Any) -> Any:
    zero = splat_f32x16(0.0)
    if kind == SCALE:
        return fma(x, p, q)
    if kind == CLAMP:
        return minimum(maximum(x, p), q)
    if kind == FILL:
        return p
    if kind == SQR:
        return x * x
    if kind == SQRT:
        return square_root(x)
    if kind == LOG:
        return log(x)
    if kind == SIN:
        return sin(x)
    if kind == COS:
        return cos(x)
    if kind == LEAKY_RELU:
        return where_greater(x, zero, x, p * x)
    if kind == XIELU:
        return where_greater(x, zero, fma(q, x * x, r * x), fma(expm1(minimum(x, s)) - x, p, r * x))
    return _named(kind, x)


@jit_inline
def _named(kind: int, x: Any) -> Any:
    zero, one = splat_f32x16(0.0), splat_f32x16(1.0)
    if kind == SILU:
        return silu(x)
    if kind == GELU:
        return gelu(x)
    if kind == SIGMOID:
        return sigmoid(x)
    if kind == RELU:
        return maximum(x, zero)
    if kind == TANH:
        return tanh(x)
    if kind == GELU_QUICK:
        return x * sigmoid(x * splat_f32x16(1.702))
    if kind == GELU_ERF:
        return gelu_erf(x)
    if kind == EXP:
        return exp(x)
    if kind == NEG:
        return zero - x
    if kind == ABS:
        return absolute(x)
    if kind == SGN:
        return where_greater(x, zero, one, where_greater(zero, x, zero - one, zero))
    if kind == STEP:
        return where_greater(x, zero, one, zero)
    if kind == ELU:
        return where_greater(x, zero, x, expm1(x))
    if kind == EXPM1:
        return expm1(x)
    if kind == SOFTPLUS:
        return where_greater(x, splat_f32x16(20.0), x, log(one + exp(x)))
    if kind == HARDSWISH:
        return x * _hard_sigmoid(x)
    if kind == HARDSIGMOID:
        return _hard_sigmoid(x)
    if kind == FLOOR:
        return floor(x)
    if kind == CEIL:
        return ceil(x)
    if kind == ROUND:
        return nearest_away(x)
    return truncate(x)


@jit_inline
def _hard_sigmoid(x: Any) -> Any:
    shifted = (x + splat_f32x16(3.0)) / splat_f32x16(6.0)
    return minimum(maximum(shifted, splat_f32x16(0.0)), splat_f32x16(1.0))


@jit_inline
def gelu(x: Any) -> Any:
    """x / 2 · (1 + tanh u) = x · σ(2u)."""
    u = splat_f32x16(0.7978845608028654) * x * fma(x * x, splat_f32x16(0.044715), splat_f32x16(1.0))
    return x * sigmoid(u + u)


@jit_inline
def gelu_erf(x: Any) -> Any:
    """x / 2 · (1 + erf(x / √2))."""
    return splat_f32x16(0.5) * x * (splat_f32x16(1.0) + erf(x * splat_f32x16(0.7071067811865476)))


def glu(record: int, _thread: int, threads: int, scratch: int, _shared: int, _sync: int) -> None:
    """dst = f(x) · y; x and y are two tensors, or the halves of each row of one."""
    kind = word(record, PARAMS)
    ne0 = word(record, NE_DST)
    kind0, kind1 = word(record, TYPE0), word(record, TYPE_DST)
    step0, step2 = word(record, NB0), word(record, NB_DST)
    both = word(record, SRC + 1) != 0
    swapped = word(record, PARAMS + 1) != 0
    step1 = word(record, NB1) if both else step0
    alpha, limit = splat_f32x16(param(record, 2)), splat_f32x16(param(record, 3))
    for i1, i2, i3 in each_row(record, NE_DST, threads):
        x = row_address(record, SRC, NB0, i1, i2, i3)
        y = row_address(record, SRC + 1, NB1, i1, i2, i3) if both else x + ne0 * step0
        if swapped and not both:
            x, y = y, x
        z = row_address(record, DST, NB_DST, i1, i2, i3)
        for i in range(0, ne0, 16):
            a = take(x + i * step0, step0, kind0, ne0 - i, scratch)
            b = take(y + i * step1, step1, kind0, ne0 - i, scratch)
            put(z + i * step2, step2, kind1, _gate(kind, a, b, alpha, limit), ne0 - i, scratch)


@jit_inline
def _gate(kind: int, x: Any, y: Any, alpha: Any, limit: Any) -> Any:
    if kind == SWIGLU:
        return silu(x) * y
    if kind == GEGLU:
        return gelu(x) * y
    if kind == REGLU:
        return maximum(x, splat_f32x16(0.0)) * y
    if kind == GEGLU_ERF:
        return gelu_erf(x) * y
    if kind == GEGLU_QUICK:
        return x * sigmoid(x * splat_f32x16(1.702)) * y
    low = splat_f32x16(0.0) - limit
    x = minimum(x, limit)
    y = minimum(maximum(y, low), limit)
    if kind == SWIGLU_OAI:
        return x * sigmoid(alpha * x) * (y + splat_f32x16(1.0))
    return silu(x) * y
