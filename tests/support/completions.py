"""Greedy completions asked of running servers over HTTP, and their comparison token by token.

Two honest implementations may disagree where the two best tokens are all but equal; such a place is reported, and the
comparison goes on behind it with the reference's token. How equal depends on the sums: where they are formed in another
order, results differ in the last bit, and where activations are then rounded to 8 bits (for quantized weights, or into
a quantized cache), that now and then flips a rounding, which is a thousand times larger.
"""

import json
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NEAR_TIE = 0.001
"""Lead in log-probability up to which two tokens count as equal."""
ROUNDED_TIE = 0.15
"""The same where sums are formed in another order and then rounded to 8 bits: stock llama.cpp's own two ways of
multiplying quantized weights (repacked or not) disagree up to here on the demo model."""
TIMEOUT = 120


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token: its text, and how far (in log-probability) the runner-up was behind."""

    id: int
    text: str
    margin: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where another token came out than the reference's."""

    prompt: str
    position: int
    expected: Token
    got: str
    tolerable: bool
    """Whether the reference itself was undecided there."""

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt[:40]!r}, token {self.position}: {self.got!r} instead of {self.expected.text!r}, "
            f"whose lead was {self.expected.margin:.6f}"
        )


Ask = Callable[[Sequence[int], int], list[str]]
"""Prompt token ids and a number of tokens -> the texts of the tokens that followed."""


def compare(
    prompt: str, prompt_ids: Sequence[int], reference: Sequence[Token], ask: Ask, tie: float
) -> list[Difference]:
    """Every difference; those where the reference's lead is above `tie` end the comparison of this prompt."""
    differences: list[Difference] = []
    start = 0
    while start < len(reference):
        known = [token.id for token in reference[:start]]
        texts = ask([*prompt_ids, *known], len(reference) - start)
        expected = [token.text for token in reference[start:]]
        if texts == expected:
            break
        at = _first_difference(texts, expected)
        got = texts[at] if at < len(texts) else "(the end)"
        token = reference[start + at]
        differences.append(Difference(prompt, start + at, token, got, token.margin <= tie))
        if not differences[-1].tolerable:
            break
        start += at + 1
    return differences


def stock_tokenize(port: int, text: str) -> list[int]:
    """Token ids of a text, special tokens added, by a stock llama-server."""
    tokens: list[int] = post(port, "/tokenize", {"content": text, "add_special": True})["tokens"]
    return tokens


def stock_complete(port: int, prompt: Sequence[int] | str, count: int, **options: Any) -> list[Token]:
    """Greedy tokens of a stock llama-server, with margins."""
    return generated_tokens(post(port, "/completion", completion_request(prompt, count, **options)))


def completion_request(prompt: Sequence[int] | str, count: int, **options: Any) -> dict[str, Any]:
    """What to ask a stock llama-server for greedy tokens and their margins."""
    text_or_ids = prompt if isinstance(prompt, str) else list(prompt)
    asked = {"prompt": text_or_ids, "n_predict": count, "temperature": 0, "n_probs": 2, "cache_prompt": False}
    return {**asked, **options}


def generated_tokens(reply: dict[str, Any]) -> list[Token]:
    """The tokens in an answer to `completion_request`; one that ended the text is not part of it."""
    tokens = [_stock_token(entry) for entry in reply["completion_probabilities"]]
    return tokens[:-1] if reply["stop_type"] == "eos" else tokens


def stock_texts(port: int) -> Ask:
    """How to ask a stock llama-server in a comparison."""
    return lambda prompt, count: [token.text for token in stock_complete(port, prompt, count)]


def drover_texts(port: int) -> Ask:
    """How to ask a Drover coordinator in a comparison."""

    def ask(prompt: Sequence[int], count: int) -> list[str]:
        request = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "logprobs": 1}
        reply = post(port, "/v1/completions", request)
        texts: list[str] = reply["choices"][0]["logprobs"]["tokens"]
        return texts

    return ask


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer to a JSON request; any status but 200 raises."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


def _stock_token(entry: dict[str, Any]) -> Token:
    first, second = (candidate["logprob"] for candidate in entry["top_logprobs"][:2])
    return Token(entry["id"], bytes(entry["bytes"]).decode(errors="replace"), first - second)


def _first_difference(texts: Sequence[str], expected: Sequence[str]) -> int:
    for at, (one, other) in enumerate(zip(texts, expected, strict=False)):
        if one != other:
            return at
    return min(len(texts), len(expected))
