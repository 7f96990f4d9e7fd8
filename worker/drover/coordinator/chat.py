"""Chat messages to prompt text, by the template in the model file.

A template is a program from a stranger: it runs in jinja2's immutable sandbox, and whatever goes wrong in it is a
RequestError. The only import of `jinja2`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Self

import structlog
from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from drover.coordinator.model_file import ModelFile
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import RequestError

TEMPLATE_KEY = "tokenizer.chat_template"

# For models without a template of their own: ChatML where the vocabulary has its markers, else plain lines.
CHATML_MARKER = "<|im_start|>"
CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN = """\
{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}

{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""

Message = Mapping[str, Any]


class ChatTemplate:
    """How one model wants a conversation written down."""

    def __init__(self, source: str, bos: str = "", eos: str = "", clock: Callable[[], datetime] = datetime.now) -> None:
        self._tokens = {"bos_token": bos, "eos_token": eos}
        environment = _environment(clock)
        self.problem: str | None = None
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            self.problem = f"the model's chat template cannot be used: {error}{line}"
            structlog.get_logger().warning("chat template is broken", reason=self.problem)

    @classmethod
    def from_model(cls, model: ModelFile, tokenizer: Tokenizer) -> Self:
        """The template in the file, or a plain default; a broken one is reported when it is used."""
        source = model.metadata.get(TEMPLATE_KEY)
        if not isinstance(source, str) or not source.strip():
            source = CHATML if tokenizer.id_of(CHATML_MARKER) is not None else PLAIN
        return cls(source, _text(tokenizer, tokenizer.bos), _text(tokenizer, tokenizer.eos))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt for a conversation, markers included; `kwargs` are further variables of the template.

        RequestError if a message is malformed or the template refuses the conversation."""
        if self.problem is not None:
            raise RequestError(f"{self.problem}; use /v1/completions")
        if not messages:
            raise RequestError("messages is empty; send at least one", "messages")
        variables = {
            **kwargs,
            **self._tokens,
            "messages": [_plain(message, number) for number, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # a template can raise anything at all
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the model's own words for training: here it only passes them on."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the tag by what is in it."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """What templates expect around them, as Hugging Face's tools have it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: clock().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _plain(message: Message, number: int) -> dict[str, Any]:
    """The message with its content as one string: templates disagree about anything else."""
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is not an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is missing", f"{where}.role")
    return {**message, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(f"{where}: only text parts are supported, not {kind or type(part).__name__!r}", where)
    text: str = part["text"]
    return text


def _text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.text(token)
