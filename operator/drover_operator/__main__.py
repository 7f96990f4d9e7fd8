"""The operator's commands: `crd` prints the CustomResourceDefinition."""

import sys

import typer
import yaml

from drover_operator import crd

HEAD = "# Written by `make manifests` from worker/drover/spec.py; not to be edited.\n"

app = typer.Typer(help="Drover's Kubernetes operator.", no_args_is_help=True, add_completion=False)


@app.callback()
def _commands() -> None:
    """Drover's Kubernetes operator."""


@app.command("crd")
def print_crd() -> None:
    """Print the CustomResourceDefinition, for `kubectl apply -f -`."""
    sys.stdout.write(HEAD + yaml.safe_dump(crd.definition(), sort_keys=False, width=120))


if __name__ == "__main__":
    app()
