"""A model as the headers of its files describe it, wherever the files are: metadata, and the tensors of all of them.

No I/O here. What is wrong with the headers, alone or together, is found when the index is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drover.coordinator.model_header import Header
from drover.errors import ModelError
from drover.ggml.tensor import Shape
from drover.ggml.types import TensorType

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `offset` counts bytes from the start of the file with number `shard` (from 0)."""

    name: str
    type: TensorType
    ne: Shape
    nbytes: int
    shard: int
    offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a model: where it is, its name for people, and its header; errors begin with `path`."""

    path: Path | str
    name: str
    header: Header

    def number(self, key: str, default: int) -> int:
        """An integer of the metadata, or the default."""
        value = self.header.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: {key!r} is {value!r}, where a number is needed")
        return value


class ModelIndex:
    """What the parts of a model say of it, in order; `path` is that of the first. ModelError if they do not agree."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.path: Path | str = parts[0].path
        self.metadata: dict[str, Any] = parts[0].header.metadata
        _check_order(parts)
        self.tensors: dict[str, TensorInfo] = _collect(parts)
        self.architecture: str = self.value("general.architecture", str)

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value of the given Python type; ModelError if it is absent without default, or of another type."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: the file has no {key!r}")
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path}: {key!r} is a {type(value).__name__}, where a {kind.__name__} is needed")
        return value


def _check_order(parts: Sequence[Part]) -> None:
    """Raise ModelError unless each part is the one that its place says."""
    if len(parts) == 1 and parts[0].number("split.count", 1) in (0, 1):  # 0 is what merging a split model leaves behind
        return
    for number, part in enumerate(parts):
        found = (part.number("split.no", 0), part.number("split.count", 1))
        if found != (number, len(parts)):
            raise ModelError(
                f"{part.path}: by its contents file {found[0] + 1} of {found[1]}, by its name {number + 1} of "
                f"{len(parts)}: a copy under a wrong name?"
            )


def _collect(parts: Sequence[Part]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        for record in part.header.tensors:
            if record.name in tensors:
                other = parts[tensors[record.name].shard].name
                raise ModelError(f"{part.path}: tensor {record.name!r} is also in {other}")
            tensors[record.name] = TensorInfo(record.name, record.type, record.ne, record.nbytes, number, record.offset)
    expected = parts[0].number("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{parts[0].path}: {len(tensors)} tensors in all files, where {expected} should be")
    return tensors
