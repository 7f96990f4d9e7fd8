"""Operands as numpy arrays, and the conversions between tensor types.

Arrays have their dimensions in numpy's order, (ne3, ne2, ne1, ne0). Whatever is loaded is a copy, so that a result may
be stored over any operand.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from drover.errors import DeviceError
from drover.ggml.ops import float_params, int_params
from drover.ggml.types import BF16, F16, F32, F64, I8, I16, I32, I64, TensorType
from drover.worker.devices.device import Node, Operand
from drover.worker.devices.host import host, require_free
from drover.worker.devices.reference.grids import GRIDS, dequantize
from drover.worker.devices.reference.packing import QUANTIZE
from drover.worker.devices.reference.quants import DEQUANTIZE

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Result = Any
"""What an operation returns: an array with the values of its result, in any shape with as many elements, or None if it
has stored them itself. (To a type checker most of numpy's arithmetic is Any, so no narrower name would hold.)"""

WORKING_BYTES = 24
"""What a number takes while it is computed with: in eight bytes, three times."""
DTYPES: dict[TensorType, npt.DTypeLike] = {
    F32: np.float32,
    F16: np.float16,
    BF16: np.uint16,
    I8: np.int8,
    I16: np.int16,
    I32: np.int32,
    I64: np.int64,
    F64: np.float64,
}
"""How types of one element per block lie in memory; BF16 is kept as its bits."""


@dataclass(frozen=True, slots=True)
class Work:
    """A node about to be computed, with its parameters read both ways."""

    node: Node

    @property
    def dst(self) -> Operand:
        """Where the result goes."""
        return self.node.dst

    @property
    def ints(self) -> tuple[int, ...]:
        """Parameters as integers."""
        return int_params(self.node.params)

    @property
    def floats(self) -> tuple[float, ...]:
        """Parameters as floats."""
        return float_params(self.node.params)

    def operand(self, index: int) -> Operand:
        """The source in this slot; it is there, the rules say so."""
        found = self.optional(index)
        assert found is not None
        return found

    def optional(self, index: int) -> Operand | None:
        """The source in this slot, or None."""
        return self.node.src[index] if index < len(self.node.src) else None

    def f32(self, index: int) -> Floats:
        """The source's values as float32."""
        return load(self.operand(index)).astype(np.float32, copy=False)

    def f64(self, index: int) -> Doubles:
        """The source's values as float64."""
        return load(self.operand(index)).astype(np.float64)

    def indices(self, index: int, limit: int) -> npt.NDArray[np.int64]:
        """The source's values as row numbers; DeviceError naming the first one outside 0..limit-1."""
        ids = load(self.operand(index)).astype(np.int64)
        wrong = ids[(ids < 0) | (ids >= limit)]
        if wrong.size:
            raise DeviceError(f"{self.node.op.name}: index {wrong[0]} is out of range, there are {limit} rows")
        return ids


def require_room(elements: int) -> None:
    """Raise DeviceError if the machine has no memory for so many numbers: a tensor may claim far more than it has."""
    require_free(elements * WORKING_BYTES)


def view(operand: Operand, offset: int = 0) -> Array:
    """The operand's own memory: (ne3, ne2, ne1, ne0), or (ne3, ne2, ne1, blocks, bytes) for quantised types."""
    kind, ne, nb = operand.type, operand.ne, operand.nb
    memory, start = host(operand.buffer).array, operand.offset + offset
    outer, strides = (ne[3], ne[2], ne[1]), (nb[3], nb[2], nb[1])
    if 0 in ne:
        return np.empty((*outer, ne[0] // kind.block_size, *_tail(kind)), DTYPES.get(kind, np.uint8))
    if kind.quantized:
        shape = (*outer, ne[0] // kind.block_size, kind.type_size)
        return np.ndarray(shape, np.uint8, memory.data, start, (*strides, nb[0], 1))
    return np.ndarray((*outer, ne[0]), DTYPES[kind], memory.data, start, (*strides, nb[0]))


def load(operand: Operand) -> Array:
    """A copy of the values: float32 for floats and quantised types, integers and float64 as they are."""
    return decode(operand.type, view(operand))


def store(operand: Operand, values: Array) -> None:
    """Write values, of as many elements in row-major order, over the operand, converting them to its type."""
    target = view(operand)
    target[...] = encode(operand.type, values.reshape(operand.ne[::-1])).reshape(target.shape)


def decode(kind: TensorType, raw: Array) -> Array:
    """Stored elements (blocks last, if quantised) as values; always a copy."""
    if kind == BF16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if kind == F16:
        return raw.astype(np.float32)
    if not kind.quantized:
        return raw.copy()
    blocks = np.ascontiguousarray(raw)
    if kind in GRIDS:
        return dequantize(kind, blocks)
    unpack = DEQUANTIZE.get(kind)
    if unpack is None:
        raise DeviceError(f"the reference device cannot read tensors of type {kind.name}")
    return unpack(blocks).reshape(*raw.shape[:-2], raw.shape[-2] * kind.block_size)


def encode(kind: TensorType, values: Array) -> Array:
    """Values as stored elements; quantised types get (…, blocks, bytes)."""
    if kind == BF16:
        return to_bf16(values.astype(np.float32, copy=False))
    if not kind.quantized:
        return values.astype(DTYPES[kind])
    pack = QUANTIZE.get(kind)
    if pack is None:
        raise DeviceError(f"the reference device cannot write tensors of type {kind.name}")
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // kind.block_size, kind.block_size)
    return pack(blocks.astype(np.float32, copy=False))


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | 64
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def tile(small: Array, shape: tuple[int, ...]) -> Array:
    """Repeat an array a whole number of times in each dimension to fill `shape`: element i is small[i mod size]."""
    return np.tile(small, [n // s for n, s in zip(shape, small.shape, strict=True)])


def _tail(kind: TensorType) -> tuple[int, ...]:
    return (kind.type_size,) if kind.quantized else ()
