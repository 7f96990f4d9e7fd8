"""`drover up`: an InferenceCluster as processes on this machine: its workers, then its coordinator.

It starts the project's own commands with the flags that the file amounts to; it knows nothing else of them.
"""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from drover.coordinator.local_devices import address_of
from drover.errors import SpecError
from drover.fetch.fetching import fetch
from drover.herd import Herd, sigterm_unwinds
from drover.spec import InferenceCluster, Model, Serving, Spec, WorkerGroup
from drover.spec_file import load

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HIGHEST_PORT = 65535
MODELS = Path("~/.cache/drover/models")
"""Where downloaded models are kept."""


def up(
    path: Path,
    prompt: str | None = None,
    max_tokens: int = 64,
    verbose: bool = False,
    volumes: Mapping[str, Path] | None = None,
    models: Path = MODELS,
) -> None:
    """Run the InferenceCluster of a file until told to stop, or for one prompt; DroverError if anything ends early.

    `volumes` are folders that stand for the volume claims of `pvc://` sources; what is downloaded goes to `models`.
    """
    cluster = load(path)
    spec = cluster.spec
    check_local(cluster, path)
    model = model_file(spec.model, path, volumes or {}, models)
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


def model_file(model: Model, spec_path: Path, volumes: Mapping[str, Path], models: Path = MODELS) -> Path:
    """The model's file, beside the spec, in a claim's folder or downloaded; its hash is checked if one is given."""
    if model.scheme not in ("", "pvc"):
        return fetch(model.source, models.expanduser(), sha256=model.sha256)
    path = _place(model, spec_path, volumes)
    if not path.is_file():
        raise SpecError(f"{spec_path}: spec.model.source: there is no file {path}")
    if model.sha256 is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != model.sha256:
            raise SpecError(f"{spec_path}: spec.model.sha256: {path} has {found}: it is another file, or damaged")
    return path


def check_local(cluster: InferenceCluster, spec_path: Path) -> None:
    """Refuse what cannot be kept on one machine; what only means something on Kubernetes is passed over."""
    for index, group in enumerate(cluster.spec.workers):
        last = (group.port or 0) + group.replicas - 1
        if last > HIGHEST_PORT:
            where = f"{spec_path}: spec.workers[{index}].port"
            raise SpecError(f"{where}: {group.replicas} workers from {group.port} on reach past port {HIGHEST_PORT}")
    if _asks_for_key(cluster.spec.serving):
        raise SpecError(
            f"{spec_path}: spec.serving.apiKeySecretRef: there are no Secrets on this machine, and others can reach "
            f"{cluster.spec.serving.host}; give apiKey instead, or leave host out"
        )


def _asks_for_key(serving: Serving) -> bool:
    """Whether the file wants a key that only Kubernetes has, on an address that others can reach."""
    return serving.enabled and serving.api_key_secret_ref is not None and serving.host not in LOOPBACK


def _place(model: Model, spec_path: Path, volumes: Mapping[str, Path]) -> Path:
    where = f"{spec_path}: spec.model.source"
    if model.scheme == "pvc":
        claim, _, inside = model.source.removeprefix("pvc://").partition("/")
        if claim not in volumes:
            raise SpecError(f"{where}: the volume claim {claim!r} needs a folder here: --volume {claim}=FOLDER")
        return (volumes[claim].expanduser() / inside).resolve()
    return (spec_path.parent / Path(model.source).expanduser()).resolve()


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
