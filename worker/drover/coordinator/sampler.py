"""Logits -> token: penalties, then top-k, top-p, min-p, temperature, and a draw.

The filters apply in llama.cpp's order, so that its settings mean the same here; randomness is handed in.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drover.coordinator.sequence import Sampling
from drover.errors import DeviceError

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """A token; log-probabilities (natural, of the unmodified logits) if they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The choices of one sequence; a seed makes them repeatable."""

    def __init__(self, sampling: Sampling, rng: np.random.Generator, top_logprobs: int | None = None) -> None:
        self._sampling = sampling
        self._rng = rng
        self._top = top_logprobs

    def choose(self, logits: Logits, history: Sequence[int]) -> Choice:
        """The next token after `history`; DeviceError if a worker returned no numbers."""
        if np.isnan(logits).any() or not np.isfinite(logits.max()):
            raise DeviceError("a worker returned logits that are not numbers; the model file or the worker is faulty")
        token = draw(adjusted(logits, self._sampling, history), self._sampling, self._rng)
        if self._top is None:
            return Choice(token)
        logprobs = log_softmax(logits)
        best = strongest(logits, self._top)
        return Choice(token, float(logprobs[token]), tuple((int(id_), float(logprobs[id_])) for id_ in best))


def adjusted(logits: Logits, sampling: Sampling, history: Sequence[int]) -> Logits:
    """Logits after bias and penalties; the input is left alone."""
    logits = logits.copy()
    for token, bias in sampling.logit_bias:
        if 0 <= token < len(logits):
            logits[token] += np.float32(bias)
    counts = Counter(_recent(history, sampling.repeat_last_n))
    if not counts:
        return logits
    seen = np.fromiter(counts.keys(), np.int64)
    often = np.fromiter(counts.values(), np.float32)
    values = logits[seen]
    values = np.where(values > 0, values / sampling.repeat_penalty, values * sampling.repeat_penalty)
    logits[seen] = values - sampling.presence_penalty - sampling.frequency_penalty * often
    return logits


def draw(logits: Logits, sampling: Sampling, rng: np.random.Generator) -> int:
    """One token; at temperature 0 the likeliest, the lowest id of equal ones."""
    if sampling.temperature <= 0:
        return int(np.argmax(logits))
    kept = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        kept = strongest(logits, sampling.top_k)
    if sampling.top_p < 1:
        kept = kept[np.argsort(-logits[kept], kind="stable")]
        kept = kept[: _nucleus(softmax(logits[kept]), sampling.top_p)]
    if sampling.min_p > 0:
        probabilities = softmax(logits[kept])
        kept = kept[probabilities >= sampling.min_p * probabilities.max()]
    return int(rng.choice(kept, p=softmax(logits[kept] / sampling.temperature)))


def strongest(logits: Logits, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest logits, largest first, the lower id first among equal ones."""
    count = min(count, len(logits))
    if count == 0:
        return np.empty(0, np.int64)
    floor = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= floor)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def softmax(logits: Logits) -> NDArray[np.float64]:
    """Probabilities, in double precision."""
    exponents = np.exp(logits.astype(np.float64) - logits.max())
    probabilities: NDArray[np.float64] = exponents / exponents.sum()
    return probabilities


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities."""
    shifted = logits.astype(np.float64) - logits.max()
    logprobs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def _recent(history: Sequence[int], count: int) -> Sequence[int]:
    """What penalties look back on: the last `count` tokens, all of them if it is negative."""
    return history if count < 0 else history[max(0, len(history) - count) :]


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> int:
    """How many of the descending probabilities it takes to reach `top_p`; at least one."""
    return int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1
