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


def compile_callee(name: str) -> int:
    """The address of a function of the table, compiled or loaded from numba's cache; good for ever."""
    return int(_compiled(name).address)


@cache  # also because the code goes when the object does
def _compiled(name: str) -> Any:
    return compiled(_FUNCTIONS[name], dict(ENTRIES)[name])


def compiled(function: Callable[..., None], count: int) -> Any:
    """A function of `count` integers that can be called by its `address`, as long as this object lives."""
    signature = numba.void(*[numba.int64] * count)
    return numba.cfunc(signature, cache=True, error_model="numpy")(function)


@cache
def _table() -> npt.NDArray[np.int64]:
    return np.array([compile_callee(name) for name, _ in ENTRIES], np.int64)


def table() -> int:
    """The address of the table; good for ever."""
    return int(_table().ctypes.data)
