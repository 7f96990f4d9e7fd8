"""ggml's tensor types: one row each, numbered as protocol 8.0 numbers them.

Source of every number: docs/protocol.md section 5. Block layouts stand there too.
"""

from typing import NamedTuple


class TensorType(NamedTuple):
    """How elements are stored: `block_size` elements share `type_size` bytes."""

    id: int
    name: str
    block_size: int
    type_size: int

    @property
    def quantized(self) -> bool:
        """Whether elements can only be addressed as whole blocks."""
        return self.block_size > 1

    def row_bytes(self, elements: int) -> int:
        """Bytes of a contiguous row of `elements` elements (a multiple of the block size)."""
        return elements // self.block_size * self.type_size


F32 = TensorType(0, "F32", 1, 4)
F16 = TensorType(1, "F16", 1, 2)
Q4_0 = TensorType(2, "Q4_0", 32, 18)
Q4_1 = TensorType(3, "Q4_1", 32, 20)
Q5_0 = TensorType(6, "Q5_0", 32, 22)
Q5_1 = TensorType(7, "Q5_1", 32, 24)
Q8_0 = TensorType(8, "Q8_0", 32, 34)
Q8_1 = TensorType(9, "Q8_1", 32, 36)
Q2_K = TensorType(10, "Q2_K", 256, 84)
Q3_K = TensorType(11, "Q3_K", 256, 110)
Q4_K = TensorType(12, "Q4_K", 256, 144)
Q5_K = TensorType(13, "Q5_K", 256, 176)
Q6_K = TensorType(14, "Q6_K", 256, 210)
Q8_K = TensorType(15, "Q8_K", 256, 292)
IQ2_XXS = TensorType(16, "IQ2_XXS", 256, 66)
IQ2_XS = TensorType(17, "IQ2_XS", 256, 74)
IQ3_XXS = TensorType(18, "IQ3_XXS", 256, 98)
IQ1_S = TensorType(19, "IQ1_S", 256, 50)
IQ4_NL = TensorType(20, "IQ4_NL", 32, 18)
IQ3_S = TensorType(21, "IQ3_S", 256, 110)
IQ2_S = TensorType(22, "IQ2_S", 256, 82)
IQ4_XS = TensorType(23, "IQ4_XS", 256, 136)
I8 = TensorType(24, "I8", 1, 1)
I16 = TensorType(25, "I16", 1, 2)
I32 = TensorType(26, "I32", 1, 4)
I64 = TensorType(27, "I64", 1, 8)
F64 = TensorType(28, "F64", 1, 8)
IQ1_M = TensorType(29, "IQ1_M", 256, 56)
BF16 = TensorType(30, "BF16", 1, 2)
TQ1_0 = TensorType(34, "TQ1_0", 256, 54)
TQ2_0 = TensorType(35, "TQ2_0", 256, 66)
MXFP4 = TensorType(39, "MXFP4", 32, 17)
NVFP4 = TensorType(40, "NVFP4", 64, 36)
Q1_0 = TensorType(41, "Q1_0", 128, 18)
Q2_0 = TensorType(42, "Q2_0", 64, 18)

TYPES: dict[int, TensorType] = {
    t.id: t
    for t in (
        F32,
        F16,
        Q4_0,
        Q4_1,
        Q5_0,
        Q5_1,
        Q8_0,
        Q8_1,
        Q2_K,
        Q3_K,
        Q4_K,
        Q5_K,
        Q6_K,
        Q8_K,
        IQ2_XXS,
        IQ2_XS,
        IQ3_XXS,
        IQ1_S,
        IQ4_NL,
        IQ3_S,
        IQ2_S,
        IQ4_XS,
        I8,
        I16,
        I32,
        I64,
        F64,
        IQ1_M,
        BF16,
        TQ1_0,
        TQ2_0,
        MXFP4,
        NVFP4,
        Q1_0,
        Q2_0,
    )
}
BY_NAME: dict[str, TensorType] = {t.name: t for t in TYPES.values()}
