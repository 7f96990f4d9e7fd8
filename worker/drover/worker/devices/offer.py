"""How much of a device's memory clients get. Pure."""

import re
from dataclasses import dataclass

from drover.errors import DroverError
from drover.sizes import parse_size

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%")
_WHOLE = 100


@dataclass(frozen=True, slots=True)
class Offer:
    """Bytes, or a share of what is free; with neither, what is free but for a reserve, and at least half of it."""

    bytes: int | None = None
    share: float | None = None

    def of(self, free: int, reserve: int) -> int:
        """Bytes to offer of a device that has `free`; `reserve` is what others there may need."""
        if self.bytes is not None:
            return self.bytes
        if self.share is not None:
            return int(free * self.share)
        return max(free - reserve, free // 2)


def parse_offer(text: str) -> Offer:
    """An offer from "8GiB", "8589934592" or "80%"; raises DroverError for anything else, nothing included."""
    match = _SHARE.fullmatch(text.strip())
    offer = Offer(parse_size(text)) if match is None else Offer(share=float(match[1]) / _WHOLE)
    if offer.bytes == 0 or offer.share == 0 or (offer.share or 0) > 1:
        raise DroverError(f"{text!r} offers nothing that can be had; write e.g. 8GiB or 80%")
    return offer
