"""What a folder holds of a source already, so that fetching it again asks nobody: a small file beside the model."""

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model in a folder: its file, or the first of its parts; bytes of all of them, the hash of the first."""

    path: Path
    bytes: int
    sha256: str
    architecture: str
    layers: int | None


@dataclass(frozen=True, slots=True)
class _Receipt:
    source: str
    sizes: dict[str, int]
    sha256: str
    architecture: str
    layers: int | None


def find(folder: Path, name: str, source: str, sha256: str | None) -> Fetched | None:
    """The model, if it came from this source, is all there, and has this hash if one is wanted."""
    with suppress(OSError, ValueError, TypeError):
        receipt = _Receipt(**json.loads(_path(folder, name).read_text(encoding="utf-8")))
        there = all((folder / part).stat().st_size == size for part, size in receipt.sizes.items())
        if there and receipt.source == source and sha256 in (None, receipt.sha256):
            total = sum(receipt.sizes.values())
            return Fetched(folder / name, total, receipt.sha256, receipt.architecture, receipt.layers)
    return None


def write(folder: Path, source: str, sizes: dict[str, int], fetched: Fetched) -> None:
    """Note what came from where; to be called once all is there."""
    receipt = _Receipt(source, sizes, fetched.sha256, fetched.architecture, fetched.layers)
    _path(folder, fetched.path.name).write_text(json.dumps(dataclasses.asdict(receipt)), encoding="utf-8")


def _path(folder: Path, name: str) -> Path:
    return folder / f".{name}.fetched.json"
