"""The record of one operation in a compiled program: 96 words of 64 bits, named here and nowhere else.

A kernel gets the address of its record and reads the words it needs with `word`. Everything but the counters, the
error words and the results is constant while a program runs.
"""

from typing import Final

WORDS: Final = 96
RECORD_BYTES: Final = 8 * WORDS

KERNEL: Final = 0
"""Address of the kernel that executes the record."""
COUNTER: Final = 1
"""Work handed out so far; zero when a run starts."""
DST: Final = 2
"""Address of the result."""
SRC: Final = 3
"""Addresses of operands 0 to 4; 0 for an absent one."""
NE0: Final = 8
"""Four extents of operand 0, then its four byte strides; the same for operands and result below."""
NB0: Final = 12
NE1: Final = 16
NB1: Final = 20
NE_DST: Final = 24
NB_DST: Final = 28
TYPE0: Final = 32
TYPE1: Final = 33
COUNTER2: Final = 34
"""A second counter, zero when a run starts."""
TYPE_DST: Final = 35
NE2: Final = 36
NB2: Final = 40
NE3: Final = 44
NB3: Final = 48
EXTRA: Final = NE3
"""Eight more parameters, for operations without a fourth operand."""
TYPE2: Final = 52
TYPE3: Final = 53
PARAMS: Final = 54
"""Seven parameters: integers, or the bits of a 32-bit float."""
ERROR_VALUE: Final = 61
"""The index that was out of range, when ERROR is set."""
ERROR: Final = 62
FLAGS: Final = 63

SRC5: Final = 64
"""Addresses of operands 5 and 6; then what is kept of operands 4 to 6, as of those before."""
SRC6: Final = 65
NE4: Final = 66
NB4: Final = 70
NE5: Final = 74
NB5: Final = 78
NE6: Final = 82
NB6: Final = 86
TYPE4: Final = 90
TYPE5: Final = 91
TYPE6: Final = 92

SOLO: Final = 1
"""Flag: thread 0 runs the record alone."""
NO_BARRIER: Final = 2
"""Flag: the next record does not have to wait for this one."""

# Type numbers as in drover.ggml.types, plain so that compiled code sees constants.
F32: Final = 0
F16: Final = 1
Q4_0: Final = 2
Q8_0: Final = 8
Q4_K: Final = 12
Q5_K: Final = 13
Q6_K: Final = 14
I32: Final = 26
I64: Final = 27
BF16: Final = 30

# Opcodes: one for each kernel (see run.KERNELS).
(
    BINARY,
    UNARY,
    GLU,
    NORM,
    ROPE,
    SOFT_MAX,
    GET_ROWS,
    SET_ROWS,
    SET_ELEMENTS,
    COPY,
    CONCAT,
    REPEAT,
    SUM_ROWS,
    ARGSORT,
    ATTENTION,
    MUL_MAT,
    MUL_MAT_ID,
    ADD_ID,
    TOP_FEW,
    ARGMAX,
    LIGHTNING_INDEXER,
    ARANGE,
    PAD,
    BAND,
    WINDOW,
    TOTAL,
    CUMSUM,
    GROUP_NORM,
    POOL,
    SOLVE_TRI,
    SSM_CONV,
    SSM_SCAN,
    GATED_DELTA_NET,
    WKV7,
    LINEAR_ATTENTION,
    HC_PRE,
    HC_POST,
    HC_COMB,
) = range(38)
