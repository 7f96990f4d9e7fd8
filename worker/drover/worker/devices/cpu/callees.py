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
def _table() -> tuple[npt.NDArray[np.int64], list[Any]]:
    functions = [compiled(_FUNCTIONS[name], count) for name, count in ENTRIES]
    return np.array([function.address for function in functions], np.int64), functions


def compiled(function: Callable[..., None], count: int) -> Any:
    """A function of `count` integers that can be called by its `address`, as long as this object lives."""
    signature = numba.void(*[numba.int64] * count)
    return numba.cfunc(signature, cache=True, error_model="numpy")(function)


def table() -> int:
    """The address of the table, its functions compiled or loaded from numba's cache; good for ever."""
    return int(_table()[0].ctypes.data)
