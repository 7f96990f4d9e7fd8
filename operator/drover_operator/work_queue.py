"""Which InferenceClusters are due, and when: one thread at a time for each, and one cycle for all that happened.

What arrives while one is being worked on is done after it. One that failed comes back later and later; one that asks
to be looked at again comes back then, unless something happens before. One that writes and writes without ever coming
to rest fights with someone over an object, and is slowed down more and more.
"""

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass

Key = tuple[str, str]
"""Namespace and name."""

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 300.0
RESTLESS = 25
"""Cycles in a row that wrote, from which on it is a fight: a cluster that comes to be takes about ten."""


@dataclass(slots=True)
class _Entry:
    due: float
    failures: int = 0
    pauses: int = 0
    busy: bool = False
    waiting: bool = True
    told: bool = True
    """Whether something happened that asks for the next piece of work."""
    by_event: bool = False
    """Whether that was so of the last one; else only its time had come."""


class WorkQueue:
    """Keys with the time they are due; any thread may call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[Key, _Entry] = {}
        self._heap: list[tuple[float, Key]] = []
        self._writing: dict[Key, int] = {}
        self._changed = threading.Condition()
        self._closed = False

    def add(self, key: Key, seconds: float = 0.0, *, fresh: bool = False) -> None:
        """Something happened to a key: it is due in so many seconds, or sooner if it was.

        What is `fresh`, a spec that nobody has acted on, is held back by nothing that came before.
        """
        with self._changed:
            if fresh:
                self._writing.pop(key, None)
            due = self._clock() + max(seconds, self._calm(key))
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(due)
            elif entry.waiting:
                entry.due = min(entry.due, due)
            else:
                entry.due, entry.waiting = due, True
            entry.told = True
            self._push(key, entry)

    def take(self) -> Key | None:
        """Wait for the next key that is due; None once the queue is closed."""
        with self._changed:
            while not self._closed:
                key, seconds = self._next()
                if key is not None:
                    entry = self._entries[key]
                    entry.busy, entry.waiting = True, False
                    entry.by_event, entry.told = entry.told, False
                    return key
                self._changed.wait(seconds)
            return None

    def done(self, key: Key, again: float | None = None, wrote: bool = False) -> float:
        """A key was worked on; it is due again after `again` seconds, twice as long each time it waited in vain.

        What happens meanwhile makes it due sooner, and the wait after that no longer.
        Returns the pause that events of it are held back for, because it has written so often.
        """
        with self._changed:
            entry = self._entries[key]
            if wrote:
                self._writing[key] = self._writing.get(key, 0) + 1
            else:
                self._writing.pop(key, None)
            if entry.waiting:
                entry.due = max(entry.due, self._clock() + self._calm(key))
            entry.busy, entry.failures = False, 0
            if again is None:
                entry.pauses = 0
            else:
                entry.pauses += not entry.by_event
                self._later(entry, min(again * 2**entry.pauses, max(again, LONGEST_PAUSE)))
            self._settle(key, entry)
            return self._calm(key)

    def failed(self, key: Key) -> float:
        """Work on a key failed; it comes back after the pause returned, longer after each failure in a row."""
        with self._changed:
            entry = self._entries[key]
            pause: float = min(FIRST_PAUSE * 2**entry.failures, LONGEST_PAUSE)
            entry.busy, entry.failures = False, min(entry.failures + 1, 16)
            entry.due, entry.waiting = self._clock() + pause, True
            self._settle(key, entry)
            return pause

    def close(self) -> None:
        """Let everybody who waits go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        """How many keys wait or are being worked on."""
        return len(self._entries)

    def _calm(self, key: Key) -> float:
        """Seconds that a key which has written too often is held back."""
        often = self._writing.get(key, 0) - RESTLESS
        return 0.0 if often < 0 else min(2.0**often, LONGEST_PAUSE)

    def _later(self, entry: _Entry, seconds: float) -> None:
        due = self._clock() + seconds
        entry.due = min(entry.due, due) if entry.waiting else due
        entry.waiting = True

    def _settle(self, key: Key, entry: _Entry) -> None:
        if entry.waiting:
            self._push(key, entry)
        else:
            del self._entries[key]

    def _push(self, key: Key, entry: _Entry) -> None:
        if not entry.busy:
            heapq.heappush(self._heap, (entry.due, key))
            self._changed.notify()

    def _next(self) -> tuple[Key | None, float | None]:
        """A key that is due, or how long to wait for the first."""
        while self._heap:
            due, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is None or entry.busy or not entry.waiting or entry.due != due:
                heapq.heappop(self._heap)
                continue
            left = due - self._clock()
            if left > 0:
                return None, left
            heapq.heappop(self._heap)
            return key, None
        return None, None
