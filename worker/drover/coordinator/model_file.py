"""A GGUF model on disk: its index, and the bytes of its tensors, from one file or all its shards.

The door to the file: what is damaged is found here, when the file is opened. Tensor data is mapped and never read
here, so opening takes the same time for any size; `data` hands out views of the mapping.
"""

import contextlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from drover.coordinator.model_header import check_magic, read_header
from drover.coordinator.model_index import ModelIndex, Part
from drover.errors import ModelChangedError, ModelError
from drover.sources import SHARD_NAME

MAX_SHARDS = 99_999


class Stamp(NamedTuple):
    """What tells a file from another one of its name, and from itself before it was written to."""

    device: int
    inode: int
    size: int
    written: int
    """In nanoseconds."""


class ModelFile(ModelIndex):
    """An open model; a context manager. ModelError if a file is missing, damaged or not supported."""

    def __init__(self, path: str | Path) -> None:
        self._shards = [_Shard(Path(path))]
        try:
            self._open_siblings()
            super().__init__([shard.part for shard in self._shards])
        except BaseException:
            self.close()
            raise

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
        count = first.part.number("split.count", 1)
        if count in (0, 1):
            return
        match = SHARD_NAME.fullmatch(first.path.name)
        if match is None or int(match["count"]) != count or not 1 <= count <= MAX_SHARDS:
            raise ModelError(
                f"{first.path}: one of {count} files of a split model, but its name does not end in "
                f"-NNNNN-of-{count:05d}.gguf, so the others cannot be found: rename it"
            )
        paths = [first.path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise ModelError(
                f"{first.path.parent}: {len(missing)} of {count} files of the model are missing: "
                f"{', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}"
            )
        self._shards = []
        first.close()
        for path in paths:
            self._shards.append(_Shard(path))


class _Shard:
    """One mapped file and its header; errors begin with its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map, self.stamp = _map(path)
        self.view = memoryview(self._map)
        try:
            self.part = Part(path, path.name, read_header(self.view))
        except ModelError as error:
            self.close()
            raise ModelError(f"{path}: {error}") from None

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
