"""Chat templates: the environment they expect, and what is refused."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from drover.coordinator.chat import CHATML, PLAIN, ChatTemplate
from drover.coordinator.model_file import ModelFile
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import RequestError
from support.vocabularies import NORMAL, write_byte_vocabulary, write_vocabulary

TALK = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Say SWORDFISH."}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>", lambda: datetime(2026, 2, 3)).render(TALK, **variables)


def load(path: Path) -> tuple[ModelFile, ChatTemplate]:
    with ModelFile(path) as model:
        return model, ChatTemplate.from_model(model, Tokenizer.from_model(model))


def test_variables_and_filters_of_templates() -> None:
    assert render("{{ bos_token }}{{ messages[1].content }}{{ eos_token }}") == "<s>Say SWORDFISH.</s>"
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"
    assert render("{{ {'é': '<b>'} | tojson }}") == '{"é": "<b>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% if add_generation_prompt %}go{% endif %}", add_generation_prompt=False) == ""
    assert render("{{ mood }}", mood="calm", messages_are="ignored") == "calm"
    assert (
        render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}") == "user"
    )
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("a\n{% if true %}\n  {% set x = 1 %}\nb{% endif %}") == "a\nb"


def test_own_template_of_the_file(tmp_path: Path) -> None:
    path = write_byte_vocabulary(tmp_path / "m.gguf", **{"tokenizer.chat_template": "{{ bos_token }}!"})
    assert load(path)[1].render(TALK) == "<s>!"


def test_defaults_without_a_template(tmp_path: Path) -> None:
    chatml = load(write_byte_vocabulary(tmp_path / "chatml.gguf"))[1].render(TALK)
    assert chatml == ChatTemplate(CHATML).render(TALK)
    assert chatml.endswith("<|im_start|>user\nSay SWORDFISH.<|im_end|>\n<|im_start|>assistant\n")
    tokens = [("a", NORMAL, 0.0), ("b", NORMAL, 0.0), ("ab", NORMAL, 0.0)]
    plain = load(write_vocabulary(tmp_path / "plain.gguf", tokens, model="llama"))[1].render(TALK)
    assert plain == ChatTemplate(PLAIN).render(TALK)
    assert plain == "System: Be terse.\n\nUser: Say SWORDFISH.\n\nAssistant:"


def test_content_as_parts() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    assert template.render([{"role": "assistant", "content": None, "tool_calls": []}]) == ""


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ({"content": "x"}, "messages[0].role", "role is missing"),
        ({"role": 3, "content": "x"}, "messages[0].role", "role is missing"),
        ({"role": "user", "content": 3}, "messages[0].content", "a string or a list of text parts"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]", "only text parts"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]", "only text parts"),
        ({"role": "user", "content": [7]}, "messages[0].content[0]", "not 'int'"),
    ],
)
def test_malformed_messages(message: dict[str, Any], param: str, expected: str) -> None:
    with pytest.raises(RequestError, match=expected) as caught:
        ChatTemplate(PLAIN).render([message])
    assert caught.value.param == param


def test_no_messages() -> None:
    with pytest.raises(RequestError, match="messages is empty"):
        ChatTemplate(PLAIN).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content.nope() }}",
    ],
)
def test_whatever_a_template_does_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nonsense %}", "{{ x | no_such_filter }}"])
def test_a_broken_template_is_reported_when_used(source: str) -> None:
    template = ChatTemplate(source)
    assert template.problem is not None
    with pytest.raises(RequestError, match=r"chat template cannot be used.*use /v1/completions"):
        template.render(TALK)


@pytest.mark.timeout(900)  # the first one may fetch the vocabularies
def test_templates_of_real_models(vocabularies: Path) -> None:
    sources = sorted((vocabularies / "templates").glob("*.jinja"))
    assert len(sources) >= 60
    for path in sources:
        template = ChatTemplate(path.read_text(encoding="utf-8"), "<s>", "</s>")
        talk = TALK[1:] if "gemma-2" in path.name else TALK  # it has no system role
        extra: dict[str, Any] = {"functions": "[]", "datetime": "now"} if "firefunction" in path.name else {}
        text = template.render(talk, **extra)
        assert "SWORDFISH" in text, path.name
