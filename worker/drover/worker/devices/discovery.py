"""Which accelerators this process may use, asked of their drivers: nothing of theirs needs to be installed for that."""

import ctypes
from collections.abc import Callable
from typing import Any


def cuda_devices(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """How many CUDA devices the driver shows us; it is the driver that honours CUDA_VISIBLE_DEVICES."""
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
