"""The operator's commands: `run` watches and works, `crd` prints the CustomResourceDefinition."""

import sys
import time
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import typer
import yaml

from drover import logs
from drover.errors import DroverError
from drover_operator import crd
from drover_operator.target import Defaults

HEAD = "# Written by `make manifests` from worker/drover/spec.py; not to be edited.\n"

app = typer.Typer(
    help="Drover's Kubernetes operator.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.command()
def run(
    image: Annotated[str, typer.Option(envvar="DROVER_IMAGE", help="The image of pods that name none.")],
    own_namespace: Annotated[
        str, typer.Option(envvar="POD_NAMESPACE", help="Where the operator runs, for NetworkPolicies.")
    ] = "drover-system",
    namespace: Annotated[
        list[str] | None, typer.Option(help="A namespace to watch; may be repeated [default: all].")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Clusters to work on at a time.")] = 4,
    health_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of /healthz.")] = 8080,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of /metrics; 0 for none.")] = 9090,
    log_format: Annotated[str, typer.Option(help="console or json.")] = "json",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
) -> None:
    """Watch InferenceClusters and make them so, until told to stop."""
    from drover_operator import cluster, handlers, probe
    from drover_operator.metrics import Metrics
    from drover_operator.mirror import Mirror, Mirrored
    from drover_operator.reconcile import reconcile

    logs.configure("console" if log_format == "console" else "json", verbose)
    watch = handlers.Watch(tuple(namespace or ()), threads, f"http://0.0.0.0:{health_port}/healthz")
    api = cluster.connect("drover-operator", threads)
    api.check(watch.namespaces)
    mirror = Mirror(time.monotonic)
    cycle = partial(
        reconcile,
        cluster=Mirrored(api, mirror),
        probe=probe.device_memory,
        defaults=Defaults(image, own_namespace),
        clock=lambda: datetime.now(UTC),
    )
    metrics = Metrics()
    metrics.serve(metrics_port)
    handlers.run(cycle, mirror, partial(api.roll, watch.namespaces), watch, metrics)


@app.command("crd")
def print_crd() -> None:
    """Print the CustomResourceDefinition, for `kubectl apply -f -`."""
    sys.stdout.write(HEAD + yaml.safe_dump(crd.definition(), sort_keys=False, width=120))


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        app()
    except DroverError as error:
        print(f"drover-operator: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
