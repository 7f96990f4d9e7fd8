"""`drover fetch`: a model into a folder, or only what its head says; and a report.

Exit status 1 is a failure that comes again, 3 one that may not.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from drover import logs, reports
from drover.coordinator.settings import CACHE_TYPES, Config
from drover.errors import ArchitectureError, DroverError
from drover.fetch.receipt import Fetched
from drover.herd import sigterm_unwinds
from drover.reports import FetchReport, HeaderReport
from drover.sizes import format_size


def fetch(
    source: Annotated[
        str, typer.Argument(help="hf://org/repo/file.gguf[@revision], https://…/file.gguf or ollama://name[:tag].")
    ],
    into: Annotated[Path | None, typer.Option(help="Folder for the model.")] = None,
    header_only: Annotated[
        bool, typer.Option("--header-only", help="Only say what the model takes; read no more than its files' heads.")
    ] = False,
    ctx_size: Annotated[
        int | None, typer.Option("--ctx-size", "-c", min=1, help="With --header-only: context in tokens.")
    ] = None,
    parallel: Annotated[
        int, typer.Option(min=1, max=1024, help="With --header-only: sequences in the KV cache at a time.")
    ] = 1,
    cache_type_k: Annotated[
        str, typer.Option(help=f"With --header-only: type of the K cache: {', '.join(CACHE_TYPES)}.")
    ] = "f16",
    cache_type_v: Annotated[str, typer.Option(help="With --header-only: type of the V cache.")] = "f16",
    sha256: Annotated[str | None, typer.Option(help="Hash that the file must have.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with a token for the source.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report here [default: standard output].")] = None,
    ollama_registry: Annotated[
        str | None, typer.Option(envvar="DROVER_OLLAMA_REGISTRY", help="Another registry for ollama://.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="console or json.")] = "json",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Download a GGUF model, checked before and after; what is there already is not asked for again."""
    logs.configure("json" if log_format == "json" else "console", verbose)
    if header_only == (into is not None):
        raise typer.BadParameter("give a folder, or --header-only, and not both", param_hint="--into")
    config = Config(
        Path(source), context=ctx_size, parallel=parallel, cache_type_k=cache_type_k, cache_type_v=cache_type_v
    )
    with sigterm_unwinds():
        outcome, status = run(source, into or config, sha256, token_file, ollama_registry)
    reports.write(outcome, report)
    if not outcome.ok:
        print(f"drover: error: {outcome.reason}: {outcome.message}", file=sys.stderr)
        raise typer.Exit(status)


def run(
    source: str, wanted: Path | Config, sha256: str | None, token_file: Path | None, registry: str | None
) -> tuple[FetchReport | HeaderReport, int]:
    """The report and the exit status, of a download into a folder or of what a coordinator so configured would need.

    No DroverError leaves.
    """
    from drover.fetch.fetching import obtain
    from drover.fetch.locate import OLLAMA_REGISTRY
    from drover.fetch.measuring import measure

    registry = registry or OLLAMA_REGISTRY
    try:
        token = None if token_file is None else _token(token_file)
        if isinstance(wanted, Config):
            return measure(source, wanted, sha256=sha256, token=token, registry=registry), 0
        return _report(obtain(source, wanted, sha256=sha256, token=token, registry=registry)), 0
    except DroverError as error:
        reason, status = reports.reason_of(error)
        architecture = error.architecture if isinstance(error, ArchitectureError) else None
        kind = HeaderReport if isinstance(wanted, Config) else FetchReport
        return kind(False, reason, str(error), architecture=architecture), status


def _report(found: Fetched) -> FetchReport:
    message = f"{found.path.name}, {format_size(found.bytes)}, {found.architecture}"
    path = str(found.path.absolute())
    return FetchReport(True, "Fetched", message, path, found.bytes, found.sha256, found.architecture, found.layers)


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DroverError(f"--token-file {path}: cannot be read: {error}") from None
