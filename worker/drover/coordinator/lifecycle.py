"""Where a coordinator stands between its start and its end, and how far loading is. Any thread may ask or tell."""

import threading
from typing import Literal

from drover.sizes import format_size

Phase = Literal["loading", "ready", "stopping"]


class Lifecycle:
    """Loading, then ready, then stopping; never back."""

    def __init__(self) -> None:
        self.phase: Phase = "loading"
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._guard = threading.Lock()

    def begin_loading(self, totals: dict[str, int]) -> None:
        """So many bytes of weights go to each device."""
        with self._guard:
            self._totals = dict(totals)
            self._done = dict.fromkeys(totals, 0)

    def advance(self, device: str, count: int) -> None:
        """`count` more bytes are in place on a device."""
        with self._guard:
            self._done[device] += count

    def ready(self) -> None:
        """Everything is in place."""
        if self.phase == "loading":
            self.phase = "ready"

    def stopping(self) -> None:
        """Nothing new is begun."""
        self.phase = "stopping"

    @property
    def progress(self) -> dict[str, tuple[int, int]]:
        """Bytes in place and bytes in all, by device; empty before the plan is made."""
        with self._guard:
            return {device: (self._done[device], total) for device, total in self._totals.items()}

    def why_not_ready(self) -> str | None:
        """Why requests must wait or go elsewhere; None if they need not."""
        if self.phase == "ready":
            return None
        if self.phase == "stopping":
            return "the coordinator is stopping"
        pairs = self.progress.values()
        if not pairs:
            return "the model is being opened and the workers are being reached; try again later"
        done, total = (format_size(sum(column)) for column in zip(*pairs, strict=True))
        return f"the model is being loaded: {done} of {total} are in place; try again later"
