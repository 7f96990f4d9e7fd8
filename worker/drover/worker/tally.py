"""What a worker has done since it started: counters that every client's thread adds to and the status reads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

from drover.rpc.messages import COMMANDS


@dataclass(slots=True)
class Counts:
    """Sums; bytes are those of the RPC connections, `hit_bytes` those of weights read from the cache,
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
    nodes: int = 0


@dataclass(slots=True)
class Traffic:
    """What went over the wire for one command: frames served, their bytes, and those of their answers."""

    frames: int = 0
    received: int = 0
    sent: int = 0


Reason = Literal[
    "greeting", "frame", "request", "limit", "device", "memory", "clients", "timeout", "unfinished", "internal"
]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why something was refused: who never greeted; what is no frame; a request that cannot be met; a limit of one client;
what a device cannot do; a buffer with no room; one client too many; a stall; an end in the middle; an error of ours."""


class Tally:
    """The counters of one worker; any thread may add."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._counts = Counts()
        self._commands = {command.name: Traffic() for command in COMMANDS.values()}
        self._refused = dict.fromkeys(REASONS, 0)

    @property
    def commands(self) -> dict[str, Traffic]:
        """What went over the wire, by the command's name."""
        with self._guard:
            return {name: replace(traffic) for name, traffic in self._commands.items()}

    @property
    def refused(self) -> dict[Reason, int]:
        """How often something was refused, by reason."""
        with self._guard:
            return dict(self._refused)

    @property
    def counts(self) -> Counts:
        """The sums so far."""
        with self._guard:
            return replace(self._counts)

    def client_came(self) -> None:
        """Another connection."""
        with self._guard:
            self._counts.connections += 1

    def moved(self, received: int = 0, sent: int = 0) -> None:
        """Bytes went over a connection."""
        with self._guard:
            self._counts.received += received
            self._counts.sent += sent

    def served(self, command: str, received: int, sent: int) -> None:
        """A command was served: the bytes of its frame and of the answer."""
        with self._guard:
            traffic = self._commands[command]
            traffic.frames += 1
            traffic.received += received
            traffic.sent += sent

    def refuse(self, reason: Reason) -> None:
        """Something was refused."""
        with self._guard:
            self._refused[reason] += 1

    def hit(self, size: int) -> None:
        """A tensor of `size` bytes came from the weight cache."""
        with self._guard:
            self._counts.hits += 1
            self._counts.hit_bytes += size

    def missed(self) -> None:
        """A tensor was asked of the weight cache, and was not in it."""
        with self._guard:
            self._counts.misses += 1

    def sent_after_miss(self, size: int) -> None:
        """A client sent a tensor of `size` bytes that the weight cache lacked."""
        with self._guard:
            self._counts.miss_bytes += size

    @contextmanager
    def computing(self, nodes: int) -> Iterator[None]:
        """One graph of so many nodes is computed within."""
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            with self._guard:
                self._counts.graphs += 1
                self._counts.compute_seconds += seconds
                self._counts.nodes += nodes
