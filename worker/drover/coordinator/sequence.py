"""The nouns every coordinator module shares: how to sample, what a client asked for, what it hears, one step's work.

Nothing of ours is imported here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from logits; the defaults are greedy-free plain sampling."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What a client asks of the engine: continue `prompt` (token ids, special tokens included)."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    """None: no log-probabilities; 0: the chosen token's; n: also those of the n best."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token; log-probabilities (natural, of the unmodified logits) if asked."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of a job; no event follows. Seconds are wall-clock time spent in steps."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    error: str | None = None


Event = TokenEvent | FinishEvent
Publish = Callable[[Event], None]


@dataclass(slots=True)
class Sequence:
    """A job in progress: every token so far, and how many of them the KV cache already holds."""

    id: int
    job: Job
    publish: Publish
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    generated: int = 0
    cancelled: bool = False
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def pending(self) -> int:
        """How many tokens the KV cache still lacks."""
        return len(self.tokens) - self.cached


@dataclass(frozen=True, slots=True)
class Part:
    """The next `count` tokens of one sequence; `wants_logits` if they reach its end."""

    sequence: Sequence
    count: int
    wants_logits: bool

    @property
    def tokens(self) -> list[int]:
        """The token ids."""
        start = self.sequence.cached
        return self.sequence.tokens[start : start + self.count]

    @property
    def positions(self) -> range:
        """Where they stand in their sequence."""
        return range(self.sequence.cached, self.sequence.cached + self.count)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes: parts of different sequences, in the order of their rows."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Tokens in all."""
        return sum(part.count for part in self.parts)
