"""`drover load`: put a model onto its workers, prove that it lies there and computes, write a report, end.

The weights stay in the workers' caches, so that who loads the same model next sends none. Exit status 1 is a failure
that comes again, 3 one that may not.
"""

import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from drover import logs, reports
from drover.coordinator.__main__ import shares, words
from drover.coordinator.settings import CACHE_TYPES, Config
from drover.errors import ChecksumError, DroverError, ModelError, RequestError
from drover.herd import sigterm_unwinds
from drover.reports import LoadReport

log = structlog.get_logger()

if TYPE_CHECKING:
    from drover.coordinator.model_file import Stamp


def load(
    model: Annotated[Path, typer.Argument(help="The model: a GGUF file, or the first of its parts.")],
    rpc: Annotated[str, typer.Option(help="Workers to use, host:port,host:port, in the order of the layers.")],
    tensor_split: Annotated[
        str, typer.Option("--tensor-split", "-ts", help="Shares of the devices, e.g. 3,1 [default: free memory].")
    ] = "",
    ctx_size: Annotated[int | None, typer.Option("--ctx-size", "-c", min=1, help="Context in tokens.")] = None,
    parallel: Annotated[int, typer.Option(min=1, max=1024, help="Sequences in the KV cache at a time.")] = 1,
    cache_type_k: Annotated[str, typer.Option(help=f"Type of the K cache: {', '.join(CACHE_TYPES)}.")] = "f16",
    cache_type_v: Annotated[str, typer.Option(help="Type of the V cache.")] = "f16",
    report: Annotated[Path | None, typer.Option(help="Write the report here [default: standard output].")] = None,
    expect: Annotated[
        str | None, typer.Option(help='Layers each worker must hold: {"host:port": [first, last]}, or a file of that.')
    ] = None,
    sha256: Annotated[str | None, typer.Option(help="Hash that the model's file must have.")] = None,
    log_format: Annotated[str, typer.Option(help="console or json.")] = "console",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Load a model into its workers, prove that it lies there as planned and computes, and write a report."""
    logs.configure("json" if log_format == "json" else "console", verbose)
    config = Config(
        model=model,
        rpc=words(rpc),
        tensor_split=shares(tensor_split),
        context=ctx_size,
        parallel=parallel,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
    )
    with sigterm_unwinds():
        outcome, status = run(config, expect, sha256)
    reports.write(outcome, report)
    if not outcome.ok:
        print(f"drover: error: {outcome.reason}: {outcome.message}", file=sys.stderr)
        raise typer.Exit(status)


def run(config: Config, expect: str | None = None, sha256: str | None = None) -> tuple[LoadReport, int]:
    """The report and the exit status; no DroverError leaves."""
    from drover.coordinator import fingerprint
    from drover.coordinator.assembly import assemble
    from drover.coordinator.lifecycle import Lifecycle
    from drover.coordinator.proof import check_expected, prove

    known = LoadReport(ok=False, reason="", message="")
    try:
        expected = None if expect is None else check_expected(_json_of(expect))
        hashed = _check(config, sha256)
        with assemble(config, Lifecycle()) as running:
            known = dataclasses.replace(
                known,
                model=running.model,
                bytes_uploaded=sum(stage.uploaded for stage in running.stages),
                bytes_cached=sum(stage.cached for stage in running.stages),
                load_seconds=round(running.load_seconds, 3),
            )
            try:
                outcome = prove(running, expected, time.perf_counter)
                outcome = dataclasses.replace(outcome, fingerprint=fingerprint.of(running.file))
            finally:  # a file that changed explains whatever else is wrong
                running.file.check_unchanged(hashed)
    except DroverError as error:
        reason, status = reports.reason_of(error)
        return dataclasses.replace(known, reason=reason, message=str(error)), status
    speeds = {"tokens_per_second": outcome.tokens_per_second, "predicted": outcome.predicted_tokens_per_second}
    log.info("proved" if outcome.ok else "not proved", message=outcome.message, text=outcome.text, **speeds)
    return outcome, 0 if outcome.ok else reports.FAILED


def _check(config: Config, sha256: str | None) -> "dict[Path, Stamp]":
    """What can be checked before a worker is asked; the file that was hashed, if one was."""
    if not config.rpc:
        raise RequestError("--rpc names no worker; write host:port,host:port")
    return {} if sha256 is None else {config.model: _check_hash(config.model, sha256)}


def _json_of(text: str) -> object:
    try:
        data: object = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"--expect {text}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RequestError(f"--expect: not JSON: {error}") from None
    return data


def _check_hash(path: Path, wanted: str) -> "Stamp":
    from drover.coordinator.model_file import stamp_of

    log.info("hashing the model", file=str(path))
    try:
        with path.open("rb") as file:
            stamp = stamp_of(file.fileno())
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if found != wanted.lower():
        raise ChecksumError(f"{path} has the SHA-256 {found}, and should have {wanted}: another file, or damaged")
    return stamp
