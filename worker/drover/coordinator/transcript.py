"""One answer as it grows: tokens in, text out, cut at stop strings.

Pure. Text is shown as soon as it cannot be part of a stop string any more; a token's log-probability is shown with the
text it begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from drover.coordinator.sequence import FinishEvent, TokenEvent
from drover.coordinator.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Entry:
    """One token and its log-probabilities; its text begins at character `offset` of the answer."""

    token: int
    offset: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What an event adds to the answer; either may be empty."""

    text: str = ""
    entries: tuple[Entry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.entries)


class Transcript:
    """An answer in the making."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        """Whether a stop string was found: tokens after it do not belong to the answer."""
        self.tokens = 0
        """Tokens so far, that which completed a stop string included."""
        self._stops = tuple(stops)
        self._decoder = tokenizer.stream()
        self._decoded = 0
        self._shown = 0
        self._held = ""
        self._waiting: list[Entry] = []

    def push(self, event: TokenEvent) -> Delta:
        """What one more token lets us show."""
        if self.stopped:
            return Delta()
        self.tokens += 1
        self._waiting.append(Entry(event.token, self._decoded, event.logprob, event.top))
        return self._take(self._decoder.push(event.token))

    def finish(self, event: FinishEvent) -> Delta:
        """What was held back, now that no more tokens come."""
        if self.stopped:
            return Delta()
        if event.reason == "stop":
            self.tokens = max(self.tokens, event.completion_tokens)
        delta = self._take(self._decoder.flush())
        return delta if self.stopped else self._release(delta)

    def _take(self, text: str) -> Delta:
        self._decoded += len(text)
        self._held += text
        at = find_stop(self._held, self._stops)
        if at is not None:
            self.stopped = True
            return self._show(at)
        return self._show(len(self._held) - held_back(self._held, self._stops))

    def _release(self, delta: Delta) -> Delta:
        """Add to the last delta all that waited in vain for a stop string."""
        rest, self._held = self._held, ""
        entries, self._waiting = self._waiting, []
        return Delta(delta.text + rest, (*delta.entries, *entries))

    def _show(self, count: int) -> Delta:
        text, self._held = self._held[:count], self._held[count:]
        self._shown += len(text)
        ready = tuple(entry for entry in self._waiting if entry.offset < self._shown)
        self._waiting = self._waiting[len(ready) :]
        return Delta(text, ready)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first, the longest of several: tokens do not matter."""
    found = min(((at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0), default=None)
    return None if found is None else found[1]


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the start of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
