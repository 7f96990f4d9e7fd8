"""An InferenceCluster read from a YAML file: every error names the file's line and the field's path.

Only `load` touches a file; `faults` and `dotted` also serve the operator, whose objects have no lines.
"""

import difflib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from drover.errors import SpecError
from drover.spec import API_VERSION, KIND, FieldError, InferenceCluster, Path

_MOST_FIELDS = 10_000
_MOST_LEVELS = 32


def load(path: FilePath) -> InferenceCluster:
    """Read the one InferenceCluster of a YAML file; raises SpecError, one line for every fault."""
    root, data = _document(path)
    lines: dict[Path, int] = {}
    for place, line, fault in _walk(root, ()):
        if fault or len(lines) > _MOST_FIELDS:
            raise SpecError(f"{path}:{line}: {dotted(place)}: {fault or 'too many fields in one file'}")
        lines[place] = line
    _check_kind(data, path, lines)
    try:
        return InferenceCluster.model_validate(data)
    except ValidationError as error:
        where = [(_line(place, lines), place, text) for place, text in faults(error)]
        rows = [
            f"{path}:{line}: {dotted(place)}: {text}" for line, place, text in sorted(where, key=lambda row: row[0])
        ]
        raise SpecError("\n".join(rows)) from None


def faults(error: ValidationError) -> list[tuple[Path, str]]:
    """Where and what, of every fault that validation found, in words for people."""
    return [_fault(details) for details in error.errors()]


def dotted(place: Path) -> str:
    """A path for people: `spec.workers[0].memory`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.lstrip(".") or "the file"


def _document(path: FilePath) -> tuple[yaml.Node, object]:
    """The file's one document, as nodes that know their lines and as plain values."""
    try:
        text = path.read_text(encoding="utf-8")
        documents = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
        if len(documents) == 1:
            return documents[0], yaml.SafeLoader("").construct_document(documents[0])
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not a text file: byte {error.start} is not UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise SpecError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise SpecError(f"{path}: not valid YAML: nested too deeply") from None
    if not documents:
        raise SpecError(f"{path}: the file is empty; give it one {KIND}")
    line = documents[1].start_mark.line + 1
    raise SpecError(f"{path}:{line}: a second document starts here; give each {KIND} a file of its own")


def _walk(node: yaml.Node, place: Path, line: int | None = None) -> Iterator[tuple[Path, int, str | None]]:
    """Every field's path and line, a key's own where it has one; with a fault where the mapping itself is wrong."""
    yield place, line or node.start_mark.line + 1, "nested too deeply" if len(place) > _MOST_LEVELS else None
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*place, index))
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            here, at = (*place, str(key.value)), key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                yield place, at, "every key must be plain text"
            if key.value in seen:
                yield here, at, "stands here twice"
            seen.add(key.value)
            yield from _walk(value, here, at)


def _check_kind(data: object, path: FilePath, lines: dict[Path, int]) -> None:
    """A file of another kind gets one line, not one for each field that it lacks."""
    if not isinstance(data, dict):
        raise SpecError(f"{path}:1: expected a mapping with apiVersion, kind, metadata and spec")
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if data.get(field) != wanted:
            found = repr(data[field]) if field in data else "missing"
            raise SpecError(f"{path}:{lines.get((field,), 1)}: {field}: expected {wanted}, found {found}")


def _line(place: Path, lines: dict[Path, int]) -> int:
    """The line of a field, or of the nearest one around it that stands in the file."""
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 1)


def _fault(details: ErrorDetails) -> tuple[Path, str]:
    """Where and what, from one pydantic error."""
    place: Path = details["loc"]
    error = details.get("ctx", {}).get("error")
    if isinstance(error, FieldError):
        return (*place, *error.place), str(error)
    if isinstance(error, ValueError):
        return place, str(error)
    say = _WORDS.get(details["type"])
    return place, say(details) if say else f"{details['input']!r}: {details['msg'].lower()}"


def _unknown(details: ErrorDetails) -> str:
    fields = _fields_around(details["loc"])
    near = difflib.get_close_matches(str(details["loc"][-1]), fields, n=1, cutoff=0.5)
    return f"unknown field; did you mean {near[0]!r}?" if near else f"unknown field; known are {', '.join(fields)}"


def _fields_around(place: Path) -> list[str]:
    """The names that may stand beside the last part of a path."""
    model: type[BaseModel] = InferenceCluster
    for part in place[:-1]:
        if isinstance(part, str):
            model = _model_in({f.alias: f.annotation for f in model.model_fields.values()}[part]) or model
    return [str(field.alias) for field in model.model_fields.values()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside `X`, `X | None` or `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)


def _input(what: str) -> Callable[[ErrorDetails], str]:
    return lambda details: f"{details['input']!r} is not {what}"


def _limit(words: str, key: str) -> Callable[[ErrorDetails], str]:
    return lambda details: f"{details['input']!r} is out of range; it must be {words} {details['ctx'][key]}"


_WORDS: dict[str, Callable[[ErrorDetails], str]] = {
    "missing": lambda details: "is missing",
    "extra_forbidden": _unknown,
    "literal_error": lambda details: f"{details['input']!r} is not one of {details['ctx']['expected']}",
    "string_pattern_mismatch": lambda details: f"{details['input']!r} does not match {details['ctx']['pattern']}",
    "string_type": _input("text (quote it)"),
    "int_type": _input("a whole number"),
    "float_type": _input("a number"),
    "bool_type": _input("true or false"),
    "list_type": _input("a list"),
    "model_type": _input("a mapping"),
    "string_too_short": lambda details: "must not be empty",
    "too_short": lambda details: "must not be empty",
    "greater_than": _limit("above", "gt"),
    "greater_than_equal": _limit("at least", "ge"),
    "less_than_equal": _limit("at most", "le"),
}
