"""The `drover` command: one sub-command for each thing it can do, each defined where that thing is.

Nothing heavy is imported before a sub-command runs. An error of ours is one line and exit status 1 (4 for another model
than the one that was proven), never a traceback.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import drover
from drover import cache_command, reports
from drover.coordinator.__main__ import serve, shares
from drover.coordinator.load_command import load
from drover.errors import DroverError, ModelReplacedError
from drover.fetch.command import fetch
from drover.sizes import parse_size
from drover.worker import __main__ as worker

INTERRUPTED = 130

app = typer.Typer(
    help="Run one GGUF model across several machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
worker.add_to(app)
app.command()(serve)
app.command()(fetch)
app.command()(load)
app.add_typer(cache_command.app, name="cache")


@app.command()
def up(
    file: Annotated[Path, typer.Argument(help="The InferenceCluster, a YAML file.")],
    prompt: Annotated[str | None, typer.Option(help="Continue this text, print it and end.")] = None,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=1, help="With --prompt: tokens at most.")] = 64,
    volume: Annotated[
        list[str] | None, typer.Option(metavar="CLAIM=FOLDER", help="The folder that stands for a volume claim.")
    ] = None,
    models: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keeps downloaded models [default: ~/.cache/drover/models].")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the workers say.")] = False,
) -> None:
    """Run an InferenceCluster as processes on this machine."""
    from drover import local

    local.up(file, prompt, max_tokens, verbose, volumes(volume or ()), models or local.MODELS)


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(help="A GGUF file, or the first of its parts.")],
    workers: Annotated[str, typer.Option(help="Free memory of each worker, e.g. 8GiB,24GiB.")],
    ctx_size: Annotated[int | None, typer.Option("--ctx-size", "-c", min=1, help="Context in tokens.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Sequences in the KV cache at a time.")] = 1,
    tensor_split: Annotated[str, typer.Option("--tensor-split", "-ts", help="Shares of the workers, e.g. 3,1.")] = "",
) -> None:
    """Show which layers would lie where; no worker is asked."""
    from drover.coordinator.assembly import preview
    from drover.coordinator.settings import Config
    from drover.plan import Room

    sizes = [parse_size(word) for word in workers.split(",")]
    rooms = [Room(f"worker-{index}", size, size) for index, size in enumerate(sizes)]
    config = Config(model, tensor_split=shares(tensor_split), context=ctx_size, parallel=parallel)
    print(preview(config, rooms))


def volumes(given: Sequence[str]) -> dict[str, Path]:
    """CLAIM=FOLDER, as pairs; DroverError for anything else."""
    pairs = [word.partition("=") for word in given]
    for word, (claim, _, folder) in zip(given, pairs, strict=True):
        if not claim or not folder:
            raise DroverError(f"--volume {word}: write CLAIM=FOLDER, e.g. models=/srv/models")
        if not Path(folder).expanduser().is_dir():
            raise DroverError(f"--volume {word}: there is no folder {folder}")
    return {claim: Path(folder) for claim, _, folder in pairs}


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"drover {drover.__version__}")
        raise typer.Exit


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        app()
    except DroverError as error:
        print(f"drover: error: {error}", file=sys.stderr)
        return reports.REPLACED if isinstance(error, ModelReplacedError) else reports.FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
