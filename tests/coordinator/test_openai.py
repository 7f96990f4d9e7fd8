"""Requests to jobs, tokens to text with stop strings, and the API's objects."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.coordinator import openai
from drover.coordinator.chat import PLAIN, ChatTemplate
from drover.coordinator.openai import ChatRequest, CompletionRequest
from drover.coordinator.replies import ChatCompletion, Choice, Completion, Usage, timings
from drover.coordinator.sequence import FinishEvent, Job, Sampling, TokenEvent
from drover.coordinator.tokenizer import Tokenizer
from drover.coordinator.transcript import Delta, Transcript, find_stop, held_back
from drover.errors import RequestError

HELLO, WORLD, BOS, EOS, END = 259, 264, 265, 266, 268
CHAT = ChatTemplate(PLAIN)
CONTEXT = 64


def completion(tokenizer: Tokenizer, **fields: Any) -> list[Job]:
    request = openai.parse(CompletionRequest, json.dumps({"prompt": "hello", **fields}).encode())
    return openai.jobs(request, tokenizer, CHAT, CONTEXT)


def chat(tokenizer: Tokenizer, template: ChatTemplate = CHAT, **fields: Any) -> list[Job]:
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    return openai.jobs(openai.parse(ChatRequest, json.dumps(body).encode()), tokenizer, template, CONTEXT)


def test_a_plain_completion(tokenizer: Tokenizer) -> None:
    assert completion(tokenizer) == [
        Job((BOS, HELLO), max_tokens=16, sampling=Sampling(), stop_tokens=frozenset({EOS, END}), top_logprobs=None)
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello world", [(BOS, HELLO, WORLD)]),
        (["hello", " world"], [(BOS, HELLO), (BOS, WORLD)]),
        ([HELLO, WORLD], [(HELLO, WORLD)]),
        ([[HELLO], [WORLD, WORLD]], [(HELLO,), (WORLD, WORLD)]),
    ],
)
def test_prompts_of_every_shape(tokenizer: Tokenizer, prompt: Any, expected: list[tuple[int, ...]]) -> None:
    assert [job.prompt for job in completion(tokenizer, prompt=prompt)] == expected


def test_sampling_fields(tokenizer: Tokenizer) -> None:
    fields = {"temperature": 0, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 5, "presence_penalty": 0.5}
    more = {"frequency_penalty": -0.5, "repeat_penalty": 1.1, "repeat_last_n": -1, "logit_bias": {"7": -100}}
    first, second = completion(tokenizer, n=2, logprobs=3, **fields, **more)
    assert first.sampling == Sampling(0.0, 0, 0.9, 0.1, 1.1, CONTEXT, 0.5, -0.5, ((7, -100.0),), 5)
    assert second.sampling.seed == 6
    assert first.top_logprobs == 3
    assert completion(tokenizer, seed=-1)[0].sampling.seed is None


def test_ignore_eos_forbids_the_end(tokenizer: Tokenizer) -> None:
    (job,) = completion(tokenizer, ignore_eos=True)
    assert job.stop_tokens == frozenset()
    assert dict(job.sampling.logit_bias) == {EOS: -math.inf, END: -math.inf}


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, 16), ({"max_tokens": 3}, 3), ({"max_tokens": -1}, 62), ({"max_tokens": 999}, 62)]
)
def test_room_for_the_answer(tokenizer: Tokenizer, fields: dict[str, Any], expected: int) -> None:
    assert completion(tokenizer, **fields)[0].max_tokens == expected


def test_chat_has_its_own_limits_and_logprobs(tokenizer: Tokenizer) -> None:
    (job,) = chat(tokenizer)
    assert tokenizer.decode(job.prompt) == "User: hello\n\nAssistant:"
    assert job.max_tokens == CONTEXT - len(job.prompt)
    assert chat(tokenizer, max_tokens=9, max_completion_tokens=4)[0].max_tokens == 4
    assert job.top_logprobs is None
    assert chat(tokenizer, logprobs=True)[0].top_logprobs == 0
    assert chat(tokenizer, logprobs=True, top_logprobs=4)[0].top_logprobs == 4


def test_chat_begins_with_one_bos(tokenizer: Tokenizer) -> None:
    (job,) = chat(tokenizer, ChatTemplate("{{ bos_token }}{{ messages[0].content }}", "<s>"))
    assert job.prompt == (BOS, HELLO)


@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        (b"", None, "the body is not JSON"),
        (b"{", None, "the body is not JSON"),
        (b"[]", None, "the body"),
        (b"{}", "prompt", "prompt: Field required"),
        (b'{"prompt": 7}', "prompt", "prompt must be a text, a list of token ids"),
        (b'{"prompt": [1, "a", [true]]}', "prompt", "prompt must be"),
        (b'{"prompt": "x", "n": 0}', "n", "n: Input should be greater"),
        (b'{"prompt": "x", "temperature": -1}', "temperature", "temperature"),
        (b'{"prompt": "x", "temperature": NaN}', None, ""),
        (b'{"prompt": "x", "logprobs": 99}', "logprobs", "logprobs"),
        (b'{"prompt": "x", "stop": [1]}', "stop", "stop"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias", "logit_bias"),
        (b'{"prompt": "x", "echo": true}', "echo", "echo is not supported"),
        (b'{"prompt": "x", "best_of": 3}', "best_of", "best_of is not supported here: use n"),
        (b'{"prompt": "x", "response_format": {"type": "json_object"}}', "response_format", "only text"),
    ],
)
def test_bad_requests_name_the_field(body: bytes, param: str | None, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        openai.parse(CompletionRequest, body)
    assert expected in str(caught.value)
    assert param is None or caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"unknown_field": 1, "user": "me", "store": False},
        {"echo": False, "suffix": None, "best_of": 1, "tools": [], "response_format": {"type": "text"}},
        {"temperature": None, "stop": None, "stream": None, "n": None, "logit_bias": None, "max_tokens": None},
    ],
)
def test_harmless_fields_change_nothing(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    assert completion(tokenizer, **fields) == completion(tokenizer)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "prompt must be"),
        ({"prompt": [269]}, "token id 269 is not in the vocabulary"),
        ({"prompt": [-1]}, "token id -1"),
        ({"logit_bias": {"999": 1}}, "token id 999"),
        ({"prompt": [1] * 64}, "the prompt has 64 tokens; the context holds 64"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": ["a"] * 100, "n": 2}, "at most 128 answers"),
    ],
)
def test_jobs_that_cannot_be(tokenizer: Tokenizer, fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        completion(tokenizer, **fields)


def run(tokenizer: Tokenizer, text: str, stops: list[str]) -> tuple[list[str], Transcript]:
    transcript = Transcript(tokenizer, stops)
    tokens = tokenizer.encode(text, False)
    texts = [transcript.push(TokenEvent(token)).text for token in tokens]
    texts.append(transcript.finish(FinishEvent("length", 1, len(tokens))).text)
    return texts, transcript


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stopped"),
    [
        ("hello world", [], ["hello", " world", ""], False),
        ("abc", ["bc"], ["a", "", "", ""], True),
        ("abx", ["bc"], ["a", "", "bx", ""], False),
        ("ab", ["bc"], ["a", "", "b"], False),
        ("hello world", ["wor"], ["hello", " ", ""], True),
        ("hello", ["ell", "h"], ["", ""], True),
        ("aab", ["ab"], ["", "a", "", ""], True),
        ("é!", ["!"], ["", "é", "", ""], True),
        ("!aa", ["a", "!aa"], ["", "!", "", ""], True),
    ],
)
def test_stop_strings_across_tokens(
    tokenizer: Tokenizer, text: str, stops: list[str], expected: list[str], stopped: bool
) -> None:
    texts, transcript = run(tokenizer, text, stops)
    assert texts == expected
    assert transcript.stopped == stopped


@given(
    text=st.text(alphabet="ab!", max_size=30),
    stops=st.lists(st.text(alphabet="ab!", min_size=1, max_size=4), max_size=3),
)
def test_what_is_shown_ends_before_the_first_stop(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    texts, transcript = run(tokenizer, text, stops)
    at = find_stop(text, stops)
    assert "".join(texts) == (text if at is None else text[:at])
    assert transcript.stopped == (at is not None)


def test_held_back() -> None:
    assert held_back("xx<|e", ["<|end|>", "e!"]) == 3
    assert held_back("", ["a"]) == 0
    assert held_back("aaa", ["aaab", "b"]) == 3


def test_logprobs_come_with_the_text_they_begin(tokenizer: Tokenizer) -> None:
    transcript = Transcript(tokenizer, ["zz"])
    first = transcript.push(TokenEvent(ord("a"), -0.1, ((ord("a"), -0.1),)))
    assert [entry.offset for entry in first.entries] == [0]
    assert not transcript.push(TokenEvent(ord("z"), -0.2))
    later = transcript.push(TokenEvent(HELLO, -0.3))
    assert later.text == "zhello"
    assert [(entry.token, entry.offset) for entry in later.entries] == [(ord("z"), 1), (HELLO, 2)]
    assert not transcript.push(TokenEvent(ord("z"), -0.2))
    assert not transcript.push(TokenEvent(ord("z"), -0.2))
    assert transcript.stopped
    assert not transcript.finish(FinishEvent("cancelled", 1, 6))
    assert transcript.tokens == 5


def delta(tokenizer: Tokenizer) -> Delta:
    transcript = Transcript(tokenizer)
    return transcript.push(TokenEvent(HELLO, -0.5, ((HELLO, -0.5), (0xC3, -math.inf))))


def test_completion_objects(tokenizer: Tokenizer) -> None:
    reply = Completion("cmpl-1", 7, "m", tokenizer, 2)
    piece = delta(tokenizer)
    expected = {
        "tokens": ["hello"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"hello": -0.5, "\ufffd": -9999.0}],
        "text_offset": [0],
    }
    assert reply.chunk(0, piece) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [{"index": 0, "text": "hello", "logprobs": expected, "finish_reason": None}],
    }
    whole = reply.whole([Choice(0, "hello", list(piece.entries), "stop")], Usage(2, 1), {})
    assert whole["choices"] == [{"index": 0, "text": "hello", "logprobs": expected, "finish_reason": "stop"}]
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert reply.opening(0) is None
    json.dumps(whole, allow_nan=False)


def test_chat_objects(tokenizer: Tokenizer) -> None:
    reply = ChatCompletion("chatcmpl-1", 7, "m", tokenizer, 1)
    piece = delta(tokenizer)
    rows = [
        {
            "token": "hello",
            "logprob": -0.5,
            "bytes": [*b"hello"],
            "top_logprobs": [
                {"token": "hello", "logprob": -0.5, "bytes": [*b"hello"]},
                {"token": "\ufffd", "logprob": -9999.0, "bytes": list(tokenizer.piece(0xC3))},
            ],
        }
    ]
    whole = reply.whole([Choice(0, "hello", list(piece.entries), "length")], Usage(2, 1), {})
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": {"content": rows, "refusal": None},
            "finish_reason": "length",
        }
    ]
    opening, chunk, closing = reply.opening(0), reply.chunk(0, piece), reply.closing(0, "stop", {})
    assert opening is not None
    assert opening["object"] == chunk["object"] == closing["object"] == "chat.completion.chunk"
    assert [entry["choices"][0]["delta"] for entry in (opening, chunk, closing)] == [
        {"role": "assistant", "content": ""},
        {"content": "hello"},
        {},
    ]
    assert [entry["choices"][0]["finish_reason"] for entry in (opening, chunk, closing)] == [None, None, "stop"]


def test_timings_survive_no_time_at_all() -> None:
    assert timings(FinishEvent("stop", 4, 0))["predicted_per_second"] == 0.0
    assert timings(FinishEvent("stop", 4, 2, 0.5, 0.25))["prompt_per_second"] == 8.0
