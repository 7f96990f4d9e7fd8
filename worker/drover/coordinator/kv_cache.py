"""KvCache: which cell of the KV cache holds which position of which sequences.

Bookkeeping only; the bytes lie on the workers, in the same cell of every layer. A cell belongs to a set of sequences,
so that a common prefix can be stored once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BUCKET = 256
"""Cells attended to are rounded up to this, so that one graph serves many steps."""

HIDDEN = np.float16(-np.inf)
_FREE = -1


class KvCache:
    """`size` cells, a multiple of `BUCKET`; cells are taken from the lowest free one up."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._position = np.full(size, _FREE, np.int32)
        self._holders = np.zeros(size, np.int32)
        self._cells: dict[int, NDArray[np.bool_]] = {}

    @property
    def free(self) -> int:
        """Cells that hold nothing."""
        return int(np.count_nonzero(self._holders == 0))

    @property
    def attended(self) -> int:
        """How many cells, from the first, a step must look at: up to the last used one, in whole buckets."""
        used = np.flatnonzero(self._holders)
        return round_up(int(used[-1]) + 1 if len(used) else 1)

    def take(self, sequence: int, positions: Sequence[int]) -> NDArray[np.int64]:
        """Cells for new positions of a sequence, in their order; the scheduler has made sure there are enough."""
        cells = np.flatnonzero(self._holders == 0)[: len(positions)]
        assert len(cells) == len(positions), "the scheduler admitted more than fits"
        self._position[cells] = positions
        self._holders[cells] = 1
        self._mine(sequence)[cells] = True
        return cells

    def share(self, source: int, target: int, end: int) -> None:
        """Let `target` have the positions of `source` before `end`, without another copy."""
        common = self._mine(source) & (self._position < end) & ~self._mine(target)
        self._mine(target)[common] = True
        self._holders[common] += 1

    def drop(self, sequence: int, start: int = 0) -> None:
        """Forget a sequence from position `start` on; cells that nobody else holds become free."""
        mine = self._mine(sequence)
        gone = mine & (self._position >= start)
        mine[gone] = False
        self._holders[gone] -= 1
        self._position[gone & (self._holders == 0)] = _FREE
        if start == 0:
            del self._cells[sequence]

    def mask(self, sequence: int, positions: Sequence[int], attended: int) -> NDArray[np.float16]:
        """One row a position [positions, attended]: 0 for the cells it may see, minus infinity for the others."""
        mine = self._mine(sequence)[:attended]
        before = self._position[None, :attended] <= np.asarray(positions, np.int32)[:, None]
        return np.where(mine & before, np.float16(0), HIDDEN)

    def _mine(self, sequence: int) -> NDArray[np.bool_]:
        if sequence not in self._cells:
            self._cells[sequence] = np.zeros(self.size, np.bool_)
        return self._cells[sequence]


def round_up(cells: int) -> int:
    """The next multiple of `BUCKET`."""
    return -(-cells // BUCKET) * BUCKET
