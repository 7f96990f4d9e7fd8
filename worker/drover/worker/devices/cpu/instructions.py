"""Which instructions kernels are compiled for: all that the processor has, or fewer, to measure and to test.

numba reads its settings when it is imported: not imported here.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

from llvmlite import binding

from drover.errors import DroverError


class Level(StrEnum):
    """x86-64 processors by what matters most to products, each with what those before it have."""

    GENERIC = "generic"
    AVX2 = "avx2"
    AVX512 = "avx512"
    AMX = "amx"


_BEYOND: Mapping[Level, str] = {
    Level.AVX2: r"avx512|avx10|amx|evex512",
    Level.AVX512: r"amx",
    Level.AMX: r"(?!)",
}
"""Names of features that a level does not have."""
_NEEDED: Mapping[Level, Sequence[str]] = {
    Level.AVX2: ("avx2", "fma", "f16c"),
    Level.AVX512: ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    Level.AMX: ("avx512f", "amx-tile"),
}


def settings(level: Level) -> dict[str, str]:
    """numba's environment variables for a level; raises DroverError if this processor is below it."""
    if level == Level.GENERIC:
        return {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    present = {name for name, has in binding.get_host_cpu_features().items() if has}
    missing = [name for name in _NEEDED[level] if name not in present]
    if missing:
        raise DroverError(f"this processor lacks {', '.join(missing)}, which {level} needs; leave --cpu-level out")
    features = ",".join(f"+{name}" for name in sorted(present) if not re.match(_BEYOND[level], name))
    return {"NUMBA_CPU_NAME": binding.get_host_cpu_name(), "NUMBA_CPU_FEATURES": features}
