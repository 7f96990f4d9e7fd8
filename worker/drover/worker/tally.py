"""What a worker has done since it started: counters that every client's thread adds to and the status reads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums at one moment; bytes are those of the RPC connections, `hit_bytes` those of weights read from the cache,
    `miss_bytes` those of weights that clients had to send.
    """

    connections: int = 0
    received: int = 0
    sent: int = 0
    graphs: int = 0
    compute_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    miss_bytes: int = 0


class Tally:
    """The counters of one worker; any thread may add."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """The sums so far."""
        return self._counts

    def client_came(self) -> None:
        """Another connection."""
        with self._guard:
            self._counts = replace(self._counts, connections=self._counts.connections + 1)

    def moved(self, received: int = 0, sent: int = 0) -> None:
        """Bytes went over a connection."""
        with self._guard:
            counts = self._counts
            self._counts = replace(counts, received=counts.received + received, sent=counts.sent + sent)

    def hit(self, size: int) -> None:
        """A tensor of `size` bytes came from the weight cache."""
        with self._guard:
            counts = self._counts
            self._counts = replace(counts, hits=counts.hits + 1, hit_bytes=counts.hit_bytes + size)

    def missed(self) -> None:
        """A tensor was asked of the weight cache, and was not in it."""
        with self._guard:
            self._counts = replace(self._counts, misses=self._counts.misses + 1)

    def sent_after_miss(self, size: int) -> None:
        """A client sent a tensor of `size` bytes that the weight cache lacked."""
        with self._guard:
            self._counts = replace(self._counts, miss_bytes=self._counts.miss_bytes + size)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """One graph is computed within."""
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            with self._guard:
                counts = self._counts
                self._counts = replace(
                    counts, graphs=counts.graphs + 1, compute_seconds=counts.compute_seconds + seconds
                )
