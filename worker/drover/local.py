"""`drover up`: an InferenceCluster as processes on this machine: its workers, then its coordinator.

It starts the project's own commands with the flags that the file amounts to; it knows nothing else of them.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from drover.coordinator.local_devices import address_of
from drover.errors import SpecError
from drover.herd import Herd, sigterm_unwinds
from drover.spec import Model, Spec, WorkerGroup, load


def up(path: Path, prompt: str | None = None, max_tokens: int = 64, verbose: bool = False) -> None:
    """Run the InferenceCluster of a file until told to stop, or for one prompt; DroverError if anything ends early."""
    cluster = load(path)
    spec = cluster.spec
    model = model_file(spec.model, path)
    folder = tempfile.TemporaryDirectory(prefix="drover-")
    with sigterm_unwinds(), folder, Herd(Path(folder.name), verbose) as herd:
        count = sum(group.replicas for group in spec.workers)
        print(f"{cluster.metadata.name}: starting {count} worker{'s' if count > 1 else ''}", flush=True)
        endpoints = start_workers(spec, herd)
        if prompt is None and not spec.serving.enabled:
            print(f"ready for a client, e.g. llama-server -ngl 99 --rpc {','.join(endpoints)}", flush=True)
            herd.watch()
        arguments = coordinator_arguments(spec, model, endpoints)
        if prompt is not None:
            arguments += [f"--prompt={prompt}", f"--max-tokens={max_tokens}", "--temperature=0"]
        coordinator = herd.start("coordinator", "drover.coordinator", *arguments, attached=True)
        herd.watch(None if prompt is None else coordinator)


def model_file(model: Model, spec_path: Path) -> Path:
    """The model's file, found from where the spec stands; its hash is checked if one is given."""
    path = (spec_path.parent / Path(model.source).expanduser()).resolve()
    if not path.is_file():
        raise SpecError(f"{spec_path}: spec.model.source: there is no file {path}")
    if model.sha256 is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != model.sha256:
            raise SpecError(f"{spec_path}: spec.model.sha256: {path} has {found}: it is another file, or damaged")
    return path


def start_workers(spec: Spec, herd: Herd) -> list[str]:
    """Start every worker at once and wait until each has opened its port; their addresses in the order of the file."""
    workers = [
        herd.start(f"{group.name}-{index}", "drover.worker", *worker_arguments(group, index))
        for group in spec.workers
        for index in range(group.replicas)
    ]
    endpoints = []
    for worker in workers:
        endpoints.append(herd.wait_for(worker.name, partial(address_of, worker)))
        print(f"{worker.name} at {endpoints[-1]}", flush=True)
    return endpoints


def worker_arguments(group: WorkerGroup, index: int) -> list[str]:
    """The command line of a group's worker `index`."""
    port = group.port + index if group.port else 0
    return [
        "--host=127.0.0.1",
        f"--port={port}",
        f"--device={group.device}",
        *_given("threads", group.threads),
        *_given("memory", group.memory),
        *(["--cache"] if group.cache.enabled else []),
    ]


def coordinator_arguments(spec: Spec, model: Path, endpoints: Sequence[str]) -> list[str]:
    """The command line of the coordinator."""
    proportions = spec.split.proportions
    return [
        str(model),
        f"--rpc={','.join(endpoints)}",
        f"--host={spec.serving.host}",
        f"--port={spec.serving.port}",
        f"--parallel={spec.parallel}",
        f"--cache-type-k={spec.cache_types.k}",
        f"--cache-type-v={spec.cache_types.v}",
        *_given("ctx-size", spec.context),
        *_given("tensor-split", None if proportions is None else ",".join(f"{share:g}" for share in proportions)),
        *_given("alias", spec.model.alias),
        *_given("api-key", spec.serving.api_key),
    ]


def _given(flag: str, value: object) -> list[str]:
    return [] if value is None else [f"--{flag}={value}"]
