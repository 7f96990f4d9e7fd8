"""Answers of the OpenAI API: what the engine generated, as the API's JSON objects.

Pure. One class for each of the two shapes, whole or in chunks; what they share stands in `Reply`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drover.coordinator.sequence import FinishEvent
from drover.coordinator.tokenizer import Tokenizer
from drover.coordinator.transcript import Delta, Entry

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0  # JSON has no infinity; the OpenAI API says this instead


@dataclass(slots=True)
class Choice:
    """One answer: its place among the answers, and what is known of it so far."""

    index: int
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all answers of a request; a prompt with several answers counts once."""

    prompt: int
    completion: int

    def json(self) -> Json:
        """The API's object."""
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}


@dataclass(frozen=True, slots=True)
class Reply(ABC):
    """How to answer one request; `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    logprobs: int | None
    """How many best tokens to name beside the chosen one; None: no log-probabilities."""

    whole_object = ""
    chunk_object = ""

    def whole(self, choices: Sequence[Choice], usage: Usage, times: Json) -> Json:
        """All answers in one piece."""
        rows = [self._choice(choice) for choice in choices]
        return {**self._head(self.whole_object), "choices": rows, "usage": usage.json(), "timings": times}

    def opening(self, index: int) -> Json | None:
        """The chunk before the first text of an answer, if there is one."""
        del index
        return None

    def chunk(self, index: int, delta: Delta) -> Json:
        """The chunk with the next piece of an answer."""
        return self._chunk(self._delta(Choice(index, delta.text, list(delta.entries))))

    def closing(self, index: int, finish_reason: str, times: Json) -> Json:
        """The chunk that ends an answer."""
        return {**self._chunk(self._delta(Choice(index, "", [], finish_reason))), "timings": times}

    def usage(self, usage: Usage) -> Json:
        """The last chunk of a stream whose client asked for usage."""
        return {**self._head(self.chunk_object), "choices": [], "usage": usage.json()}

    def _chunk(self, *rows: Json) -> Json:
        return {**self._head(self.chunk_object), "choices": list(rows)}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @abstractmethod
    def _choice(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _delta(self, choice: Choice) -> Json: ...


class Completion(Reply):
    """Answers to /v1/completions."""

    __slots__ = ()
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None if self.logprobs is None else self._logprobs(choice.entries),
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, choice: Choice) -> Json:
        row = self._choice(choice)
        return row if choice.entries else {**row, "logprobs": None}

    def _logprobs(self, entries: Sequence[Entry]) -> Json:
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._best(entry) for entry in entries] if self.logprobs else None,
            "text_offset": [entry.offset for entry in entries],
        }

    def _best(self, entry: Entry) -> Json:
        """Log-probabilities by text; where two tokens have the same text, the better one's."""
        best: Json = {}
        for token, value in entry.top:
            best.setdefault(self._name(token), _finite(value))
        return best

    def _name(self, token: int) -> str:
        return self.tokenizer.piece(token).decode("utf-8", "replace")


class ChatCompletion(Reply):
    """Answers to /v1/chat/completions."""

    __slots__ = ()
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        """The chunk that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if self.logprobs is None else self._logprobs(choice.entries),
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "delta": {} if choice.finish_reason else {"content": choice.text},
            "logprobs": self._logprobs(choice.entries) if choice.entries and self.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, entries: Sequence[Entry]) -> Json:
        rows = []
        for entry in entries:
            best = [self._token(token, value) for token, value in entry.top]
            rows.append({**self._token(entry.token, entry.logprob), "top_logprobs": best})
        return {"content": rows, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> Json:
        piece = self.tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}


def timings(finish: FinishEvent) -> Json:
    """How long one answer took, as llama-server reports it: milliseconds and tokens per second."""
    prompt, predicted = finish.prompt_tokens, finish.completion_tokens
    return {
        "prompt_n": prompt,
        "prompt_ms": finish.prompt_seconds * 1000,
        "prompt_per_token_ms": _ratio(finish.prompt_seconds * 1000, prompt),
        "prompt_per_second": _ratio(prompt, finish.prompt_seconds),
        "predicted_n": predicted,
        "predicted_ms": finish.decode_seconds * 1000,
        "predicted_per_token_ms": _ratio(finish.decode_seconds * 1000, predicted),
        "predicted_per_second": _ratio(predicted, finish.decode_seconds),
    }


def error(message: str, kind: str, code: str | None, param: str | None = None) -> Json:
    """The API's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
