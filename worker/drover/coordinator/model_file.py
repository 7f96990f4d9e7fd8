"""A GGUF model on disk: hyper-parameters, vocabulary and tensors, from one file or all its shards.

The door to the file: what is damaged is found here, when the file is opened. Tensor data is mapped and never read
here, so opening takes the same time for any size; `data` hands out views of the mapping.
"""

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from drover.coordinator.model_header import Header, check_magic, read_header
from drover.errors import ModelChangedError, ModelError
from drover.ggml.tensor import Shape
from drover.ggml.types import TensorType
from drover.sources import SHARD_NAME

T = TypeVar("T")

MAX_SHARDS = 99_999


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `offset` counts bytes from the start of the file with number `shard` (from 0)."""

    name: str
    type: TensorType
    ne: Shape
    nbytes: int
    shard: int
    offset: int


class Stamp(NamedTuple):
    """What tells a file from another one of its name, and from itself before it was written to."""

    device: int
    inode: int
    size: int
    written: int
    """In nanoseconds."""


class ModelFile:
    """An open model; a context manager. ModelError if a file is missing, damaged or not supported."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._shards = [_Shard(self.path)]
        try:
            self._open_siblings()
            self.metadata: dict[str, Any] = self._shards[0].header.metadata
            self.tensors: dict[str, TensorInfo] = self._collect()
            self.architecture: str = self.value("general.architecture", str)
        except BaseException:
            self.close()
            raise

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

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor as they lie in the file: a read-only view of the mapping."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path}: there is no tensor {name!r}")
        return self._shards[info.shard].view[info.offset : info.offset + info.nbytes]

    @property
    def views(self) -> list[memoryview]:
        """The whole of every file, in order, as it is mapped."""
        return [shard.view for shard in self._shards]

    def check_unchanged(self, known: Mapping[Path, Stamp] | None = None) -> None:
        """ModelChangedError unless the files are those that were opened, and those `known` before that.

        The mapping of a file that was replaced stays what it was; of one that was written to it may be half of either.
        """
        for shard in self._shards:
            before = (known or {}).get(shard.path, shard.stamp)
            if not before == shard.stamp == _stamp_now(shard.path):
                raise ModelChangedError(
                    f"{shard.path}: changed while it was being read; try again once it is there whole"
                )

    def close(self) -> None:
        """Let go of the files; views handed out before keep their mapping alive."""
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_siblings(self) -> None:
        """Open the other files of a split model, in order, whichever of them was named."""
        first = self._shards[0]
        count = first.number("split.count", 1)
        if count in (0, 1):  # 0 is what merging a split model leaves behind
            return
        match = SHARD_NAME.fullmatch(self.path.name)
        if match is None or int(match["count"]) != count or not 1 <= count <= MAX_SHARDS:
            raise ModelError(
                f"{self.path}: one of {count} files of a split model, but its name does not end in "
                f"-NNNNN-of-{count:05d}.gguf, so the others cannot be found: rename it"
            )
        paths = [self.path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise ModelError(
                f"{self.path.parent}: {len(missing)} of {count} files of the model are missing: "
                f"{', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}"
            )
        self._shards = []
        first.close()
        for number, path in enumerate(paths):
            self._shards.append(_Shard(path))
            self._shards[-1].check(number, count)

    def _collect(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for number, shard in enumerate(self._shards):
            for record in shard.header.tensors:
                if record.name in tensors:
                    other = self._shards[tensors[record.name].shard].path.name
                    raise ModelError(f"{shard.path}: tensor {record.name!r} is also in {other}")
                tensors[record.name] = TensorInfo(
                    record.name, record.type, record.ne, record.nbytes, number, record.offset
                )
        expected = self._shards[0].number("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise ModelError(f"{self.path}: {len(tensors)} tensors in all files, where {expected} should be")
        return tensors


class _Shard:
    """One mapped file and its header; errors begin with its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map, self.stamp = _map(path)
        self.view = memoryview(self._map)
        try:
            self.header: Header = read_header(self.view)
        except ModelError as error:
            self.close()
            raise ModelError(f"{path}: {error}") from None

    def number(self, key: str, default: int) -> int:
        """An integer of the metadata, or the default."""
        value = self.header.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: {key!r} is {value!r}, where a number is needed")
        return value

    def check(self, number: int, count: int) -> None:
        """Raise ModelError unless this is the shard its name says."""
        found = (self.number("split.no", 0), self.number("split.count", 1))
        if found != (number, count):
            raise ModelError(
                f"{self.path}: by its contents file {found[0] + 1} of {found[1]}, by its name {number + 1} of {count}: "
                f"a copy under a wrong name?"
            )

    def close(self) -> None:
        """Unmap, or leave that to the last view still in use."""
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


def stamp_of(descriptor: int) -> Stamp:
    """The stamp of an open file."""
    found = os.fstat(descriptor)
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _stamp_now(path: Path) -> Stamp | None:
    """The stamp of what has a name now; opened for it, since a network's file system may remember an older answer."""
    try:
        with path.open("rb") as file:
            return stamp_of(file.fileno())
    except OSError:
        return None


def _map(path: Path) -> tuple[mmap.mmap, Stamp]:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                check_magic(memoryview(b""))
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), stamp_of(file.fileno())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ModelError(f"{path}: a directory; name the .gguf file in it") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(f"{path}: cannot be read: {reason}") from None
