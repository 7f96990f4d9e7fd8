"""The types that weights come in: one row each, from which kernels take constants by type number.

`family` says which decoder there is and which activations it is multiplied with (see `weights` and `quantize`).
"""

from typing import Final, NamedTuple

from drover.ggml import types
from drover.ggml.types import TensorType
from drover.worker.devices.cpu.simd import jit

NONE: Final = 0
ELEMENTS: Final = 1
"""Floats one by one."""
THIRTY_TWOS: Final = 2
"""Blocks of 32, 64 or 128, read 128 elements at a time into registers."""
KS: Final = 3
"""Blocks of 256, read into registers."""
LEVELS: Final = 4
"""Blocks of 256 whose levels are looked up in grids: read by `levels` into memory, as blocks of one simple type."""


class Kind(NamedTuple):
    """What kernels must know of a type."""

    type: TensorType
    family: int
    offset: int = 0
    """What its decoded bytes count from."""
    constants: bool = False
    """Whether blocks have a constant to add."""


KINDS: Final = (
    Kind(types.F32, ELEMENTS),
    Kind(types.F16, ELEMENTS),
    Kind(types.BF16, ELEMENTS),
    Kind(types.Q4_0, THIRTY_TWOS, 8),
    Kind(types.Q4_1, THIRTY_TWOS, constants=True),
    Kind(types.Q5_0, THIRTY_TWOS, 16),
    Kind(types.Q5_1, THIRTY_TWOS, constants=True),
    Kind(types.Q8_0, THIRTY_TWOS, 128),
    Kind(types.IQ4_NL, THIRTY_TWOS, 128),
    Kind(types.MXFP4, THIRTY_TWOS, 12),
    Kind(types.NVFP4, THIRTY_TWOS, 12),
    Kind(types.Q1_0, THIRTY_TWOS, 1),
    Kind(types.Q2_0, THIRTY_TWOS, 1),
    Kind(types.Q2_K, KS),
    Kind(types.Q3_K, KS, 4),
    Kind(types.Q4_K, KS),
    Kind(types.Q5_K, KS),
    Kind(types.Q6_K, KS, 32),
    Kind(types.IQ4_XS, KS, 128),
    Kind(types.IQ1_S, LEVELS, 128),
    Kind(types.IQ1_M, LEVELS, 128),
    Kind(types.IQ2_XXS, LEVELS, 128),
    Kind(types.IQ2_XS, LEVELS, 128),
    Kind(types.IQ2_S, LEVELS, 128),
    Kind(types.IQ3_XXS, LEVELS, 128),
    Kind(types.IQ3_S, LEVELS, 128),
    Kind(types.TQ1_0, KS, 1),
    Kind(types.TQ2_0, KS, 1),
)
TYPES: Final = frozenset(kind.type.id for kind in KINDS)
"""The types there are decoders for."""

_BY_ID = {kind.type.id: kind for kind in KINDS}
_UNKNOWN = Kind(TensorType(-1, "", 1, 0), NONE)
_ROWS = tuple(_BY_ID.get(i, _UNKNOWN) for i in range(max(TYPES) + 1))
_FAMILIES = tuple(kind.family for kind in _ROWS)
_SIZES = tuple(kind.type.type_size for kind in _ROWS)
_BLOCKS = tuple(kind.type.block_size for kind in _ROWS)
_OFFSETS = tuple(kind.offset for kind in _ROWS)
_CONSTANTS = tuple(kind.constants for kind in _ROWS)

F32_ID, F16_ID, BF16_ID = types.F32.id, types.F16.id, types.BF16.id
Q4_0, Q4_1, Q5_0, Q5_1 = types.Q4_0.id, types.Q4_1.id, types.Q5_0.id, types.Q5_1.id
Q8_0, IQ4_NL, MXFP4, NVFP4 = types.Q8_0.id, types.IQ4_NL.id, types.MXFP4.id, types.NVFP4.id
Q1_0, Q2_0 = types.Q1_0.id, types.Q2_0.id
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = types.Q2_K.id, types.Q3_K.id, types.Q4_K.id, types.Q5_K.id, types.Q6_K.id
IQ4_XS, IQ3_S, IQ3_XXS = types.IQ4_XS.id, types.IQ3_S.id, types.IQ3_XXS.id
IQ2_S, IQ2_XS, IQ2_XXS = types.IQ2_S.id, types.IQ2_XS.id, types.IQ2_XXS.id
IQ1_S, IQ1_M, TQ1_0, TQ2_0 = types.IQ1_S.id, types.IQ1_M.id, types.TQ1_0.id, types.TQ2_0.id


@jit
def is_float(kind: int) -> bool:
    """Whether elements are floats, one by one."""
    return _FAMILIES[kind] == ELEMENTS


@jit
def is_k(kind: int) -> bool:
    """Whether blocks hold 256 elements."""
    return _FAMILIES[kind] in (KS, LEVELS)


@jit
def has_levels(kind: int) -> bool:
    """Whether blocks must be read by `levels` first."""
    return _FAMILIES[kind] == LEVELS


@jit
def block_bytes(kind: int) -> int:
    """Bytes of a block, or of an element."""
    return _SIZES[kind]


@jit
def block_elements(kind: int) -> int:
    """Elements of a block."""
    return _BLOCKS[kind]


@jit
def bytes_of(kind: int, elements: int) -> int:
    """Bytes of whole blocks."""
    return elements // _BLOCKS[kind] * _SIZES[kind]


@jit
def has_constants(kind: int) -> bool:
    """Whether blocks have a constant to add."""
    return _CONSTANTS[kind]


@jit
def offset_of(kind: int) -> int:
    """What the decoded bytes of a type count from."""
    return _OFFSETS[kind]
