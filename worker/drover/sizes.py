"""Amounts of memory as people write them: "4GiB" to bytes and back. Pure.

Units are powers of 1024 whether written GiB, Gi or G; a bare number is bytes.
"""

import re

from drover.errors import DroverError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"([0-9]{1,18})(\.[0-9]{1,18})?\s*([KMGT]?)(?:i?B?)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "512 MiB", "1.5G" or "1073741824"; raises DroverError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise DroverError(f"{text!r} is not a size; write e.g. 4GiB")
    whole, fraction, unit = match.groups()
    scale: int = 1024 ** _UNITS[unit.upper()]
    return int(whole) * scale + int(float(fraction or 0) * scale)


def format_size(size: int) -> str:
    """The same in the largest unit that leaves at least 1, one decimal: "4.0 GiB"; below 1 KiB "512 B"."""
    value, units = float(abs(size)), iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    sign = "-" if size < 0 else ""
    return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.1f} {unit}"
