"""The head of a GGUF file by HTTP range: whether it is worth downloading, before it is downloaded."""

from dataclasses import dataclass, replace

from drover.coordinator.architectures import READERS
from drover.coordinator.model_header import Header, ShortError, check_magic, read_header, read_metadata
from drover.errors import ArchitectureError, FetchError, ModelError
from drover.fetch import web
from drover.fetch.locate import Remote

FIRST_BYTES = 1 << 20
MOST_BYTES = 256 << 20
_GROWTH = 4

OLLAMA_NAMES = {"glm4moelite": "deepseek2", "gptoss": "gpt-oss", "qwen25vl": "qwen2vl"}
"""Architectures that Ollama's files call otherwise than llama.cpp does."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A file before it is downloaded: what the server says of it, and what its head says of the model."""

    remote: Remote
    etag: str | None
    architecture: str | None = None
    layers: int | None = None


def preview(remote: Remote) -> Preview:
    """Read and check the head of a model, the first of its files if it is split.

    ModelError if it is no sound GGUF file, ArchitectureError if the model is none that we load.
    """
    return head(remote)[0]


def head(remote: Remote, first: bool = True) -> tuple[Preview, Header]:
    """The same, with the head itself; only the `first` file of a split model says which architecture it has."""
    wanted = FIRST_BYTES
    while True:
        data, found = _beginning(remote, wanted)
        try:
            architecture, layers = _facts(data, found.remote) if first else (None, None)
            header = read_header(memoryview(data), found.remote.size)
        except ShortError as error:
            if len(data) < wanted or wanted >= MOST_BYTES:
                raise ModelError(f"{remote.url}: {error}") from None
            wanted *= _GROWTH
            continue
        except ModelError as error:
            if isinstance(error, ArchitectureError):
                raise
            raise ModelError(f"{remote.url}: {error}") from None
        return replace(found, architecture=architecture, layers=layers), header


def glance(remote: Remote) -> Preview:
    """The same for the other files of a split model: only that it is there, and a GGUF file."""
    data, found = _beginning(remote, 64)
    try:
        check_magic(memoryview(data))
    except ModelError as error:
        raise ModelError(f"{remote.url}: {error}") from None
    return found


def _beginning(remote: Remote, count: int) -> tuple[bytes, Preview]:
    parts, left = [], count
    with web.get(remote.url, token=remote.token, end=count) as answer:
        while left > 0 and (piece := answer.read(min(left, 1 << 20))):
            parts.append(piece)
            left -= len(piece)
        size = remote.size if answer.size is None else answer.size
        if remote.size is not None and size != remote.size:
            raise FetchError(
                f"{remote.url} has {size} bytes, where its source says {remote.size}",
                "SourceUnavailable",
                transient=True,
            )
        return b"".join(parts), Preview(replace(remote, size=size), answer.etag)


def _facts(data: bytes, remote: Remote) -> tuple[str, int | None]:
    """Architecture and number of layers."""
    metadata = read_metadata(memoryview(data))
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError("the file does not say what architecture it has")
    if architecture not in READERS:
        raise ArchitectureError(_unsupported(remote.name, architecture), architecture)
    layers = metadata.get(f"{architecture}.block_count")
    return architecture, layers if type(layers) is int else None


def _unsupported(name: str, architecture: str) -> str:
    known = ", ".join(sorted(READERS))
    other = OLLAMA_NAMES.get(architecture)
    hint = (
        f"; that is Ollama's own name for what llama.cpp calls {other!r}, so no client of llama.cpp loads this file: "
        "take a GGUF file made by llama.cpp, e.g. from hf://"
        if other
        else ""
    )
    return f"{name}: architecture {architecture!r} is not supported; supported: {known}{hint}"
