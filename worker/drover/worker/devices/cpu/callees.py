"""The functions behind `calls`: what each name means, and the table of their addresses."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from drover.worker.devices.cpu import blocks, gemm, gemm_k, levels, quantize, rows
from drover.worker.devices.cpu.calls import ENTRIES

_FUNCTIONS: dict[str, Callable[..., None]] = {
    "times_columns": rows.times_columns,
    "pack": gemm.pack,
    "pack_k": gemm_k.pack,
    "multiply_panel": gemm.multiply_panel,
    "multiply_panel_k": gemm_k.multiply_panel,
    "prepare": quantize.prepare,
    "look_up": levels.look_up,
    "dequantize": blocks.dequantize,
    "quantize": blocks.quantize,
}


@cache  # also because the code goes when the objects do
def _compiled() -> tuple[npt.NDArray[np.int64], list[Any]]:
    kept = []
    for name, count in ENTRIES:
        signature = numba.void(*[numba.int64] * count)
        kept.append(numba.cfunc(signature, cache=True, error_model="numpy")(_FUNCTIONS[name]))
    return np.array([function.address for function in kept], np.int64), kept


def table() -> int:
    """The address of the table, its functions compiled or loaded from numba's cache; good for ever."""
    return int(_compiled()[0].ctypes.data)
