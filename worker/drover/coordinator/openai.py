"""Requests of the OpenAI API: JSON in, jobs for the engine out.

Pure: no I/O, no clock. Fields that we do not know are ignored, as the API's clients expect; a field that we know and
cannot serve is an error, never silently dropped.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from drover.coordinator.chat import ChatTemplate
from drover.coordinator.sequence import Job, Sampling
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import RequestError

DEFAULT_COMPLETION_TOKENS = 16  # what the OpenAI API says; chat has no default but the room in the context
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_LOGPROBS = 20

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = list[int]

_EMPTY: tuple[Any, ...] = (None, False, "", 0, [], {})
_OFF: Callable[[Any], bool] = lambda value: value in _EMPTY  # noqa: E731  rows below share its shape

# Fields that we know and do not serve: which of their values change nothing, and what to do instead.
UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "echo": (_OFF, "put the prompt before the answer yourself"),
    "suffix": (_OFF, "infilling is not supported"),
    "best_of": (lambda value: value in (None, 0, 1), "use n"),
    "tools": (_OFF, "tool calls are not supported"),
    "functions": (_OFF, "function calls are not supported"),
    "grammar": (_OFF, "constrained output is not supported"),
    "json_schema": (_OFF, "constrained output is not supported"),
    "response_format": (lambda value: value is None or value == {"type": "text"}, "only text is supported"),
    "modalities": (lambda value: value in (None, ["text"]), "only text is supported"),
    "audio": (_OFF, "only text is supported"),
}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class Request(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repeat_penalty: Annotated[Number, Field(gt=0)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    logit_bias: dict[int, Number] | None = None
    ignore_eos: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_stops(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name, (harmless, advice) in UNSUPPORTED.items():
            if isinstance(data, Mapping) and name in data and not harmless(data[name]):
                raise RequestError(f"{name} is not supported here: {advice}", name)
        return data

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return tuple(text for text in self.stop or () if text)

    @property
    def choices(self) -> int:
        """How many answers to give to each prompt."""
        return self.n or 1

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a chunk about usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the context holds."""
        return None if self.max_tokens == -1 else self.max_tokens

    @property
    def best_logprobs(self) -> int | None:
        """None: no log-probabilities; n: those of the chosen token and of the n best."""
        raise NotImplementedError

    def prompts(self, tokenizer: Tokenizer, chat: ChatTemplate) -> list[TokenIds]:
        """The token ids of each prompt. RequestError if one cannot be made."""
        raise NotImplementedError


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: list[str | TokenIds]
    """Text or token ids; a single prompt may come without its list."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> list[str | TokenIds]:
        if isinstance(value, str) or _are_ids(value):
            return [value]
        if not isinstance(value, list) or not all(isinstance(entry, str) or _are_ids(entry) for entry in value):
            raise RequestError("prompt must be a text, a list of token ids, or a list of those", "prompt")
        return value

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any) -> Any:
        return {True: 1, False: None}[value] if isinstance(value, bool) else value

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the context holds."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else super().token_limit

    @property
    def best_logprobs(self) -> int | None:
        """None: no log-probabilities; n: those of the chosen token and of the n best."""
        return self.logprobs

    def prompts(self, tokenizer: Tokenizer, chat: ChatTemplate) -> list[TokenIds]:  # noqa: ARG002  chat needs it
        """The token ids of each prompt; RequestError if there is none."""
        if not self.prompt:
            raise RequestError("prompt is an empty list", "prompt")
        if len(self.prompt) * self.choices > MAX_CHOICES:
            raise RequestError(f"{len(self.prompt)} prompts with n={self.choices}: at most {MAX_CHOICES} answers", "n")
        return [tokenizer.encode(entry) if isinstance(entry, str) else entry for entry in self.prompt]


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the context holds."""
        if self.max_completion_tokens is None:
            return super().token_limit
        return None if self.max_completion_tokens == -1 else self.max_completion_tokens

    @property
    def best_logprobs(self) -> int | None:
        """None: no log-probabilities; n: those of the chosen token and of the n best."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, tokenizer: Tokenizer, chat: ChatTemplate) -> list[TokenIds]:
        """The one prompt that the chat template makes; RequestError if it refuses."""
        text = chat.render(self.messages, **(self.chat_template_kwargs or {}))
        ids = tokenizer.encode(text)
        doubled = tokenizer.add_bos and ids[:2] == [tokenizer.bos, tokenizer.bos]
        return [ids[1:] if doubled else ids]  # the template and the vocabulary may both put BOS in front


class TokenizeRequest(BaseModel):
    """POST /tokenize, as llama-server has it."""

    content: str = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize, as llama-server has it."""

    tokens: TokenIds = []


AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """A request from its JSON; RequestError names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from None
        field = str(first["loc"][0]) if first["loc"] else None
        place = ".".join(str(step) for step in first["loc"]) or "the body"
        raise RequestError(f"{place}: {first['msg']}", field) from None


def jobs(request: Request, tokenizer: Tokenizer, chat: ChatTemplate, context: int) -> list[Job]:
    """One job for each answer: `choices` for the first prompt, then for the second, and so on.

    RequestError if a prompt is empty, has foreign ids or leaves no room in the context (in tokens)."""
    made: list[Job] = []
    for prompt in request.prompts(tokenizer, chat):
        _check_prompt(prompt, tokenizer, context)
        room = context - len(prompt)
        limit = room if request.token_limit is None else min(request.token_limit, room)
        if limit < 1:
            raise RequestError("max_tokens must be at least 1", "max_tokens")
        made += [_job(request, tokenizer, context, prompt, limit, choice) for choice in range(request.choices)]
    return made


def _job(request: Request, tokenizer: Tokenizer, context: int, prompt: TokenIds, limit: int, choice: int) -> Job:
    return Job(
        prompt=tuple(prompt),
        max_tokens=limit,
        sampling=_sampling(request, tokenizer, context, choice),
        stop_tokens=frozenset() if request.ignore_eos else tokenizer.end_of_generation,
        top_logprobs=request.best_logprobs,
    )


def _check_prompt(prompt: TokenIds, tokenizer: Tokenizer, context: int) -> None:
    if not prompt:
        raise RequestError("the prompt is empty", "prompt")
    for token in prompt:
        if not 0 <= token < tokenizer.size:
            raise RequestError(f"token id {token} is not in the vocabulary (0 to {tokenizer.size - 1})", "prompt")
    if len(prompt) >= context:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; the context holds {context}, the answer included: shorten it, or "
            f"serve the model with a larger context",
            "prompt",
        )


def _sampling(request: Request, tokenizer: Tokenizer, context: int, choice: int) -> Sampling:
    """The sampling of one of the choices: with a seed, each choice gets the next one."""
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k is None else max(request.top_k, 0),
        "min_p": request.min_p,
        "repeat_penalty": request.repeat_penalty,
        "repeat_last_n": context if request.repeat_last_n == -1 else request.repeat_last_n,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "seed": None if request.seed is None or request.seed < 0 else request.seed + choice,
        "logit_bias": _bias(request, tokenizer) or None,
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _bias(request: Request, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    bias = dict(request.logit_bias or {})
    for token in bias:
        if not 0 <= token < tokenizer.size:
            raise RequestError(f"logit_bias: token id {token} is not in the vocabulary", "logit_bias")
    if request.ignore_eos:
        bias.update(dict.fromkeys(tokenizer.end_of_generation, -math.inf))
    return tuple(bias.items())


def _are_ids(value: Any) -> bool:
    """Whether this is a list of token ids; the empty list is none."""
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)
