"""Vectors in numba: types that are LLVM vectors, and the instructions on them, each a few lines of LLVM IR.

Kernels stay Python functions on addresses (int64) and vectors. Everything here is portable IR, except what asks
`FEATURES` first: an instruction the processor lacks does not raise, it ends the process, so the choice is made at
import, never at run time. Memory is never bounds-checked here, and no load or store needs alignment.
"""

import operator
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

F = TypeVar("F", bound=Callable[..., Any])
Emitter = Callable[..., Any]


def jit(function: F) -> F:
    """Compile a kernel: no interpreter lock, no bounds checks, kept in numba's on-disk cache."""
    return cast(F, numba.njit(nogil=True, error_model="numpy", boundscheck=False, cache=True)(function))


def jit_inline(function: F) -> F:
    """Like `jit`, for parts of a kernel: always inlined into their callers."""
    compile_ = numba.njit(nogil=True, error_model="numpy", boundscheck=False, cache=True, forceinline=True)
    return cast(F, compile_(function))


def jit_generator(function: F) -> F:
    """Like `jit`, for generators: not kept, since numba cannot compile a caller of one that it has loaded."""
    return cast(F, numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function))


def _features() -> frozenset[str]:
    """The features numba compiles for: its own setting if there is one, otherwise what this processor has."""
    chosen: str | None = getattr(config, "CPU_FEATURES")  # noqa: B009  # set by numba while it is imported
    if chosen is not None:
        return frozenset(f[1:] for f in chosen.split(",") if f.startswith("+"))
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


FEATURES = _features()
binding.initialize_native_asmparser()  # for `verbatim`
X86 = binding.get_process_triple().startswith("x86_64")
ARM = binding.get_process_triple().startswith("aarch64")
AVX512 = X86 and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= FEATURES
AVX2 = X86 and "avx2" in FEATURES
FMA = not X86 or "fma" in FEATURES
NATIVE_F16 = not X86 or "f16c" in FEATURES
VBMI = AVX512 and "avx512vbmi" in FEATURES
VNNI512 = AVX512 and "avx512vnni" in FEATURES
VNNI256 = VNNI512 or (AVX2 and "avxvnni" in FEATURES)
DOT_BF16 = AVX512 and "avx512bf16" in FEATURES

# ---- types

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class _BFloatType(ir.types._BaseFloatType):  # type: ignore[misc]  # llvmlite is untyped
    """LLVM's bfloat, which llvmlite does not name."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloatType._create_instance()
BF16 = _BFloatType()
_ELEMENTS = {"i8": I8, "i16": I16, "i32": I32, "i64": I64, "f64": F64, "f32": F32, "f16": F16, "bf16": BF16}


class Vector(types.Type):
    """`lanes` elements in one register (or several, where registers are shorter)."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        self.ir = ir.VectorType(_ELEMENTS[element], lanes)
        self.real = element in ("f64", "f32", "f16", "bf16")
        super().__init__(name=f"{element}x{lanes}")

    def with_lanes(self, lanes: int) -> "Vector":
        """The same elements, more or fewer of them."""
        return Vector(self.element, lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.ir)


i64 = types.int64
f32 = types.float32
void = types.void
i8x16, i8x32, i8x64 = (Vector("i8", n) for n in (16, 32, 64))
i16x8, i16x16, i16x32 = (Vector("i16", n) for n in (8, 16, 32))
i32x8, i32x16 = (Vector("i32", n) for n in (8, 16))
f32x4, f32x8, f32x16 = (Vector("f32", n) for n in (4, 8, 16))
f64x16 = Vector("f64", 16)
bf16x16, bf16x32 = (Vector("bf16", n) for n in (16, 32))

# ---- how an instruction is defined


def emits(result: Any, *arguments: Any) -> Callable[[Emitter], Any]:
    """Make an instruction of a function `(builder, *values) -> value` that writes its IR; fixed numba types."""
    return emits_for(lambda *_: signature(result, *arguments), len(arguments))


def emits_for(rule: Callable[..., Any], count: int, typed: bool = False) -> Callable[[Emitter], Any]:
    """Like `emits`, for many types: `rule` maps argument types to a signature, or None where there is none.

    With `typed` the emitter gets the signature as its second argument.
    """

    def decorate(emit: Emitter) -> Any:
        def typing(context: Any, *arguments: Any) -> Any:
            if len(arguments) != count or (chosen := rule(*arguments)) is None:
                return None

            def generate(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
                value = emit(builder, sig, *values) if typed else emit(builder, *values)
                return context.get_dummy_value() if value is None else value

            return chosen, generate

        typing.__name__ = emit.__name__
        typing.__qualname__ = emit.__qualname__
        typing.__module__ = emit.__module__
        typing.__doc__ = emit.__doc__
        names = ["context", *(f"a{i}" for i in range(count))]  # numba wants a fixed number of arguments
        typing.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return intrinsic(typing)

    return decorate


def pointer(b: Any, address: Any, to: Any) -> Any:
    """The address (an i64 value) as a pointer to an IR type."""
    return b.inttoptr(address, to.as_pointer())


def call(b: Any, name: str, result: Any, *values: Any) -> Any:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [v.type for v in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)


def verbatim(b: Any, text: str, operands: str, result: Any, *values: Any) -> Any:
    """One machine instruction that LLVM would make two of (`operands` are LLVM's constraints)."""
    return b.asm(ir.FunctionType(result, [v.type for v in values]), text, operands, values, False)


def constant(vector: Vector, value: Any) -> Any:
    """A vector of one value in every lane, or of a list of values."""
    values = value if isinstance(value, list) else [value] * vector.lanes
    return ir.Constant(vector.ir, values)


def shuffle(b: Any, x: Any, lanes: Sequence[int], y: Any = None) -> Any:
    """Pick lanes of x, or of x followed by y."""
    other = ir.Constant(x.type, ir.Undefined) if y is None else y
    return b.shuffle_vector(x, other, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def broadcast(b: Any, x: Any, lanes: int) -> Any:
    """A scalar in every lane."""
    kind = ir.VectorType(x.type, lanes)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), x, I32(0))
    return shuffle(b, one, [0] * lanes)


def read(b: Any, address: Any, kind: Any) -> Any:
    """Load a value of an IR type."""
    return b.load(pointer(b, address, kind), align=1)


def write(b: Any, address: Any, value: Any) -> None:
    """Store a value."""
    b.store(value, pointer(b, address, value.type), align=1)


def halves(b: Any, x: Any) -> tuple[Any, Any]:
    """The lower and the upper half of a vector."""
    n = x.type.count
    return shuffle(b, x, range(n // 2)), shuffle(b, x, range(n // 2, n))


def joined(b: Any, low: Any, high: Any) -> Any:
    """Two vectors as one of twice the lanes."""
    return shuffle(b, low, range(2 * low.type.count), high)


def _lanes_of(kind: Any, values: Any) -> Any:
    return ir.Constant(kind, [values] * kind.count)


# ---- conversions of 16-bit floats, in IR


def widen_f16(b: Any, x: Any) -> Any:
    """<n x i16> holding f16 to <n x f32>."""
    n = x.type.count
    real = ir.VectorType(F32, n)
    if NATIVE_F16:
        return b.fpext(b.bitcast(x, ir.VectorType(F16, n)), real)
    whole = ir.VectorType(I32, n)
    bits = b.zext(x, whole)
    sign = b.shl(b.and_(bits, _lanes_of(whole, 0x8000)), _lanes_of(whole, 16))
    rest = b.shl(b.and_(bits, _lanes_of(whole, 0x7FFF)), _lanes_of(whole, 13))
    # The exponent is 112 too small; a multiplication mends it and normalises subnormals on the way.
    scaled = b.bitcast(b.fmul(b.bitcast(rest, real), _lanes_of(real, 2.0**112)), whole)
    special = b.icmp_unsigned(">=", rest, _lanes_of(whole, 0x0F800000))
    return b.bitcast(b.or_(sign, b.select(special, b.or_(rest, _lanes_of(whole, 0x7F800000)), scaled)), real)


def narrow_f16(b: Any, x: Any) -> Any:
    """<n x f32> to <n x i16> holding f16, to nearest even."""
    n = x.type.count
    short = ir.VectorType(I16, n)
    if NATIVE_F16:
        return b.bitcast(b.fptrunc(x, ir.VectorType(F16, n)), short)
    whole = ir.VectorType(I32, n)

    def k(value: int) -> Any:
        return _lanes_of(whole, value)

    bits = b.bitcast(x, whole)
    size = b.and_(bits, k(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, k(13)), k(1))
    normal = b.lshr(b.add(b.add(b.sub(size, k(112 << 23)), k(0xFFF)), odd), k(13))
    # Subnormal results: adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the addition.
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, x.type), _lanes_of(x.type, 0.5)), whole), k(0x3F000000))
    result = b.select(b.icmp_unsigned("<", size, k(0x38800000)), small, normal)
    result = b.select(b.icmp_unsigned(">=", size, k(0x477FF000)), k(0x7C00), result)
    result = b.select(b.icmp_unsigned(">", size, k(0x7F800000)), k(0x7E00), result)
    return b.trunc(b.or_(result, b.and_(b.lshr(bits, k(16)), k(0x8000))), short)


def widen_bf16(b: Any, x: Any) -> Any:
    """<n x i16> holding bf16 to <n x f32>."""
    whole = ir.VectorType(I32, x.type.count)
    return b.bitcast(b.shl(b.zext(x, whole), _lanes_of(whole, 16)), ir.VectorType(F32, x.type.count))


def narrow_bf16(b: Any, x: Any) -> Any:
    """<n x f32> to <n x i16> holding bf16, to nearest even."""
    n = x.type.count
    if DOT_BF16:
        return b.bitcast(b.fptrunc(x, ir.VectorType(BF16, n)), ir.VectorType(I16, n))
    whole = ir.VectorType(I32, n)
    bits = b.bitcast(x, whole)
    odd = b.and_(b.lshr(bits, _lanes_of(whole, 16)), _lanes_of(whole, 1))
    rounded = b.add(b.add(bits, _lanes_of(whole, 0x7FFF)), odd)
    nan = b.fcmp_unordered("uno", x, x)
    kept = b.select(nan, b.or_(bits, _lanes_of(whole, 1 << 22)), rounded)
    return b.trunc(b.lshr(kept, _lanes_of(whole, 16)), ir.VectorType(I16, n))


# ---- scalars at addresses


@emits(i64, i64)
def load_u8(b: Any, a: Any) -> Any:
    """A byte, 0 to 255."""
    return b.zext(read(b, a, I8), I64)


@emits(i64, i64)
def load_i8(b: Any, a: Any) -> Any:
    """A signed byte."""
    return b.sext(read(b, a, I8), I64)


@emits(i64, i64)
def load_u16(b: Any, a: Any) -> Any:
    """Two bytes, 0 to 65535."""
    return b.zext(read(b, a, I16), I64)


@emits(i64, i64)
def load_i32(b: Any, a: Any) -> Any:
    """A signed 32-bit integer."""
    return b.sext(read(b, a, I32), I64)


@emits(i64, i64)
def load_u32(b: Any, a: Any) -> Any:
    """An unsigned 32-bit integer."""
    return b.zext(read(b, a, I32), I64)


@emits(i64, i64)
def load_i64(b: Any, a: Any) -> Any:
    """A 64-bit integer."""
    return read(b, a, I64)


@emits(f32, i64)
def load_f32(b: Any, a: Any) -> Any:
    """A float."""
    return read(b, a, F32)


@emits(f32, i64)
def load_f16(b: Any, a: Any) -> Any:
    """A half-precision float, widened (by way of a vector, which is never a library call)."""
    short = b.insert_element(ir.Constant(ir.VectorType(I16, 8), [0] * 8), read(b, a, I16), I32(0))
    return b.extract_element(widen_f16(b, short), I32(0))


@emits(f32, i64)
def load_bf16(b: Any, a: Any) -> Any:
    """A bfloat, widened."""
    return b.bitcast(b.shl(b.zext(read(b, a, I16), I32), I32(16)), F32)


@emits(void, i64, i64)
def store_i8(b: Any, a: Any, x: Any) -> None:
    """The low byte of an integer."""
    write(b, a, b.trunc(x, I8))


@emits(void, i64, i64)
def store_i16(b: Any, a: Any, x: Any) -> None:
    """The low 16 bits of an integer."""
    write(b, a, b.trunc(x, I16))


@emits(void, i64, i64)
def store_i32(b: Any, a: Any, x: Any) -> None:
    """The low 32 bits of an integer."""
    write(b, a, b.trunc(x, I32))


@emits(void, i64, i64)
def store_i64(b: Any, a: Any, x: Any) -> None:
    """A 64-bit integer."""
    write(b, a, x)


@emits(void, i64, f32)
def store_f32(b: Any, a: Any, x: Any) -> None:
    """A float."""
    write(b, a, x)


@emits(void, i64, f32)
def store_f16(b: Any, a: Any, x: Any) -> None:
    """A float narrowed to half precision, to nearest even."""
    write(b, a, b.extract_element(narrow_f16(b, broadcast(b, x, 8)), I32(0)))


@emits(void, i64, f32)
def store_bf16(b: Any, a: Any, x: Any) -> None:
    """A float narrowed to bfloat, to nearest even."""
    write(b, a, b.extract_element(narrow_bf16(b, broadcast(b, x, 8)), I32(0)))


@emits(f32, f32)
def round_to_f16(b: Any, x: Any) -> Any:
    """The nearest value that a half-precision float holds."""
    return b.extract_element(widen_f16(b, narrow_f16(b, broadcast(b, x, 8))), I32(0))


@emits(void, i64)
def prefetch(b: Any, a: Any) -> None:
    """Ask for the cache line at an address; the address may be anything."""
    call(b, "llvm.prefetch.p0", ir.VoidType(), b.inttoptr(a, I8.as_pointer()), I32(0), I32(3), I32(1))


# ---- vectors at addresses


def _load(vector: Vector) -> Any:
    def load(b: Any, a: Any) -> Any:
        return read(b, a, vector.ir)

    load.__name__ = f"load_{vector.name}"
    return emits(vector, i64)(load)


def _splat(vector: Vector, scalar: Any) -> Any:
    def splat(b: Any, x: Any) -> Any:
        element = vector.ir.element
        value = b.trunc(x, element) if not vector.real and element != x.type else x
        return broadcast(b, value, vector.lanes)

    splat.__name__ = f"splat_{vector.name}"
    return emits(vector, scalar)(splat)


load_i8x16, load_i8x32, load_i8x64 = map(_load, (i8x16, i8x32, i8x64))
load_i16x8, load_i16x16, load_i16x32 = map(_load, (i16x8, i16x16, i16x32))
load_i32x8, load_i32x16 = map(_load, (i32x8, i32x16))
load_f32x4, load_f32x8, load_f32x16 = map(_load, (f32x4, f32x8, f32x16))
load_f64x16 = _load(f64x16)
splat_f32x8, splat_f32x16 = (_splat(v, f32) for v in (f32x8, f32x16))
splat_i8x64, splat_i16x32, splat_i32x16 = (_splat(v, i64) for v in (i8x64, i16x32, i32x16))


@emits_for(lambda a, x: signature(void, i64, x) if isinstance(x, Vector) else None, 2)
def store(b: Any, a: Any, x: Any) -> None:
    """A whole vector of any type."""
    write(b, a, x)


@emits(f32x16, i64)
def load_f16_f32x16(b: Any, a: Any) -> Any:
    """Sixteen half-precision floats, widened."""
    return widen_f16(b, read(b, a, i16x16.ir))


@emits(f32x16, i64)
def load_bf16_f32x16(b: Any, a: Any) -> Any:
    """Sixteen bfloats, widened."""
    return widen_bf16(b, read(b, a, i16x16.ir))


@emits(f32x16, i64)
def load_i8_f32x16(b: Any, a: Any) -> Any:
    """Sixteen signed bytes as floats."""
    return b.sitofp(read(b, a, i8x16.ir), f32x16.ir)


@emits(f32x16, i64)
def load_u8_f32x16(b: Any, a: Any) -> Any:
    """Sixteen bytes, 0 to 255, as floats."""
    return b.uitofp(read(b, a, i8x16.ir), f32x16.ir)


@emits(i16x16, i64)
def load_i8_i16x16(b: Any, a: Any) -> Any:
    """Sixteen signed bytes, widened."""
    return b.sext(read(b, a, i8x16.ir), i16x16.ir)


@emits(void, i64, f32x16)
def store_f16_f32x16(b: Any, a: Any, x: Any) -> None:
    """Sixteen floats narrowed to half precision, to nearest even."""
    write(b, a, narrow_f16(b, x))


@emits(void, i64, f32x16)
def store_bf16_f32x16(b: Any, a: Any, x: Any) -> None:
    """Sixteen floats narrowed to bfloat, to nearest even."""
    write(b, a, narrow_bf16(b, x))


@emits(f32x16, f32x16)
def round_to_f16_f32x16(b: Any, x: Any) -> Any:
    """The nearest values that half-precision floats hold."""
    return widen_f16(b, narrow_f16(b, x))


@emits(f32x16, f32x16)
def round_to_bf16_f32x16(b: Any, x: Any) -> Any:
    """The nearest values that bfloats hold."""
    return widen_bf16(b, narrow_bf16(b, x))


# ---- arithmetic: Python's operators on vectors of one type; bits and shifts also with an integer on the right


def _operator(symbol: Any, whole: str, real: str | None) -> None:
    @infer_global(symbol)
    class Rule(AbstractTemplate):
        def generic(self, args: Any, _named: Any) -> Any:
            if len(args) != 2 or not isinstance(args[0], Vector) or (args[0].real and real is None):
                return None
            if args[1] == args[0]:
                return signature(args[0], *args)
            if isinstance(args[1], types.Integer) and not args[0].real:
                return signature(args[0], args[0], i64)
            return None

    @lower_builtin(symbol, Vector, Vector)
    def by_vector(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return getattr(b, real if sig.return_type.real and real else whole)(*args)

    @lower_builtin(symbol, Vector, types.Integer)
    def by_integer(context: Any, b: Any, sig: Any, args: Any) -> Any:
        vector = sig.return_type
        element = vector.ir.element
        right = args[1] if element == I64 else b.trunc(args[1], element)
        return getattr(b, whole)(args[0], broadcast(b, right, vector.lanes))


for _row in (
    (operator.add, "add", "fadd"),
    (operator.sub, "sub", "fsub"),
    (operator.mul, "mul", "fmul"),
    (operator.truediv, "sdiv", "fdiv"),
    (operator.and_, "and_", None),
    (operator.or_, "or_", None),
    (operator.xor, "xor", None),
    (operator.lshift, "shl", None),
    (operator.rshift, "lshr", None),
):
    _operator(*_row)


def _real(*kinds: Any) -> Any:
    same = isinstance(kinds[0], Vector) and kinds[0].real and all(k == kinds[0] for k in kinds)
    return signature(kinds[0], *kinds) if same else None


def _scalar_of(kind: Any) -> Any:
    scalar = {"f32": f32, "f64": types.float64}.get(kind.element) if isinstance(kind, Vector) else None
    return signature(scalar, kind) if scalar else None


def _name(kind: Any) -> str:
    return f"v{kind.count}{kind.element.intrinsic_name}"


def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in IR, rounded once where the processor can."""
    return call(b, f"llvm.{'fma' if FMA else 'fmuladd'}.{_name(x.type)}", x.type, x, y, z)


@emits_for(_real, 3)
def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once (twice on processors without such an instruction)."""
    return fused(b, x, y, z)


@emits_for(_real, 2)
def maximum(b: Any, x: Any, y: Any) -> Any:
    """The larger, lane by lane; y where either is not a number."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@emits_for(_real, 2)
def minimum(b: Any, x: Any, y: Any) -> Any:
    """The smaller, lane by lane; y where either is not a number."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@emits_for(_real, 4)
def where_greater(b: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """`yes` where x > y, `no` elsewhere."""
    return b.select(b.fcmp_ordered(">", x, y), yes, no)


@emits_for(_real, 1)
def absolute(b: Any, x: Any) -> Any:
    """|x|."""
    return call(b, f"llvm.fabs.{_name(x.type)}", x.type, x)


@emits_for(_real, 1)
def square_root(b: Any, x: Any) -> Any:
    """The square root, correctly rounded."""
    return call(b, f"llvm.sqrt.{_name(x.type)}", x.type, x)


@emits_for(_real, 1)
def nearest(b: Any, x: Any) -> Any:
    """To the nearest whole number, halves to even; |x| must be under 2^22."""
    magic = _lanes_of(x.type, 12582912.0)
    return b.fsub(b.fadd(x, magic), magic)


@emits_for(_scalar_of, 1)
def sum_lanes(b: Any, x: Any) -> Any:
    """The sum of all lanes, by halves: lane i and lane i + n/2 first."""
    while x.type.count > 1:
        low, high = halves(b, x) if x.type.count > 2 else (shuffle(b, x, [0]), shuffle(b, x, [1]))
        x = b.fadd(low, high)
    return b.extract_element(x, I32(0))


@emits(f64x16)
def zero_f64x16(b: Any) -> Any:
    """Sixteen zeros in double precision."""
    return constant(f64x16, 0.0)


@emits(f64x16, f32x16, f32x16, f64x16)
def add_products(b: Any, x: Any, y: Any, totals: Any) -> Any:
    """`totals` + x · y, multiplied in single and added in double precision."""
    return b.fadd(totals, b.fpext(b.fmul(x, y), f64x16.ir))


@emits_for(_scalar_of, 1)
def max_lanes(b: Any, x: Any) -> Any:
    """The largest of all lanes (no lane may be NaN)."""
    return call(b, f"llvm.vector.reduce.fmax.{_name(x.type)}", x.type.element, x)


@emits_for(_scalar_of, 1)
def min_lanes(b: Any, x: Any) -> Any:
    """The smallest of all lanes (no lane may be NaN)."""
    return call(b, f"llvm.vector.reduce.fmin.{_name(x.type)}", x.type.element, x)


def _to_real(kind: Any) -> Any:
    return signature(Vector("f32", kind.lanes), kind) if isinstance(kind, Vector) and not kind.real else None


def _of_bits(kind: Any) -> Any:
    return signature(Vector("f32", kind.lanes), kind) if isinstance(kind, Vector) and kind.element == "i32" else None


def _to_whole(kind: Any) -> Any:
    return signature(Vector("i32", kind.lanes), kind) if isinstance(kind, Vector) and kind.element == "f32" else None


@emits_for(_to_real, 1)
def to_f32(b: Any, x: Any) -> Any:
    """Signed integers as floats."""
    return b.sitofp(x, ir.VectorType(F32, x.type.count))


@emits_for(_to_whole, 1)
def to_i32(b: Any, x: Any) -> Any:
    """Floats cut to 32-bit integers (towards zero)."""
    return b.fptosi(x, ir.VectorType(I32, x.type.count))


@emits_for(_to_whole, 1)
def bits_i32(b: Any, x: Any) -> Any:
    """The bits of floats as integers."""
    return b.bitcast(x, ir.VectorType(I32, x.type.count))


@emits_for(_of_bits, 1)
def bits_f32(b: Any, x: Any) -> Any:
    """Integers taken as the bits of floats."""
    return b.bitcast(x, ir.VectorType(F32, x.type.count))


@emits(i8x16, i32x16)
def to_i8(b: Any, x: Any) -> Any:
    """The low bytes of 32-bit integers."""
    return b.trunc(x, i8x16.ir)


@emits(f32x16)
def zero_f32x16(b: Any) -> Any:
    """Sixteen zeros."""
    return constant(f32x16, 0.0)


@emits(f32x8)
def zero_f32x8(b: Any) -> Any:
    """Eight zeros."""
    return constant(f32x8, 0.0)


@emits(i32x16)
def zero_i32x16(b: Any) -> Any:
    """Sixteen integer zeros."""
    return constant(i32x16, 0)


# ---- integer dot products: emitters first, so that other emitters can use them


def add_pairs(b: Any, x: Any, y: Any) -> Any:
    """<2n x i16> times <2n x i16>, neighbours added: <n x i32>."""
    n = x.type.count
    if n == 32 and AVX512:
        return call(b, "llvm.x86.avx512.pmaddw.d.512", i32x16.ir, x, y)
    if n == 16 and AVX2:
        return call(b, "llvm.x86.avx2.pmadd.wd", i32x8.ir, x, y)
    if n == 8 and X86:
        return call(b, "llvm.x86.sse2.pmadd.wd", ir.VectorType(I32, 4), x, y)
    if n == 32 and AVX2:
        (xl, xh), (yl, yh) = halves(b, x), halves(b, y)
        return joined(b, add_pairs(b, xl, yl), add_pairs(b, xh, yh))
    wide = ir.VectorType(I32, n)
    product = b.mul(b.sext(x, wide), b.sext(y, wide))
    return b.add(shuffle(b, product, range(0, n, 2)), shuffle(b, product, range(1, n, 2)))


def add_byte_pairs(b: Any, u: Any, s: Any) -> Any:
    """Bytes 0..127 times signed bytes, neighbours added: <n/2 x i16>; the sums must fit 16 bits."""
    n = u.type.count
    if n == 64 and AVX512:
        return call(b, "llvm.x86.avx512.pmaddubs.w.512", i16x32.ir, u, s)
    if n == 32 and AVX2:
        return call(b, "llvm.x86.avx2.pmadd.ub.sw", i16x16.ir, u, s)
    if n == 64 and AVX2:
        (ul, uh), (sl, sh) = halves(b, u), halves(b, s)
        return joined(b, add_byte_pairs(b, ul, sl), add_byte_pairs(b, uh, sh))
    wide = ir.VectorType(I16, n)
    product = b.mul(b.zext(u, wide), b.sext(s, wide))
    return b.add(shuffle(b, product, range(0, n, 2)), shuffle(b, product, range(1, n, 2)))


def dot_pairs(b: Any, total: Any, x: Any, y: Any) -> Any:
    """`total` + `add_pairs(x, y)`; 32 lanes of i16."""
    if VNNI512:
        return verbatim(b, "vpdpwssd $3, $2, $0", "=v,0,v,v", i32x16.ir, total, x, y)
    return b.add(total, add_pairs(b, x, y))


def dot_bytes(b: Any, total: Any, u: Any, s: Any) -> Any:
    """<n/4 x i32> `total` + sums of four products of bytes 0..255 with signed bytes; n is 64."""
    if VNNI512:
        return call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.ir, total, u, s)
    if VNNI256:
        parts = zip(halves(b, total), halves(b, u), halves(b, s), strict=True)
        return joined(b, *(call(b, "llvm.x86.avx512.vpdpbusd.256", i32x8.ir, *part) for part in parts))
    wide = ir.VectorType(I16, 32)
    sums = []
    for unsigned, signed in zip(halves(b, u), halves(b, s), strict=True):
        sums.append(add_pairs(b, b.zext(unsigned, wide), b.sext(signed, wide)))
    both = joined(b, *sums)
    four = b.add(shuffle(b, both, range(0, 32, 2)), shuffle(b, both, range(1, 32, 2)))
    return b.add(total, four)


def dot_bf16(b: Any, total: Any, x: Any, y: Any) -> Any:
    """<16 x f32> `total` + sums of two products of <32 x i16> holding bf16."""
    if DOT_BF16:
        x, y = (b.bitcast(v, bf16x32.ir) for v in (x, y))
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.ir, total, x, y)
    for lanes in (range(0, 32, 2), range(1, 32, 2)):
        total = fused(b, widen_bf16(b, shuffle(b, x, lanes)), widen_bf16(b, shuffle(b, y, lanes)), total)
    return total


# ---- threads


@emits(i64, i64, i64)
def atomic_add(b: Any, a: Any, x: Any) -> Any:
    """Add to the aligned integer at an address, in one step for all threads; the value before."""
    return b.atomic_rmw("add", pointer(b, a, I64), x, "seq_cst")


@emits(i64)
def clock(b: Any) -> Any:
    """The processor's counter of cycles at a constant rate."""
    return call(b, "llvm.readcyclecounter", I64)


@emits(i64, i64)
def atomic_load(b: Any, a: Any) -> Any:
    """Read an aligned integer that other threads write."""
    return b.load_atomic(pointer(b, a, I64), "seq_cst", 8)


@emits(void, i64, i64)
def atomic_store(b: Any, a: Any, x: Any) -> None:
    """Write an aligned integer that other threads read."""
    b.store_atomic(x, pointer(b, a, I64), "seq_cst", 8)


@emits(void)
def pause(b: Any) -> None:
    """Tell the processor that this is a waiting loop."""
    if X86:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())
    elif ARM:
        call(b, "llvm.aarch64.hint", ir.VoidType(), I32(1))
