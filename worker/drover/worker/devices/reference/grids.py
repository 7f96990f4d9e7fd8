"""Blocks of the types whose levels are points of a grid, to float32; the only door to the `gguf` package in a worker.

The grids are tables of hundreds of points, and the package has them (docs/protocol.md section 5.1). It is imported when
the first such block is read: models of other types need nothing of it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from drover.errors import DeviceError
from drover.ggml.types import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, TensorType

GRIDS: frozenset[TensorType] = frozenset((IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S))


def points(kind: TensorType) -> npt.NDArray[np.int8]:
    """The points of a grid, shaped (points, levels); DeviceError if the package is missing."""
    grid = getattr(_quants(kind), kind.name)
    grid.init_grid()
    return np.asarray(grid.grid[0, 0], np.int8)


def dequantize(kind: TensorType, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The values of blocks shaped (…, blocks, bytes) as (…, elements); DeviceError if the package is missing."""
    quants = _quants(kind)
    *rows, count, size = blocks.shape
    if blocks.size == 0:
        return np.empty((*rows, count * kind.block_size), np.float32)
    values: npt.NDArray[Any] = quants.dequantize(
        blocks.reshape(*rows, count * size), quants.GGMLQuantizationType[kind.name]
    )
    return values


def _quants(kind: TensorType) -> Any:
    try:
        from gguf import quants
    except ImportError as error:
        hint = "install drover[worker]"
        raise DeviceError(f"tensors of type {kind.name} cannot be read without the gguf package: {hint}") from error
    return quants
