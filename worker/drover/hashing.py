"""The hash that names a tensor's bytes in SET_TENSOR_HASH: 64-bit FNV-1a (docs/protocol.md section 4.1).

Serial by definition, about 1 GB/s when compiled; numba is imported by the first call, never by importing this module.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

OFFSET_BASIS = 0xCBF29CE484222325
_PRIME = 0x100000001B3

Bytes = npt.NDArray[np.uint8]


def fnv1a(data: bytes | bytearray | memoryview | npt.NDArray[Any], state: int = OFFSET_BASIS) -> int:
    """Hash of contiguous bytes; `state`, the hash of what came before, continues it."""
    raw = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if raw.nbytes == 0:
        return state
    return int(_compiled()(np.frombuffer(raw, np.uint8), np.uint64(state)))


class Fnv1a:
    """The same hash in the shape of hashlib's: bytes come piece by piece."""

    def __init__(self) -> None:
        self.value = OFFSET_BASIS

    def update(self, data: bytes | memoryview) -> None:
        """Continue with these bytes."""
        self.value = fnv1a(data, self.value)


@cache
def _compiled() -> Callable[[Bytes, np.uint64], np.uint64]:
    import numba

    signature = numba.uint64(numba.types.Array(numba.uint8, 1, "C", readonly=True), numba.uint64)
    try:
        kernel = numba.njit(signature, nogil=True, cache=True)(_rounds)
    except (RuntimeError, OSError):  # no folder where compiled code could be kept
        kernel = numba.njit(signature, nogil=True)(_rounds)
    compiled: Callable[[Bytes, np.uint64], np.uint64] = kernel
    return compiled


def _rounds(data: Bytes, state: np.uint64) -> np.uint64:
    prime = np.uint64(_PRIME)
    for byte in data:
        state = (state ^ np.uint64(byte)) * prime
    return state
