"""The walk from a source to a model in a folder: known already? where? worth it? then file by file."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from drover.errors import FetchError
from drover.fetch import receipt
from drover.fetch.locate import OLLAMA_REGISTRY, locate
from drover.fetch.preview import glance, preview
from drover.fetch.receipt import Fetched
from drover.fetch.transfer import Clock, publish, require_room, transfer
from drover.sources import file_name, parse, shard_names

log = structlog.get_logger()


def fetch(source: str, folder: Path, *, sha256: str | None = None, token: str | None = None) -> Path:
    """The model of a source as a file in a folder, downloaded unless it is there; if it is split, the first part.

    FetchError or ModelError if it cannot be had, or is none that we load.
    """
    return obtain(source, folder, sha256=sha256, token=token).path


def obtain(
    source: str,
    folder: Path,
    *,
    sha256: str | None = None,
    token: str | None = None,
    registry: str = OLLAMA_REGISTRY,
    clock: Clock = Clock(),  # noqa: B008  it is frozen
) -> Fetched:
    """The same, and what is known of the model; `sha256` is that of its file, of the first if it is split."""
    place = parse(source)
    name = shard_names(file_name(place))[0]
    wanted = None if sha256 is None else sha256.lower()
    with _alone(folder, name):
        found = receipt.find(folder, name, source, wanted)
        if found is not None:
            log.info("model is there already", file=str(found.path), bytes=found.bytes)
            return found
        first, *others = locate(place, token, registry, wanted)
        head = preview(first)
        log.info("model found", url=first.url, bytes=head.remote.size, architecture=head.architecture)
        parts = [head, *map(glance, others)]
        require_room(parts, folder)
        sizes, hashes = {}, []
        for part in parts:
            digest, sizes[part.remote.name] = transfer(part, folder, wanted if part is head else None, clock)
            hashes.append(digest)
        publish(parts, folder)
        assert head.architecture is not None
        fetched = Fetched(folder / name, sum(sizes.values()), hashes[0], head.architecture, head.layers)
        receipt.write(folder, source, sizes, fetched)
    log.info("model fetched", file=str(fetched.path), bytes=fetched.bytes, sha256=fetched.sha256)
    return fetched


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """One process at a time fetches a model into a folder, where the file system can tell."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".{name}.lock").open("w")
    except OSError as error:
        raise FetchError(f"{folder} cannot be written: {error.strerror}", "NotWritable") from None
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
