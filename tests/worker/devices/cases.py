"""The table of device test cases: one operation each on small operands, run alike on every device.

`run(device, case)` fills buffers, compiles and runs the node and reads the result back; `differences` holds it against
what another device found, with the tolerances of one table by operation and type. `CASES` grows by rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from drover.ggml.ops import Glu, Op, RopeMode, SortOrder, Tri, Unary, pack_params
from drover.ggml.rules import check
from drover.ggml.tensor import Shape, contiguous_strides, shape, span
from drover.ggml.types import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    TensorType,
)
from drover.worker.devices.device import Buffer, Device, Node, Operand
from drover.worker.devices.reference.arrays import DTYPES, decode, encode

Array = npt.NDArray[Any]
Values = Callable[[np.random.Generator, tuple[int, ...]], Array]
"""Makes an operand's values, in numpy's order of dimensions."""

LEAD = 64
TAIL = 64
CANARY = 0x5A
"""Bytes around every operand that no kernel may touch."""


# --- values ---------------------------------------------------------------------------------------------------------


def normal(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return rng.standard_normal(size).astype(np.float32)


def positive(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return rng.uniform(0.1, 2, size).astype(np.float32)


def wide(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    return rng.uniform(-12, 12, size).astype(np.float32)


def given(*numbers: float) -> Values:
    """These, one for each element."""
    return lambda rng, size: np.reshape(np.array(numbers, np.float32), size)


def below(limit: int) -> Values:
    """Row numbers, each at most once where there are enough."""

    def values(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
        rows = size[-1]
        pick = [
            rng.permutation(limit)[:rows] if rows <= limit else rng.integers(0, limit, rows)
            for _ in range(_outer(size))
        ]
        return np.array(pick).reshape(size)

    return values


def exactly(*numbers: float) -> Values:
    """These numbers in row-major order."""
    return lambda rng, size: np.array(numbers).reshape(size)


def causal(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    """-inf right of the diagonal that ends in the last row's last cell, and in some cells left of it."""
    cells, rows = size[-1], size[-2]
    hidden = np.arange(cells) > np.arange(rows)[:, None] + max(0, cells - rows)
    hidden = hidden | (rng.random(size) < 0.2)
    hidden[..., 0] = False
    return np.where(hidden, -np.inf, rng.standard_normal(size))


def scattered(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    """All different, far apart: an order without ties."""
    return np.array([rng.permutation(size[-1]) for _ in range(_outer(size))]).reshape(size) - size[-1] / 2


def _outer(size: tuple[int, ...]) -> int:
    return int(np.prod(size[:-1]))


# --- a case ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """An operand to be: `nb` None means no gaps; `shift` bytes lie before its first element."""

    type: TensorType
    ne: Shape
    values: Values = normal
    nb: Shape | None = None
    shift: int = 0

    @property
    def strides(self) -> Shape:
        return self.nb or contiguous_strides(self.type, self.ne)

    @property
    def size(self) -> int:
        return self.shift + span(self.type, self.ne, self.strides)


@dataclass(frozen=True)
class Case:
    """One node; `onto` is the number of the source whose memory the result shares (in place)."""

    name: str
    op: Op
    dst: Spec
    src: tuple[Spec | None, ...]
    params: bytes
    onto: int | None = None

    @property
    def id(self) -> str:
        return f"{self.op.name}-{self.name}"


def tensor(type_: TensorType, *ne: int, values: Values = normal, nb: Shape | None = None, shift: int = 0) -> Spec:
    return Spec(type_, shape(*ne), values, nb, shift)


def permuted(type_: TensorType, *ne: int, axes: tuple[int, ...] = (0, 2, 1, 3), values: Values = normal) -> Spec:
    """An operand whose dimensions lie in memory in the order of `axes` (fastest first)."""
    extents, nb, stride = shape(*ne), [0, 0, 0, 0], type_.type_size
    for axis in axes:
        nb[axis] = stride
        stride *= extents[axis] // (type_.block_size if axis == 0 else 1)
    return Spec(type_, extents, values, (nb[0], nb[1], nb[2], nb[3]))


def gapped(type_: TensorType, *ne: int, values: Values = normal) -> Spec:
    """A window of a larger tensor: rows, matrices and batches have gaps behind them, and something lies before it."""
    extents = shape(*ne)
    nb1 = type_.row_bytes(extents[0]) + 2 * type_.type_size
    nb2 = nb1 * (extents[1] + 1)
    return Spec(type_, extents, values, (type_.type_size, nb1, nb2, nb2 * (extents[2] + 1)), 3 * type_.type_size)


def spaced(type_: TensorType, *ne: int, values: Values = normal) -> Spec:
    """A slice of longer rows, as a fused projection leaves it: gaps behind the rows only."""
    extents = shape(*ne)
    nb1 = type_.row_bytes(extents[0]) + 6 * type_.type_size
    return Spec(type_, extents, values, (type_.type_size, nb1, nb1 * extents[1], nb1 * extents[1] * extents[2]))


# --- running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: the result's values, and the bytes of its buffer outside of it."""

    values: Array
    around: bytes


@dataclass(frozen=True)
class Placed:
    """A case in a device's memory."""

    node: Node
    buffers: tuple[Buffer, ...]


def run(device: Device, case: Case) -> Outcome:
    """Place the case, compile it, run it (twice, unless it is in place: programs are repeatable), read the result."""
    placed = place(device, case)
    try:
        program = device.compile([placed.node])
        device.run(program)
        if case.onto is None:
            device.run(program)
        return result(device, placed.node.dst)
    finally:
        for buffer in placed.buffers:
            device.free(buffer)


def place(device: Device, case: Case) -> Placed:
    """Allocate and fill every operand; same bytes for the same case on every device."""
    rng = np.random.default_rng(crc32(case.id.encode()))
    buffers: list[Buffer] = []
    sources: list[Operand | None] = []
    for spec in case.src:
        if spec is None:
            sources.append(None)
            continue
        buffer, operand = _operand(device, spec, rng)
        buffers.append(buffer)
        sources.append(operand)
    if case.onto is None:
        buffer, dst = _operand(device, case.dst, rng)
        buffers.append(buffer)
    else:
        under = sources[case.onto]
        assert under is not None
        dst = Operand(case.dst.type, case.dst.ne, case.dst.strides, under.buffer, under.offset)
    node = Node(case.op, case.params, dst, tuple(sources), case.name)
    check(node.op, node.params, node.dst, node.src)
    return Placed(node, tuple(buffers))


def result(device: Device, operand: Operand) -> Outcome:
    """The values of an operand, and all other bytes of its buffer."""
    raw = bytearray(operand.buffer.size)
    device.read(operand.buffer, 0, memoryview(raw))
    memory = np.frombuffer(raw, np.uint8).copy()
    elements = _elements(memory, operand.type, operand.ne, operand.nb, operand.offset)
    values = decode(operand.type, elements)
    elements[...] = 0
    return Outcome(values, memory.tobytes())


def _operand(device: Device, spec: Spec, rng: np.random.Generator) -> tuple[Buffer, Operand]:
    size = LEAD + spec.size + TAIL
    image = np.full(size, CANARY, np.uint8)
    elements = _elements(image, spec.type, spec.ne, spec.strides, LEAD + spec.shift)
    elements[...] = stored(spec.type, spec.values, rng, spec.ne[::-1]).reshape(elements.shape)
    buffer = device.alloc(size)
    device.write(buffer, 0, image.data)
    return buffer, Operand(spec.type, spec.ne, spec.strides, buffer, LEAD + spec.shift)


def _elements(memory: Array, type_: TensorType, ne: Shape, nb: Shape, offset: int) -> Array:
    outer, strides = (ne[3], ne[2], ne[1]), (nb[3], nb[2], nb[1])
    if 0 in ne:
        offset = 0
    if type_.quantized:
        dims = (*outer, ne[0] // type_.block_size, type_.type_size)
        return np.ndarray(dims, np.uint8, memory.data, offset, (*strides, nb[0], 1))
    return np.ndarray((*outer, ne[0]), DTYPES[type_], memory.data, offset, (*strides, nb[0]))


SCALES: dict[TensorType, tuple[int, ...]] = {
    Q4_0: (0,),
    Q4_1: (0, 2),
    Q5_0: (0,),
    Q5_1: (0, 2),
    Q8_0: (0,),
    Q2_K: (80, 82),
    Q3_K: (108,),
    Q4_K: (0, 2),
    Q5_K: (0, 2),
    Q6_K: (208,),
    **dict.fromkeys((IQ1_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S), (0,)),
    IQ4_NL: (0,),
    IQ4_XS: (0,),
    TQ1_0: (52,),
    TQ2_0: (64,),
    Q1_0: (0,),
    Q2_0: (0,),
}
"""Where the f16 scales of a block stand; all other bytes may be anything."""


def stored(type_: TensorType, values: Values, rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    """Elements as they lie in memory; blocks of quantised types are random bytes under sensible scales."""
    with np.errstate(all="ignore"):
        if not type_.quantized:
            return encode(type_, values(rng, size))
    blocks = rng.integers(0, 256, (*size[:-1], size[-1] // type_.block_size, type_.type_size), np.uint8)
    for at in SCALES.get(type_, ()):
        scale = rng.uniform(-0.02, 0.02, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scale.view(np.uint8)
    if type_ == IQ1_M:  # its scale is the upper four bits of four words
        scale = rng.uniform(-0.02, 0.02, blocks.shape[:-1]).astype(np.float16).view(np.uint16)
        for word in range(4):
            high = blocks[..., 49 + 2 * word]
            high[...] = high & 15 | (scale >> 4 * word & 15) << 4
    if type_ == MXFP4:
        blocks[..., 0] = rng.integers(120, 130, blocks.shape[:-1])
    if type_ == NVFP4:
        blocks[..., :4] = rng.integers(0, 0x60, (*blocks.shape[:-1], 4))
    return blocks


# --- comparing ------------------------------------------------------------------------------------------------------

EXACT = 0.0
DEFAULT_TOLERANCE = 1e-5
TOLERANCES: dict[Op | tuple[Op, TensorType], float] = {
    **dict.fromkeys((Op.DUP, Op.CPY, Op.CONT, Op.CONCAT, Op.REPEAT, Op.GET_ROWS, Op.SET_ROWS, Op.FILL, Op.TRI), EXACT),
    **dict.fromkeys((Op.ARGSORT, Op.TOP_K, Op.ARGMAX, Op.COUNT_EQUAL, Op.PAD, Op.ROLL, Op.CLAMP), EXACT),
    # a device may round the operands of a product, as the stock worker does: to F16, BF16, or whole blocks to Q8
    **{(op, F16): 1e-3 for op in (Op.MUL_MAT, Op.MUL_MAT_ID)},
    **{(op, BF16): 5e-3 for op in (Op.MUL_MAT, Op.MUL_MAT_ID)},
    Op.FLASH_ATTN_EXT: 2e-3,
    (Op.FLASH_ATTN_EXT, F16): 6e-3,  # up to 1,500 cells summed in half precision, as the stock worker does
    Op.UNARY: 1e-4,
    Op.GLU: 1e-4,
    Op.ROPE: 1e-4,
    Op.ROPE_BACK: 1e-4,
}
QUANTIZED_TOLERANCE: dict[Op, float] = {
    Op.MUL_MAT: 1.5e-2,
    Op.MUL_MAT_ID: 1.5e-2,
    Op.FLASH_ATTN_EXT: 1e-2,
    Op.GET_ROWS: 1e-6,
}
STORED_TOLERANCE: dict[TensorType, float] = {F16: 3e-4, BF16: 3e-4}
"""Least tolerance where the result is kept in this type."""
LOOKED_UP: dict[str, float] = {
    **dict.fromkeys(("GELU-F", "GELU_QUICK", "GEGLU-F", "GEGLU_QUICK"), 5e-4),
    **dict.fromkeys(("CONV_2D-", "CONV_3D-", "CONV_TRANSPOSE_2D"), 1e-3),
}
"""By a part of a case's name: how far the stock worker is from the formula, where it looks up or rounds to F16."""
SUITE_TOLERANCE = 1e-7**0.5
SUITE_TOLERANCES: dict[Op, float] = dict.fromkeys(
    (Op.MUL_MAT, Op.MUL_MAT_ID, Op.OUT_PROD, Op.FLASH_ATTN_EXT, Op.CONV_2D, Op.CONV_3D, Op.CONV_TRANSPOSE_2D), 5e-4**0.5
)
"""What llama.cpp's own suite allows between two devices (root of its normalised square error): no less than ours."""


def tolerance(case: Case) -> float:
    """The largest root-mean-square difference allowed, relative to the root mean square of the expected values."""
    first = case.src[1] if case.op == Op.FLASH_ATTN_EXT else case.src[0] if case.src else None
    kind = first.type if first is not None else F32
    if kind.quantized and case.op in QUANTIZED_TOLERANCE:
        return QUANTIZED_TOLERANCE[case.op]
    found = TOLERANCES.get((case.op, kind), TOLERANCES.get(case.op, DEFAULT_TOLERANCE))
    return max(found, STORED_TOLERANCE.get(case.dst.type, 0)) if found > EXACT else found


def differences(case: Case, got: Outcome, expected: Outcome, allowed: float | None = None) -> str | None:
    """What is wrong with an outcome, or None; `allowed` replaces the table's tolerance."""
    if got.around != expected.around:
        return "bytes outside the result were changed"
    a, b = canonical(case, got.values), canonical(case, expected.values)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return "infinities or NaNs are in different places"
    a, b = a[finite].astype(np.float64), b[finite].astype(np.float64)
    if a.size == 0:
        return None
    allowed = tolerance(case) if allowed is None else allowed
    error, size = float(np.sqrt(np.mean((a - b) ** 2))), float(np.sqrt(np.mean(b**2)))
    if error <= allowed * (size or 1.0):
        return None
    worst = int(np.argmax(np.abs(a - b)))
    return f"error {error:.3g} of {size:.3g} (allowed {allowed:.3g}); element {worst}: {a[worst]} not {b[worst]}"


def canonical(case: Case, values: Array) -> Array:
    """Values without what an operation leaves open: the order of TOP_K."""
    return np.sort(values, axis=-1) if case.op == Op.TOP_K else values


# --- the table ------------------------------------------------------------------------------------------------------


def case(
    name: str,
    op: Op,
    dst: Spec,
    *src: Spec | None,
    ints: dict[int, int] | None = None,
    floats: dict[int, float] | None = None,
    onto: int | None = None,
) -> Case:
    return Case(name, op, dst, src, pack_params(ints, floats), onto)


WEIGHTS: tuple[TensorType, ...] = (
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
)
GRIDS: tuple[TensorType, ...] = (IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S)
"""Weights that nobody writes: that takes a search with knowledge of what matters."""
CACHE = (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1)


def products() -> Iterator[Case]:
    for kind in WEIGHTS:
        for n, m in ((7, 1), (16, 5), (33, 40)):
            a, b = tensor(kind, 512, n), tensor(F32, 512, m)
            yield case(f"{kind.name}-{n}x{m}", Op.MUL_MAT, tensor(F32, n, m), a, b)
        experts, ids = tensor(kind, 256, 9, 4), gapped(I32, 2, 6, values=below(4))
        yield case(f"{kind.name}-shared", Op.MUL_MAT_ID, tensor(F32, 9, 2, 6), experts, tensor(F32, 256, 1, 6), ids)
    for kind in (F32, F16, BF16, Q8_0, Q4_0):
        k, q = permuted(kind, 64, 20, 2), permuted(F32, 64, 3, 6)
        yield case(f"{kind.name}-grouped-permuted", Op.MUL_MAT, tensor(F32, 20, 3, 6), k, q)
    yield case("streams", Op.MUL_MAT, tensor(F32, 5, 4, 6, 4), tensor(F16, 32, 5, 3, 2), tensor(F32, 32, 4, 6, 4))
    yield case("odd-inner", Op.MUL_MAT, tensor(F32, 3, 2), tensor(F32, 37, 3), tensor(F32, 37, 2))
    yield case("odd-inner-half", Op.MUL_MAT, tensor(F32, 3, 2), tensor(F16, 37, 3), tensor(F32, 37, 2))
    yield case("half-by-half", Op.MUL_MAT, tensor(F32, 9, 8), tensor(F16, 64, 9), tensor(F16, 64, 8))
    yield case("gaps", Op.MUL_MAT, tensor(F32, 9, 8, 2), gapped(F32, 64, 9, 2), gapped(F32, 64, 8, 2))
    yield case("gaps-quantised", Op.MUL_MAT, tensor(F32, 9, 8), gapped(Q4_K, 256, 9), gapped(F32, 256, 8))
    yield case("one-column", Op.MUL_MAT, tensor(F32, 5, 3), tensor(F32, 1, 5), tensor(F32, 1, 3))
    yield case("nothing-inside", Op.MUL_MAT, tensor(F32, 5, 3), tensor(F32, 0, 5), tensor(F32, 0, 3))
    ids = tensor(I32, 3, 5, values=below(6))
    yield case("own-rows", Op.MUL_MAT_ID, tensor(F32, 8, 3, 5), tensor(Q8_0, 64, 8, 6), tensor(F32, 64, 3, 5), ids)
    yield case("basic", Op.OUT_PROD, tensor(F32, 7, 5, 4), tensor(F32, 7, 6, 2), tensor(F32, 5, 6, 4))
    lower = tensor(F32, 6, 6, 2, values=lambda rng, size: normal(rng, size) / 4 + 3 * np.eye(6))
    yield case("basic", Op.SOLVE_TRI, tensor(F32, 5, 6, 2), lower, tensor(F32, 5, 6, 2))


def rows() -> Iterator[Case]:
    for kind in WEIGHTS:
        dst, a, ids = tensor(F32, 256, 4), tensor(kind, 256, 10), tensor(I32, 4, values=below(10))
        yield case(f"{kind.name}", Op.GET_ROWS, dst, a, ids)
    dst, a, ids = tensor(F32, 16, 3, 2, 2), gapped(F16, 16, 9, 2, 2), gapped(I32, 3, 2, 2, values=below(9))
    yield case("batched-gaps", Op.GET_ROWS, dst, a, ids)
    dst, a, ids = tensor(I32, 5, 3), tensor(I32, 5, 9, values=below(100)), tensor(I32, 3, values=below(9))
    yield case("integers", Op.GET_ROWS, dst, a, ids)
    for kind in CACHE:
        for index in (I32, I64):
            ids, dst = tensor(index, 3, values=below(9)), tensor(kind, 64, 9)
            yield case(f"{kind.name}-{index.name}", Op.SET_ROWS, dst, tensor(F32, 64, 3), ids, dst, onto=2)
        dst = gapped(kind, 32, 9, 4, 2)
        ids = tensor(I64, 3, 2, values=below(9))
        yield case(f"{kind.name}-repeated", Op.SET_ROWS, dst, gapped(F32, 32, 3, 4, 2), ids, dst, onto=2)
    dst, ids = tensor(F16, 1, 40), tensor(I64, 24, values=below(40))
    yield case("single-elements", Op.SET_ROWS, dst, permuted(F32, 1, 24, axes=(1, 0, 2, 3)), ids, dst, onto=2)
    dst, ids = tensor(F32, 8, 5), tensor(I64, 2, values=below(5))
    yield case("half-rows", Op.SET_ROWS, dst, tensor(F16, 8, 2), ids, dst, onto=2)
    yield case("no-rows", Op.SET_ROWS, dst, tensor(F32, 8, 0), tensor(I64, 0, values=below(5)), dst, onto=2)


def cpy(name: str, dst: Spec, source: Spec) -> Case:
    """A copy as clients send it: the destination is src1, and the node's own data its memory."""
    return case(name, Op.CPY, dst, source, dst, onto=1)


def copies() -> Iterator[Case]:
    floats = (F32, F16, BF16)
    for a in floats:
        for b in floats:
            yield cpy(f"{a.name}-{b.name}", tensor(b, 12, 5, 3), permuted(a, 12, 5, 3))
            yield case(f"{a.name}-{b.name}", Op.DUP, tensor(b, 12, 5, 3), gapped(a, 12, 5, 3))
        yield case(f"{a.name}-transposed", Op.CONT, tensor(a, 7, 9, 3), permuted(a, 7, 9, 3, axes=(1, 0, 2, 3)))
        yield case(f"{a.name}-reshaped", Op.CONT, tensor(a, 21, 9), permuted(a, 7, 9, 3))
        yield cpy(f"{a.name}-scattered", permuted(a, 12, 5, 3, axes=(2, 1, 0, 3)), tensor(a, 60, 3))
    for kind in WEIGHTS[3:]:
        yield cpy(f"F32-{kind.name}", tensor(kind, 256, 3, 2), permuted(F32, 256, 3, 2))
        yield cpy(f"F16-{kind.name}", tensor(kind, 256, 3), tensor(F16, 256, 3))
        dst = gapped(kind, 256, 5)
        ids = tensor(I64, 3, values=below(5))
        yield case(f"{kind.name}-wide", Op.SET_ROWS, dst, tensor(F32, 256, 3), ids, dst, onto=2)
    for kind in CACHE[3:]:
        yield cpy(f"{kind.name}-F32", tensor(F32, 64, 3, 2), tensor(kind, 64, 3, 2))
        yield cpy(f"{kind.name}-same", gapped(kind, 64, 3, 2), permuted(kind, 64, 3, 2))
        yield cpy(f"zeros-{kind.name}", tensor(kind, 64), tensor(F32, 64, values=lambda rng, size: np.zeros(size)))
    yield cpy("to-integers", tensor(I32, 20), tensor(F32, 20, values=wide))
    yield cpy("from-integers", tensor(F32, 20), tensor(I32, 20, values=below(1000)))
    yield case("integers", Op.CONT, tensor(I32, 4, 5), permuted(I32, 4, 5, axes=(1, 0, 2, 3), values=below(99)))
    for axis in range(4):
        ne = [4, 3, 2, 2]
        other, joined = ne.copy(), ne.copy()
        other[axis], joined[axis] = 3, ne[axis] + 3
        yield case(
            f"axis-{axis}", Op.CONCAT, tensor(F32, *joined), gapped(F32, *ne), permuted(F32, *other), ints={0: axis}
        )
    yield case("half", Op.CONCAT, tensor(F16, 8, 5), tensor(F16, 8, 2), tensor(F16, 8, 3), ints={0: 1})
    yield case("tiles", Op.REPEAT, tensor(F32, 6, 4, 2, 3), permuted(F32, 3, 2, 1, 3))
    yield case("integers", Op.REPEAT, tensor(I32, 6, 4), tensor(I32, 3, 1, values=below(50)))
    yield case("tiles", Op.REPEAT_BACK, tensor(F32, 3, 2, 1, 3), tensor(F32, 6, 4, 2, 3))
    yield case("zeros", Op.PAD, tensor(F32, 9, 4, 3), gapped(F32, 5, 3, 2), ints={0: 1, 1: 3, 3: 1, 4: 1})
    yield case("around", Op.PAD, tensor(F32, 9, 4), tensor(F32, 5, 3), ints={0: 1, 1: 3, 3: 1, 8: 1})
    yield case("basic", Op.PAD_REFLECT_1D, tensor(F32, 10, 3), tensor(F32, 5, 3), ints={0: 2, 1: 3})
    yield case("basic", Op.ROLL, tensor(F32, 5, 4, 3), tensor(F32, 5, 4, 3), ints={0: 2, 1: -1, 2: 2})
    window = {0: 48, 1: 240, 2: 720, 3: 56}
    yield case("window", Op.SET, tensor(F32, 12, 5, 3), tensor(F32, 12, 5, 3), tensor(F32, 4, 2, 2), ints=window)
    yield case("window", Op.ACC, tensor(F32, 12, 5, 3), tensor(F32, 12, 5, 3), tensor(F32, 4, 2, 2), ints=window)
    yield case("ramp", Op.ARANGE, tensor(F32, 10), floats={0: 1, 1: 6, 2: 0.5})
    for kind in (F32, F16):
        x = tensor(kind, 5, 4)
        yield case(kind.name, Op.FILL, x, x, floats={0: -1.5}, onto=0)
    x = tensor(F32, 5, 4)
    yield case("minus-infinity", Op.FILL, x, x, floats={0: float("-inf")})
    for part in Tri:
        yield case(part.name, Op.TRI, tensor(F32, 5, 5, 2), tensor(F32, 5, 5, 2), ints={0: part})
    yield case("basic", Op.DIAG, tensor(F32, 5, 5, 2), tensor(F32, 5, 1, 2))
    yield case("basic", Op.DIAG_MASK_INF, tensor(F32, 7, 4, 2), tensor(F32, 7, 4, 2), ints={0: 2})
    yield case("basic", Op.DIAG_MASK_ZERO, tensor(F32, 7, 4, 2), tensor(F32, 7, 4, 2), ints={0: 2})
    yield case("basic", Op.GET_REL_POS, tensor(F16, 6, 4, 4), tensor(F16, 6, 7))


def arithmetic() -> Iterator[Case]:
    for op in (Op.ADD, Op.SUB, Op.MUL, Op.DIV):
        a, b = tensor(F32, 48, 6, 4), tensor(F32, 48, 6, 4, values=positive)
        yield case("same", op, a, a, b)
        yield case("row", op, a, a, tensor(F32, 48, values=positive))
        yield case("tiles", op, a, permuted(F32, 48, 6, 4), tensor(F32, 8, 3, 2, values=positive))
        yield case("scalar", op, a, a, tensor(F32, 1, values=positive))
        yield case("column", op, a, a, tensor(F32, 1, 6, 4, values=positive))
        yield case("gaps", op, gapped(F32, 48, 6, 4), gapped(F32, 48, 6, 4), permuted(F32, 48, 6, 4, values=positive))
        yield case("onto-first", op, a, a, tensor(F32, 48, 1, 4, values=positive), onto=0)
        yield case("onto-second", op, a, a, b, onto=1)
        yield case("half", op, tensor(F16, 48, 6), tensor(F16, 48, 6), tensor(F16, 48, values=positive))
        yield case("half-single", op, tensor(F16, 48, 6), tensor(F16, 48, 6), tensor(F32, 48, values=positive))
    yield case("bf16", Op.ADD, tensor(BF16, 48, 6), tensor(BF16, 48, 6), tensor(BF16, 48))
    ids = tensor(I32, 3, 5, values=below(7))
    yield case("basic", Op.ADD_ID, tensor(F32, 20, 3, 5), tensor(F32, 20, 3, 5), tensor(F32, 20, 7), ids)
    yield case("onto", Op.ADD_ID, tensor(F32, 20, 3, 5), tensor(F32, 20, 3, 5), tensor(F32, 20, 7), ids, onto=0)
    yield case("basic", Op.ADD1, tensor(F32, 20, 3), tensor(F32, 20, 3), tensor(F32, 1))
    for kind in (F32, F16):
        for op in (Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS):
            yield case(kind.name, op, tensor(kind, 33, 5), tensor(kind, 33, 5, values=positive))
        for function in Unary:
            numbers = {1: 0.7, 2: 0.3, 3: 0.5, 4: -1e-6} if function == Unary.XIELU else None
            x = tensor(kind, 37, 5, values=wide)
            name = f"{function.name}-{kind.name}"
            yield case(name, Op.UNARY, tensor(kind, 37, 5), x, ints={0: function}, floats=numbers)
        for gate in Glu:
            limits, x = {2: 1.7, 3: 2.0}, spaced(kind, 40, 5, 2)
            name, half = f"{gate.name}-{kind.name}", tensor(kind, 20, 5, 2)
            yield case(
                f"{name}-two", Op.GLU, tensor(kind, 40, 5, 2), x, tensor(kind, 40, 5, 2), ints={0: gate}, floats=limits
            )
            yield case(f"{name}-one", Op.GLU, half, x, ints={0: gate}, floats=limits)
            yield case(f"{name}-swapped", Op.GLU, half, x, ints={0: gate, 1: 1}, floats=limits)
    gaps = gapped(F32, 37, 5, 3)
    yield case("odd-row", Op.GLU, tensor(F32, 2, 7), tensor(F32, 5, 7), ints={0: Glu.SWIGLU})
    yield case("SILU-gaps", Op.UNARY, gaps, gaps, ints={0: Unary.SILU})
    yield case("SILU-onto", Op.UNARY, gaps, gaps, ints={0: Unary.SILU}, onto=0)
    yield case("basic", Op.SCALE, tensor(F32, 37, 5), tensor(F32, 37, 5), floats={0: 0.3, 1: -1})
    yield case("onto", Op.SCALE, tensor(F32, 37, 5), tensor(F32, 37, 5), floats={0: 0.3}, onto=0)
    yield case("basic", Op.CLAMP, tensor(F32, 37, 5), tensor(F32, 37, 5), floats={0: -0.5, 1: 0.5})
    yield case("open", Op.CLAMP, tensor(F32, 37, 5), tensor(F32, 37, 5), floats={0: 0.1, 1: float("inf")})
    yield case("basic", Op.LEAKY_RELU, tensor(F32, 37, 5), tensor(F32, 37, 5), floats={0: 0.1})


def reductions() -> Iterator[Case]:
    for op in (Op.NORM, Op.RMS_NORM, Op.L2_NORM):
        for n in (1, 33, 64, 300):
            yield case(f"{n}", op, tensor(F32, n, 5, 2), gapped(F32, n, 5, 2), floats={0: 1e-5})
        yield case("permuted", op, tensor(F32, 64, 5, 3), permuted(F32, 64, 5, 3), floats={0: 1e-6})
        yield case("onto", op, tensor(F32, 64, 5), tensor(F32, 64, 5), floats={0: 1e-6}, onto=0)
    yield case("uneven", Op.GROUP_NORM, tensor(F32, 4, 3, 7, 2), tensor(F32, 4, 3, 7, 2), ints={0: 3}, floats={1: 1e-6})
    yield case("all", Op.SUM, tensor(F32, 1), gapped(F32, 33, 4, 3))
    for op in (Op.SUM_ROWS, Op.MEAN):
        yield case("rows", op, tensor(F32, 1, 5, 3), permuted(F32, 33, 5, 3))
    yield case("rows", Op.CUMSUM, tensor(F32, 33, 5), gapped(F32, 33, 5))
    yield case("rows", Op.ARGMAX, tensor(I32, 5), gapped(F32, 70, 5, values=scattered))
    for order in SortOrder:
        for n in (1, 8, 60, 257):
            x = gapped(F32, n, 4, values=scattered)
            yield case(f"{order.name}-{n}", Op.ARGSORT, tensor(I32, n, 4), x, ints={0: order})
    yield case("some", Op.TOP_K, tensor(I32, 7, 4), tensor(F32, 60, 4, values=scattered))
    same = tensor(I32, 30, values=lambda rng, size: rng.integers(0, 3, size))
    yield case("some", Op.COUNT_EQUAL, tensor(I64, 1), same, same)
    shares = tensor(F32, 20, 6, values=positive)
    yield case("basic", Op.CROSS_ENTROPY_LOSS, tensor(F32, 1), tensor(F32, 20, 6), shares)


def attention() -> Iterator[Case]:
    x = tensor(F32, 70, 5, 6, 2)
    yield case("plain", Op.SOFT_MAX, x, x, floats={0: 0.25})
    yield case("onto", Op.SOFT_MAX, x, x, tensor(F32, 70, 5, values=causal), floats={0: 0.25}, onto=0)
    for kind in (F32, F16):
        mask, sinks = tensor(kind, 70, 8, 2, 1, values=causal), tensor(F32, 6)
        yield case(f"mask-{kind.name}", Op.SOFT_MAX, x, x, mask, floats={0: 0.25})
        yield case(f"bias-{kind.name}", Op.SOFT_MAX, x, x, mask, floats={0: 0.25, 1: 8.0})
        yield case(f"sinks-{kind.name}", Op.SOFT_MAX, x, x, mask, sinks, floats={0: 0.25})
    for kind in CACHE:
        for n in (1, 7):
            q, k, v = permuted(F32, 64, n, 6), permuted(kind, 64, 70, 2), permuted(kind, 32, 70, 2)
            mask = tensor(F16, 70, n, values=causal)
            yield case(f"{kind.name}-{n}", Op.FLASH_ATTN_EXT, tensor(F32, 32, 6, n), q, k, v, mask, floats={0: 0.125})
    q, k, v = tensor(F32, 64, 3, 4, 2), tensor(F16, 64, 40, 2, 2), tensor(F16, 64, 40, 2, 2)
    dst, mask, sinks = tensor(F32, 64, 4, 3, 2), tensor(F16, 40, 5, 1, 2, values=causal), tensor(F32, 4)
    yield case("no-mask", Op.FLASH_ATTN_EXT, dst, q, k, v, floats={0: 0.125})
    yield case("bias", Op.FLASH_ATTN_EXT, dst, q, k, v, mask, floats={0: 0.125, 1: 8})
    yield case("cap", Op.FLASH_ATTN_EXT, dst, q, k, v, mask, floats={0: 0.125, 2: 5})
    yield case("sinks", Op.FLASH_ATTN_EXT, dst, q, k, v, mask, sinks, floats={0: 0.125})
    nothing = tensor(F16, 40, 3, 1, 2, values=lambda rng, size: np.full(size, -np.inf))
    yield case("all-masked", Op.FLASH_ATTN_EXT, dst, q, k, v, nothing, floats={0: 0.125})
    half = tensor(F16, 40, 3, 1, 2, values=lambda rng, size: np.where(np.arange(40) < 20, 0, -np.inf) + np.zeros(size))
    poison = tensor(F16, 64, 40, 2, 2, values=lambda rng, size: normal(rng, size) + _after(20, 40)[:, None])
    yield case("garbage-behind-mask", Op.FLASH_ATTN_EXT, dst, q, poison, poison, half, floats={0: 0.125})


def _after(first: int, count: int) -> Array:
    """Zeros, then NaN from `first` on."""
    return np.where(np.arange(count) < first, 0, np.nan)


def ropes() -> Iterator[Case]:
    x, base = tensor(F32, 64, 3, 5), {5: 10000.0, 6: 1.0, 8: 1.0, 9: 32.0, 10: 1.0}
    one = tensor(I32, 5, values=exactly(0, 1, 7, 100, 4000))
    four = tensor(I32, 20, values=below(300))
    scaled = base | {6: 0.25, 7: 1.0}
    factors = tensor(F32, 32, values=positive)
    for op in (Op.ROPE, Op.ROPE_BACK):
        for mode in RopeMode:
            positions = four if mode & 8 else one
            dims = 32 if mode == RopeMode.VISION else 64
            ints = {1: dims, 2: mode, 4: 4096, 11: 8, 12: 12, 13: 10, 14: 2}
            yield case(f"{mode.name}", op, x, x, positions, ints=ints, floats=base)
            yield case(f"{mode.name}-factors", op, x, x, positions, factors, ints=ints, floats=base)
            yield case(f"{mode.name}-yarn", op, x, x, positions, ints=ints, floats=scaled)
            bare = ints | {4: 0}
            yield case(f"{mode.name}-yarn-no-context", op, x, x, positions, ints=bare, floats=scaled | {7: 0.7})
    for mode in (RopeMode.NORMAL, RopeMode.NEOX):
        ints = {1: 32, 2: mode, 4: 4096}
        yield case(f"{mode.name}-part", Op.ROPE, x, gapped(F32, 64, 3, 5), one, ints=ints, floats=base)
        yield case(f"{mode.name}-shifted", Op.ROPE, x, x, one, ints=ints | {15: 16}, floats=base)
        yield case(f"{mode.name}-onto", Op.ROPE, x, x, one, ints=ints, floats=base, onto=0)
        half = tensor(F16, 64, 3, 5)
        yield case(f"{mode.name}-half", Op.ROPE, half, half, one, ints=ints, floats=base)


def grids() -> Iterator[Case]:
    for kind in GRIDS:
        a, b, name = tensor(kind, 512, 7), tensor(F32, 512, 5), kind.name
        yield case(name, Op.MUL_MAT, tensor(F32, 7, 5), a, b)
        yield case(name, Op.OUT_PROD, tensor(F32, 512, 5), a, permuted(F32, 5, 7, axes=(1, 0, 2, 3)))
        experts, ids = tensor(kind, 256, 9, 4), gapped(I32, 2, 6, values=below(4))
        yield case(name, Op.MUL_MAT_ID, tensor(F32, 9, 2, 6), experts, tensor(F32, 256, 1, 6), ids)
        yield case(name, Op.GET_ROWS, tensor(F32, 512, 4), a, tensor(I32, 4, values=below(7)))
        yield cpy(f"{name}-F32", tensor(F32, 512, 7), a)


def recurrent() -> Iterator[Case]:
    yield case("basic", Op.SSM_CONV, tensor(F32, 6, 5, 2), tensor(F32, 8, 6, 2), tensor(F32, 4, 6))
    n, d, h, t, s = 8, 4, 6, 5, 2
    for name, decay in (("mamba-1", n), ("mamba-2", 1)):
        src = (
            tensor(F32, n, d, h, 3),
            tensor(F32, d, h, t, s),
            tensor(F32, h, t, s),
            tensor(F32, decay, h, values=lambda rng, size: -positive(rng, size)),
            tensor(F32, n, 2, t, s),
            tensor(F32, n, 2, t, s),
            tensor(I32, s, values=exactly(2, 0)),
        )
        for blocks in (1, 2) if decay == 1 else (1,):
            dst = tensor(F32, d * h * t * s + blocks * n * d * h * s)
            yield case(f"{name}-{blocks}", Op.SSM_SCAN, dst, *src, ints={0: blocks})
    small = lambda rng, size: normal(rng, size) / 4  # noqa: E731
    for name, gate, heads in (("head-gate", 1, 4), ("channel-gate", 8, 2)):
        src = (
            tensor(F32, 8, heads, 5, 2, values=small),
            tensor(F32, 8, heads, 5, 2, values=small),
            tensor(F32, 8, 4, 5, 2),
            tensor(F32, gate, 4, 5, 2, values=lambda rng, size: -positive(rng, size)),
            tensor(F32, 1, 4, 5, 2, values=positive),
            tensor(F32, 8, 8, 4, 2),
        )
        for kept in (1, 3):
            yield case(f"{name}-{kept}", Op.GATED_DELTA_NET, tensor(F32, 32, 10 + kept * 16), *src, ints={0: kept})
    x, u, state, dst = (
        tensor(F32, 8, 2, 6, values=small),
        tensor(F32, 8, 2),
        tensor(F32, 128, 3),
        tensor(F32, 16, 6 + 24),
    )
    yield case("basic", Op.RWKV_WKV6, dst, x, x, x, u, x, state)
    yield case("basic", Op.GATED_LINEAR_ATTN, dst, x, x, x, x, state, floats={0: 0.5})
    x, state, dst = tensor(F32, 64, 2, 4, values=small), tensor(F32, 8192, 2), tensor(F32, 128, 4 + 128)
    yield case("basic", Op.RWKV_WKV7, dst, x, x, x, x, x, x, state)
    q, k, w = tensor(F32, 16, 3, 4, 2), tensor(F16, 16, 1, 9, 2), tensor(F32, 3, 4, 1, 2)
    mask = tensor(F16, 9, 4, 1, 2, values=causal)
    yield case("basic", Op.LIGHTNING_INDEXER, tensor(F32, 9, 4, 1, 2), q, k, w, mask)
    shared = tensor(F16, 9, 4, values=causal)
    yield case("one-mask", Op.LIGHTNING_INDEXER, tensor(F32, 9, 4, 1, 2), q, k, w, shared)
    x, dst = tensor(F32, 12, 4, 5), tensor(F32, 12, 5)
    yield case("plain", Op.DSV4_HC_PRE, dst, x, tensor(F32, 4, 5), floats={0: 1.5})
    yield case("sigmoid", Op.DSV4_HC_PRE, dst, x, tensor(F32, 12, 4, 5), ints={1: 1}, floats={0: 1.5})
    yield case("comb", Op.DSV4_HC_POST, x, dst, x, tensor(F32, 4, 5), tensor(F32, 4, 4, 5))
    yield case("plain", Op.DSV4_HC_POST, x, dst, x, tensor(F32, 4, 5))
    mix = (tensor(F32, 24, 5), tensor(F32, 3), tensor(F32, 24))
    yield case("basic", Op.DSV4_HC_COMB, tensor(F32, 4, 4, 5), *mix, ints={1: 3}, floats={0: 1e-3})


def images() -> Iterator[Case]:
    image, kernel = tensor(F32, 9, 8, 3, 2), tensor(F16, 3, 2, 3, 4)
    flat = {0: 2, 1: 1, 2: 1, 3: 2, 4: 2, 5: 1}
    yield case("flat", Op.IM2COL, tensor(F32, 18, 4, 11, 2), kernel, image, ints=flat | {6: 1})
    yield case("flat-half", Op.IM2COL, tensor(F16, 18, 4, 11, 2), kernel, image, ints=flat | {6: 1})
    volume, cube = tensor(F32, 6, 5, 4, 6), tensor(F16, 3, 2, 2, 12)
    deep = {0: 2, 1: 1, 2: 1, 3: 1, 4: 0, 5: 1, 6: 1, 7: 2, 8: 1}
    yield case("deep", Op.IM2COL_3D, tensor(F32, 36, 3, 3, 10), cube, volume, ints=deep | {9: 3})
    yield case("deep", Op.CONV_3D, tensor(F32, 3, 3, 5, 8), cube, volume, ints=deep | {9: 3, 10: 2, 11: 4})
    small, ints = tensor(F32, 1, 1, 3, 2), {0: 3, 1: 5, 2: 5, 3: 2, 4: 2, 5: 4}
    yield case("outside", Op.CONV_2D, tensor(F32, 3, 1, 4, 2), tensor(F32, 3, 3, 3, 4), small, ints=ints)
    line, taps = tensor(F32, 9, 3, 2), tensor(F16, 3, 3, 4)
    yield case("line", Op.IM2COL, tensor(F32, 9, 9, 2), taps, line, ints={0: 1, 2: 1, 4: 1})
    yield case("flat", Op.CONV_2D, tensor(F32, 4, 11, 4, 2), kernel, image, ints=flat)
    yield case("flat", Op.CONV_2D_DW, tensor(F32, 4, 11, 3, 2), tensor(F32, 3, 2, 1, 3), image, ints=flat)
    yield case("line", Op.CONV_TRANSPOSE_1D, tensor(F32, 11, 4), tensor(F32, 3, 4, 2), tensor(F32, 5, 2), ints={0: 2})
    planes = (tensor(F16, 3, 2, 4, 3), tensor(F32, 5, 4, 3, 2))
    yield case("flat", Op.CONV_TRANSPOSE_2D, tensor(F32, 11, 8, 4, 2), *planes, ints={0: 2})
    yield case("line", Op.COL2IM_1D, tensor(F32, 9, 2), tensor(F32, 6, 5), ints={0: 2, 1: 2, 2: 1})
    for kind, name in enumerate(("max", "mean")):
        yield case(name, Op.POOL_1D, tensor(F32, 5, 3), tensor(F32, 9, 3), ints={0: kind, 1: 3, 2: 2, 3: 1})
        ints = {0: kind, 1: 3, 2: 2, 3: 2, 4: 2, 5: 1, 6: 0}
        yield case(name, Op.POOL_2D, tensor(F32, 5, 4, 3, 2), image, ints=ints)
    for name, mode in (("nearest", 0), ("bilinear", 1), ("bicubic", 2), ("aligned", 257), ("antialias", 513)):
        yield case(f"{name}-up", Op.UPSCALE, tensor(F32, 13, 20, 3, 4), image, ints={0: mode})
        yield case(f"{name}-down", Op.UPSCALE, tensor(F32, 4, 5, 3, 2), image, ints={0: mode})
    steps = tensor(F32, 4, values=exactly(0, 1, 10, 999))
    yield case("basic", Op.TIMESTEP_EMBEDDING, tensor(F32, 16, 4), steps, ints={0: 16, 1: 10000})
    yield case("basic", Op.WIN_PART, tensor(F32, 3, 4, 4, 6), tensor(F32, 3, 9, 8), ints={0: 3, 1: 2, 2: 4})
    along = tensor(F32, 4, 3, 2, 2)
    yield case("basic", Op.ADD_REL_POS, tensor(F32, 16, 6, 2), tensor(F32, 16, 6, 2), along, along)
    yield case("basic", Op.WIN_UNPART, tensor(F32, 3, 9, 8), tensor(F32, 3, 4, 4, 6), ints={0: 4})


def training() -> Iterator[Case]:
    for op in (Op.SILU_BACK, Op.RMS_NORM_BACK, Op.SOFT_MAX_BACK):
        x = tensor(F32, 33, 5, 2)
        yield case("basic", op, x, x, x, floats={0: 0.25})
        yield case("onto", op, x, x, x, floats={0: 0.25}, onto=0)
    ids = tensor(I32, 6, values=below(4))
    for kind in (F32, F16):
        yield case(f"{kind.name}-repeated", Op.GET_ROWS_BACK, tensor(F32, 20, 5), tensor(kind, 20, 6), ids)
        yield case(f"{kind.name}-first", Op.GET_ROWS_BACK, tensor(F32, 20, 5), tensor(kind, 20, 9), ids)
    shares = tensor(F32, 20, 6, values=positive)
    yield case("basic", Op.CROSS_ENTROPY_LOSS_BACK, tensor(F32, 20, 6), tensor(F32, 1), tensor(F32, 20, 6), shares)
    x, squares = tensor(F32, 20, 6), tensor(F32, 20, 6, values=positive)
    adamw = tensor(F32, 7, values=given(0.01, 0.9, 0.99, 1e-8, 0.1, 10, 100))
    yield case("basic", Op.OPT_STEP_ADAMW, x, x, x, x, squares, adamw, onto=0)
    yield case("basic", Op.OPT_STEP_SGD, x, x, x, tensor(F32, 2, values=given(0.01, 0.1)), onto=0)


def beyond_stock() -> Iterator[Case]:
    """What the rules allow and the stock worker refuses or gets wrong: gaps where it expects none."""
    for gate in Glu:
        limits, x = {2: 1.7, 3: 2.0}, gapped(F32, 40, 5, 2)
        yield case(f"{gate.name}-gaps", Op.GLU, gapped(F32, 20, 5, 2), x, ints={0: gate}, floats=limits)
    yield case("gaps", Op.SCALE, tensor(F32, 37, 5, 2), gapped(F32, 37, 5, 2), floats={0: 0.3, 1: -1})
    yield case("gaps", Op.SSM_CONV, tensor(F32, 6, 5, 2), gapped(F32, 8, 6, 2), tensor(F32, 4, 6))
    yield case("permuted", Op.ROLL, tensor(F32, 5, 4, 3), permuted(F32, 5, 4, 3), ints={0: 2, 1: -1, 2: 2})
    yield case("permuted", Op.TRI, tensor(F32, 5, 5, 2), permuted(F32, 5, 5, 2), ints={0: Tri.LOWER})
    yield case("gaps", Op.FILL, gapped(BF16, 5, 4, 2), floats={0: -1.5})
    for kind in CACHE[3:]:
        yield cpy(f"{kind.name}-F32-permuted", tensor(F32, 64, 3, 2), permuted(kind, 64, 3, 2))


FAMILIES: Sequence[Callable[[], Iterator[Case]]] = (
    products,
    rows,
    copies,
    arithmetic,
    reductions,
    attention,
    ropes,
    grids,
    recurrent,
    images,
    training,
)
STOCK_CASES: tuple[Case, ...] = tuple(found for family in FAMILIES for found in family())
"""Cases that the stock worker computes too."""
CASES: tuple[Case, ...] = (*STOCK_CASES, *beyond_stock())
