"""`drover fetch`: a model into a folder, and a report.

Exit status 1 is a failure that comes again, 3 one that may not.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from drover import logs, reports
from drover.errors import ArchitectureError, DroverError
from drover.herd import sigterm_unwinds
from drover.reports import FetchReport
from drover.sizes import format_size


def fetch(
    source: Annotated[
        str, typer.Argument(help="hf://org/repo/file.gguf[@revision], https://…/file.gguf or ollama://name[:tag].")
    ],
    into: Annotated[Path, typer.Option(help="Folder for the model.")],
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
    with sigterm_unwinds():
        outcome, status = run(source, into, sha256, token_file, ollama_registry)
    reports.write(outcome, report)
    if not outcome.ok:
        print(f"drover: error: {outcome.reason}: {outcome.message}", file=sys.stderr)
        raise typer.Exit(status)


def run(
    source: str, into: Path, sha256: str | None, token_file: Path | None, registry: str | None
) -> tuple[FetchReport, int]:
    """The report and the exit status; no DroverError leaves."""
    from drover.fetch.fetching import obtain
    from drover.fetch.locate import OLLAMA_REGISTRY

    try:
        token = None if token_file is None else _token(token_file)
        found = obtain(source, into, sha256=sha256, token=token, registry=registry or OLLAMA_REGISTRY)
    except DroverError as error:
        reason, status = reports.reason_of(error)
        architecture = error.architecture if isinstance(error, ArchitectureError) else None
        return FetchReport(False, reason, str(error), architecture=architecture), status
    message = f"{found.path.name}, {format_size(found.bytes)}, {found.architecture}"
    path = str(found.path.absolute())
    return FetchReport(True, "Fetched", message, path, found.bytes, found.sha256, found.architecture, found.layers), 0


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DroverError(f"--token-file {path}: cannot be read: {error}") from None
