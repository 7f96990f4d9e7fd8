"""Waiting and running sequences -> the next batch. Pure: it sees no device, no clock and no logits.

Sequences are served in turn, in the order they came: at most `slots` run at a time, and one whose prompt is done takes
one token a step. A prompt goes in pieces of at most `batch_size` tokens.
"""

from collections import deque

from drover.coordinator.sequence import Batch, Part, Sequence


class Scheduler:
    """Who is served next, with `slots` sequences at a time."""

    def __init__(self, batch_size: int, slots: int = 1) -> None:
        self._batch_size = batch_size
        self._slots = slots
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All that are not finished, running ones first."""
        return [*self._running, *self._waiting]

    @property
    def counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        return len(self._running), len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self._waiting.append(sequence)

    def find(self, sequence_id: int) -> Sequence | None:
        """The unfinished sequence with this id."""
        return next((found for found in self.sequences if found.id == sequence_id), None)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, whether it runs or waits."""
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def next_batch(self) -> Batch | None:
        """What the next step computes; None if there is nothing to do."""
        while self._waiting and len(self._running) < self._slots:
            self._running.append(self._waiting.popleft())
        room = self._batch_size
        parts = []
        for sequence in sorted(self._running, key=lambda running: running.pending):
            count = min(sequence.pending, room)
            if count:
                parts.append(Part(sequence, count, wants_logits=count == sequence.pending))
                room -= count
        return Batch(tuple(parts)) if parts else None
