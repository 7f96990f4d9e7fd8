"""ggml's operations and their parameters, numbered as protocol 8.0 numbers them.

A number means another operation in another protocol version: this table is the only place that knows them.
Meanings: docs/protocol.md section 6.
"""

from enum import IntEnum, IntFlag
from struct import Struct

MAX_SOURCES = 10
MAX_DIMS = 4
MAX_NAME = 64
PARAM_COUNT = 16
PARAM_BYTES = 64


class Op(IntEnum):
    """What a node computes."""

    NONE = 0
    DUP = 1
    ADD = 2
    ADD_ID = 3
    ADD1 = 4
    ACC = 5
    SUB = 6
    MUL = 7
    DIV = 8
    SQR = 9
    SQRT = 10
    LOG = 11
    SIN = 12
    COS = 13
    SUM = 14
    SUM_ROWS = 15
    CUMSUM = 16
    MEAN = 17
    ARGMAX = 18
    COUNT_EQUAL = 19
    REPEAT = 20
    REPEAT_BACK = 21
    CONCAT = 22
    SILU_BACK = 23
    NORM = 24
    RMS_NORM = 25
    RMS_NORM_BACK = 26
    GROUP_NORM = 27
    L2_NORM = 28
    MUL_MAT = 29
    MUL_MAT_ID = 30
    OUT_PROD = 31
    SCALE = 32
    SET = 33
    CPY = 34
    CONT = 35
    RESHAPE = 36
    VIEW = 37
    PERMUTE = 38
    TRANSPOSE = 39
    GET_ROWS = 40
    GET_ROWS_BACK = 41
    SET_ROWS = 42
    DIAG = 43
    DIAG_MASK_INF = 44
    DIAG_MASK_ZERO = 45
    SOFT_MAX = 46
    SOFT_MAX_BACK = 47
    ROPE = 48
    ROPE_BACK = 49
    CLAMP = 50
    CONV_TRANSPOSE_1D = 51
    IM2COL = 52
    IM2COL_BACK = 53
    IM2COL_3D = 54
    COL2IM_1D = 55
    CONV_2D = 56
    CONV_3D = 57
    CONV_2D_DW = 58
    CONV_TRANSPOSE_2D = 59
    POOL_1D = 60
    POOL_2D = 61
    POOL_2D_BACK = 62
    UPSCALE = 63
    PAD = 64
    PAD_REFLECT_1D = 65
    ROLL = 66
    ARANGE = 67
    TIMESTEP_EMBEDDING = 68
    ARGSORT = 69
    TOP_K = 70
    LEAKY_RELU = 71
    TRI = 72
    FILL = 73
    FLASH_ATTN_EXT = 74
    FLASH_ATTN_BACK = 75
    SSM_CONV = 76
    SSM_SCAN = 77
    WIN_PART = 78
    WIN_UNPART = 79
    GET_REL_POS = 80
    ADD_REL_POS = 81
    RWKV_WKV6 = 82
    GATED_LINEAR_ATTN = 83
    RWKV_WKV7 = 84
    SOLVE_TRI = 85
    GATED_DELTA_NET = 86
    LIGHTNING_INDEXER = 87
    DSV4_HC_COMB = 88
    DSV4_HC_PRE = 89
    DSV4_HC_POST = 90
    UNARY = 91
    MAP_CUSTOM1 = 92
    MAP_CUSTOM2 = 93
    MAP_CUSTOM3 = 94
    CUSTOM = 95
    CROSS_ENTROPY_LOSS = 96
    CROSS_ENTROPY_LOSS_BACK = 97
    OPT_STEP_ADAMW = 98
    OPT_STEP_SGD = 99
    GLU = 100


class Unary(IntEnum):
    """Which function an `Op.UNARY` node applies (parameter 0)."""

    ABS = 0
    SGN = 1
    NEG = 2
    STEP = 3
    TANH = 4
    ELU = 5
    RELU = 6
    SIGMOID = 7
    GELU = 8
    GELU_QUICK = 9
    SILU = 10
    HARDSWISH = 11
    HARDSIGMOID = 12
    EXP = 13
    EXPM1 = 14
    SOFTPLUS = 15
    GELU_ERF = 16
    XIELU = 17
    FLOOR = 18
    CEIL = 19
    ROUND = 20
    TRUNC = 21


class Glu(IntEnum):
    """Which gate an `Op.GLU` node applies (parameter 0)."""

    REGLU = 0
    GEGLU = 1
    SWIGLU = 2
    SWIGLU_OAI = 3
    GEGLU_ERF = 4
    GEGLU_QUICK = 5
    SWIGLU_CLAMP = 6


class RopeMode(IntEnum):
    """How `Op.ROPE` pairs channels (parameter 2)."""

    NORMAL = 0
    NEOX = 2
    MROPE = 8
    VISION = 24
    IMROPE = 40


class Precision(IntEnum):
    """Least precision of the accumulator of a matrix product (parameter 0)."""

    DEFAULT = 0
    F32 = 10
    BF16 = 15
    F16 = 20
    Q8 = 30
    Q4 = 40


class Tri(IntEnum):
    """Which triangle an `Op.TRI` node keeps (parameter 0)."""

    UPPER_DIAG = 0
    UPPER = 1
    LOWER_DIAG = 2
    LOWER = 3


class SortOrder(IntEnum):
    """Order of an `Op.ARGSORT` node (parameter 0)."""

    ASC = 0
    DESC = 1


class TensorFlag(IntFlag):
    """Bits of a tensor's `flags`; a node without COMPUTE is present but must not run."""

    INPUT = 1
    OUTPUT = 2
    PARAM = 4
    LOSS = 8
    COMPUTE = 16


METADATA_OPS = frozenset({Op.NONE, Op.RESHAPE, Op.VIEW, Op.PERMUTE, Op.TRANSPOSE})
"""Operations that only rename memory: nothing to execute."""

FORBIDDEN_OPS = frozenset({Op.MAP_CUSTOM1, Op.MAP_CUSTOM2, Op.MAP_CUSTOM3, Op.CUSTOM})
"""Operations whose parameters are a function pointer of the client: never executed."""

_PARAMS_I = Struct("<16i")
_PARAMS_F = Struct("<16f")


def pack_params(ints: dict[int, int] | None = None, floats: dict[int, float] | None = None) -> bytes:
    """Pack parameters by slot number (0..15) into the 64 bytes of a tensor's `op_params`."""
    raw = bytearray(PARAM_BYTES)
    for slot, value in (ints or {}).items():
        raw[4 * slot : 4 * slot + 4] = (value & 0xFFFFFFFF).to_bytes(4, "little")
    for slot, real in (floats or {}).items():
        raw[4 * slot : 4 * slot + 4] = _FLOAT.pack(real)
    return bytes(raw)


def int_params(params: bytes) -> tuple[int, ...]:
    """The 16 parameters read as 32-bit signed integers."""
    return _PARAMS_I.unpack(params)


def float_params(params: bytes) -> tuple[float, ...]:
    """The same 16 parameters read as 32-bit floats."""
    return _PARAMS_F.unpack(params)


_FLOAT = Struct("<f")
