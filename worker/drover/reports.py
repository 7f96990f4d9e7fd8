"""Reports of commands that end: one JSON object of at most 4096 bytes, what Kubernetes takes as a termination message.

`drover load` and `drover fetch` write them, the operator reads them. Keys are camelCase. Only `write` touches a file.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover.errors import (
    ArchitectureError,
    ChecksumError,
    DeviceError,
    DroverError,
    FetchError,
    IncompatibleWorkerError,
    ModelChangedError,
    ModelError,
    ModelReplacedError,
    PlanError,
    RequestError,
    ResultError,
    ShortageError,
    WorkerError,
)

MAX_BYTES = 4096
FAILED = 1
"""Exit status of a failure that comes again."""
RETRY = 3
"""Exit status of a failure that may be gone at the next attempt."""
REPLACED = 4
"""Exit status of `drover serve` where the model's file has another fingerprint than it was told."""
_TEXT_LIMITS = (1000, 400, 160)

REASONS: tuple[tuple[type[DroverError], str, int], ...] = (
    (IncompatibleWorkerError, "IncompatibleWorker", FAILED),
    (WorkerError, "WorkerUnavailable", RETRY),
    (DeviceError, "OutOfMemory", FAILED),
    (ArchitectureError, "UnsupportedArchitecture", FAILED),
    (ChecksumError, "ChecksumMismatch", FAILED),
    (ModelChangedError, "ModelChanged", RETRY),
    (ModelReplacedError, "ModelReplaced", REPLACED),
    (ModelError, "ModelUnreadable", FAILED),
    (ShortageError, "DoesNotFit", FAILED),
    (PlanError, "InvalidSplit", FAILED),
    (ResultError, "WrongResults", FAILED),
    (RequestError, "InvalidSettings", FAILED),
    (DroverError, "Failed", FAILED),
)
"""Kind of error -> reason and exit status; the first row that fits counts."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a GGUF file holds; bytes of all its tensors."""

    architecture: str
    layers: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StageReport:
    """What lies on one device, in bytes: weights and KV cache; its free memory as it says; what went over the wire."""

    worker: str
    device: int
    layers: str
    bytes: int
    memory_before: int
    memory_after: int
    wire_sent: int
    wire_received: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How `drover load` ended; what it did not come to is None or empty."""

    ok: bool
    reason: str
    message: str
    model: ModelFacts | None = None
    stages: tuple[StageReport, ...] = ()
    bytes_uploaded: int | None = None
    bytes_cached: int | None = None
    load_seconds: float | None = None
    prompt_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    predicted_tokens_per_second: float | None = None
    text: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class FetchReport:
    """How `drover fetch` ended; what it did not come to is None."""

    ok: bool
    reason: str
    message: str
    path: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    architecture: str | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class HeaderReport:
    """How `drover fetch --header-only` ended: the model before it is downloaded; what it did not come to is None.

    `bytes` of all its files, `sha256` of the first if its source tells it. `units` are what `drover.plan.split` lays
    over devices, as `drover.plan.packed` writes it: [bytes, how often] for each run of units of one size, KV cache
    included; `reserve` is the compute memory that it keeps free on each.
    """

    ok: bool
    reason: str
    message: str
    bytes: int | None = None
    sha256: str | None = None
    architecture: str | None = None
    layers: int | None = None
    units: tuple[tuple[int, int], ...] | None = None
    reserve: int | None = None


Report = LoadReport | FetchReport | HeaderReport


def reason_of(error: DroverError) -> tuple[str, int]:
    """The one-word reason for machines, and the exit status."""
    if isinstance(error, FetchError):
        return error.reason, RETRY if error.transient else FAILED
    return next((reason, status) for kind, reason, status in REASONS if isinstance(error, kind))


def encode(report: Report) -> str:
    """One line of JSON within the limit: long texts are cut first, then stages are left out from the end.

    Units are of use only if all are there, so they are left out together.
    """
    data = _camel(dataclasses.asdict(report))
    for limit in _TEXT_LIMITS:
        if _size(data) <= MAX_BYTES:
            break
        for key in ("text", "message"):
            if len(data.get(key) or "") > limit:
                data[key] = data[key][: limit - 1] + "…"
    stages = data.get("stages")
    while stages and _size(data) > MAX_BYTES:
        stages.pop()
        data["stagesLeftOut"] = data.get("stagesLeftOut", 0) + 1
    if data.get("units") and _size(data) > MAX_BYTES:
        data["units"] = None
    return _text(data)


def write(report: Report, path: Path | None) -> None:
    """Put a report into a file, or on standard output; DroverError if the file cannot be written."""
    line = encode(report)
    if path is None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        return
    try:
        path.write_text(line, encoding="utf-8")
    except OSError as error:
        raise DroverError(f"the report cannot be written to {path}: {error.strerror or error}") from None


def _camel(value: Any) -> Any:
    if isinstance(value, dict):
        return {_camel_name(key): _camel(inner) for key, inner in value.items()}
    return [_camel(inner) for inner in value] if isinstance(value, list | tuple) else value


def _camel_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _size(data: dict[str, Any]) -> int:
    return len(_text(data).encode())
