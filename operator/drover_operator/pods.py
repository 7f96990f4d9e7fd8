"""Pod templates of workers, coordinators and of the Jobs for the model. Pure.

Every pod is admitted by the `restricted` Pod Security level: no root, no capabilities, a read-only root file system,
the runtime's seccomp profile; and none has a service account token.
"""

from collections.abc import Sequence
from typing import Any

from drover.spec import EnvVar, Model, Resources, Size, Spec, WorkerGroup
from drover_operator import names
from drover_operator.layout import Layout
from drover_operator.overrides import merged
from drover_operator.target import Manifest, Target

USER = 10001
CACHE = "/var/cache/drover"
MODELS = "/models"
KEY_FOLDER = "/etc/drover/api-key"
TOKEN_FOLDER = "/etc/drover/token"
CA_FOLDER = "/etc/drover/ca"
REPORT = "/dev/termination-log"
GRACE = 30
"""Seconds a worker has to finish its step."""
CACHE_SHARE = 90
"""Per cent of a cache's volume that weights may fill; compiled kernels and the file system take their part."""
OVERHEAD = 512 << 20
"""What a worker needs beside the memory that it offers."""
LOST = (5, 2)
"""How often a coordinator is asked, and after how many times of having lost a worker it is started again."""
HOPELESS = (1, 2)
"""Exit statuses of commands that would fail again just so; 3, or a signal, may not."""


def worker(target: Target, group: WorkerGroup) -> Manifest:
    """The pods of a group of workers."""
    container = _container("worker", group.image or target.image, _worker_arguments(group))
    container["env"] += [_variable(variable) for variable in group.env or ()]
    container["ports"] = [_port("rpc", names.RPC_PORT), _port("http", names.METRICS_PORT)]
    container |= _probes(names.METRICS_PORT, starting=600)
    if resources := _worker_resources(group):
        container["resources"] = resources
    cache = [] if group.cache.enabled else [_scratch("cache")]
    spec = _pod(target, container, cache) | {
        "terminationGracePeriodSeconds": GRACE + 15,
        "affinity": group.affinity or _apart(target, group),
    }
    tolerations = [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in group.tolerations or ()]
    optional = {
        "nodeSelector": group.node_selector,
        "tolerations": tolerations,
        "topologySpreadConstraints": group.topology_spread_constraints,
        "runtimeClassName": group.runtime_class_name,
        "priorityClassName": group.priority_class_name,
    }
    spec |= {key: value for key, value in optional.items() if value}
    changes = group.pod_template
    metadata = merged({}, (changes and changes.metadata) or {})
    metadata["labels"] = metadata.get("labels", {}) | names.labels(target.name, names.WORKER, group.name)
    return {"metadata": metadata, "spec": merged(spec, (changes and changes.spec) or {})}


def serving(target: Target, layout: Layout, file: str, loads: str, fingerprint: str = "") -> Manifest:
    """The pods that serve the API; with a fingerprint, that model and no other."""
    asked = target.spec.serving
    arguments = ["serve", *_coordinator_arguments(target, layout, file)]
    arguments += ["--host", "0.0.0.0", "--port", str(names.API_PORT)]
    arguments += ["--fingerprint", fingerprint] if fingerprint else []
    arguments += ["--alias", target.spec.model.alias] if target.spec.model.alias else []
    volumes = [_model_volume(target)]
    container = _container("coordinator", target.serving_image, arguments)
    if asked.api_key_secret_ref:
        container["args"] += ["--api-key-file", f"{KEY_FOLDER}/key"]
        container["volumeMounts"].append(_mount("api-key", KEY_FOLDER))
        volumes.append(_secret("api-key", asked.api_key_secret_ref.name, asked.api_key_secret_ref.key, "key"))
    container["args"] += ["--log-format", "json"]
    container["ports"] = [_port("http", names.API_PORT)]
    container["volumeMounts"].append(_mount("models", MODELS))
    container |= _probes(names.API_PORT, starting=3600, alive=LOST)
    _add_resources(container, asked.resources)
    return {
        "metadata": {
            "labels": names.labels(target.name, names.COORDINATOR),
            "annotations": {names.LOADS: loads},
        },
        "spec": _pod(target, container, [_scratch("cache"), *volumes]) | {"terminationGracePeriodSeconds": GRACE + 15},
    }


def load(target: Target, layout: Layout, file: str, expect: str = "", replaced: bool = False) -> Manifest:
    """The pod that loads the model into the workers and proves the split.

    `expect` are the layers planned for each; `replaced`: the model is not what was downloaded.
    """
    model = target.spec.model
    arguments = ["load", *_coordinator_arguments(target, layout, file)]
    arguments += ["--expect", expect] if expect else []
    if model.sha256 and (model.scheme == "pvc" or replaced):  # what is downloaded was checked when it was
        arguments += ["--sha256", model.sha256]
    arguments += ["--report", REPORT, "--log-format", "json"]
    container = _container("load", target.serving_image, arguments)
    container["volumeMounts"].append(_mount("models", MODELS))
    _add_resources(container, target.spec.serving.resources)
    spec = _pod(target, container, [_scratch("cache"), _model_volume(target)]) | {"restartPolicy": "Never"}
    return {"metadata": {"labels": names.labels(target.name, names.LOAD)}, "spec": spec}


def header(target: Target) -> Manifest:
    """The pod that reads the head of the model at its source; it needs no volume for that."""
    return _source_pod(target, names.HEADER, ["--header-only", *_memory_arguments(target.spec)])


def fetch(target: Target) -> Manifest:
    """The pod that downloads the model."""
    made = _source_pod(target, names.FETCH, ["--into", MODELS], _model_volume(target))
    made["spec"]["containers"][0]["volumeMounts"].append({"name": "models", "mountPath": MODELS})
    return made


def _source_pod(target: Target, component: str, how: Sequence[str], *others: Manifest) -> Manifest:
    """A pod that asks the model's source, with the token for it, and other volumes."""
    model = target.spec.model
    arguments = ["fetch", model.source, *how]
    arguments += ["--sha256", model.sha256] if model.sha256 else []
    volumes = [*others]
    container = _container(component, target.serving_image, arguments)
    if model.secret_ref:
        container["args"] += ["--token-file", f"{TOKEN_FOLDER}/token"]
        container["volumeMounts"].append(_mount("token", TOKEN_FOLDER))
        volumes.append(_secret("token", model.secret_ref.name, model.secret_ref.key, "token"))
    container["env"] += [_variable(variable) for variable in model.env or ()]
    if ca := model.ca_config_map_ref:  # OpenSSL reads the public ones from a folder besides
        container["env"].append({"name": "SSL_CERT_FILE", "value": f"{CA_FOLDER}/ca.crt"})
        container["volumeMounts"].append(_mount("ca", CA_FOLDER))
        item = {"key": ca.key, "path": "ca.crt"}
        volumes.append({"name": "ca", "configMap": {"name": ca.name, "items": [item]}})
    container["args"] += ["--report", REPORT]
    spec = _pod(target, container, [_scratch("cache"), *volumes]) | {"restartPolicy": "Never"}
    return {"metadata": {"labels": names.labels(target.name, component)}, "spec": spec}


def model_claim(model: Model, cluster: str) -> tuple[str, str]:
    """The claim that holds the model, and the user's path in it; our own claim has none."""
    if model.scheme != "pvc":
        return names.model(cluster), ""
    claim, _, path = model.source.removeprefix("pvc://").partition("/")
    return claim, path


def size(amount: Size) -> str:
    """Bytes as a Kubernetes quantity, in the largest binary unit that is exact."""
    for unit in ("", "Ki", "Mi", "Gi", "Ti"):
        if amount % 1024 or unit == "Ti":
            return f"{amount}{unit}"
        amount //= 1024
    raise AssertionError


def _worker_arguments(group: WorkerGroup) -> list[str]:
    device: str = group.device
    if group.devices_per_worker > 1:
        device = ",".join(f"{device}:{index}" for index in range(group.devices_per_worker))
    arguments = ["worker", "--host", "0.0.0.0", "--port", str(names.RPC_PORT), "--device", device]
    if group.cache.enabled and group.cache.size:
        arguments += ["--cache-dir", CACHE, "--cache-size", str(group.cache.size * CACHE_SHARE // 100)]
    arguments += ["--http", str(names.METRICS_PORT), "--grace", str(GRACE)]
    arguments += ["--memory", str(group.memory)] if group.memory else []
    arguments += ["--threads", str(group.threads)] if group.threads else []
    return [*arguments, "--log-format", "json"]


def _coordinator_arguments(target: Target, layout: Layout, file: str) -> list[str]:
    workers = ["--rpc", ",".join(layout.endpoints), "--tensor-split", layout.proportions]
    return [f"{MODELS}/{file}", *workers, *_memory_arguments(target.spec)]


def _memory_arguments(spec: Spec) -> list[str]:
    """What decides how much memory a model takes."""
    arguments = ["--ctx-size", str(spec.context)] if spec.context else []
    arguments += ["--parallel", str(spec.parallel)]
    return [*arguments, "--cache-type-k", spec.cache_types.k, "--cache-type-v", spec.cache_types.v]


def _worker_resources(group: WorkerGroup) -> Manifest:
    """What the spec says; a GPU for each device, and the memory that is offered, where the spec leaves them open."""
    made: Manifest = {
        kind: dict(amounts)
        for kind, amounts in (("requests", group.resources.requests), ("limits", group.resources.limits))
        if amounts
    }
    said = {name for amounts in made.values() for name in amounts}
    if group.device == "cuda" and not any("/" in name for name in said):
        made.setdefault("limits", {})["nvidia.com/gpu"] = group.devices_per_worker
    if group.device != "cuda" and group.memory and "memory" not in said:
        for kind in ("requests", "limits"):
            made.setdefault(kind, {})["memory"] = size(group.memory + OVERHEAD)
    return _as_text(made)


def _add_resources(container: Manifest, resources: Resources) -> None:
    if given := _as_text(resources.model_dump(exclude_none=True)):
        container["resources"] = given


def _as_text(resources: Manifest) -> Manifest:
    return {kind: {name: str(amount) for name, amount in amounts.items()} for kind, amounts in resources.items()}


def _container(name: str, image: str, arguments: Sequence[str]) -> Manifest:
    return {
        "name": name,
        "image": image,
        "args": list(arguments),
        "env": [{"name": "XDG_CACHE_HOME", "value": CACHE}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "cache", "mountPath": CACHE}, {"name": "tmp", "mountPath": "/tmp"}],
    }


def _pod(target: Target, container: Manifest, volumes: Sequence[Manifest]) -> Manifest:
    secrets = [{"name": secret.name} for secret in target.spec.image_pull_secrets or ()]
    return {
        **({"imagePullSecrets": secrets} if secrets else {}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [_scratch("tmp"), *volumes],
    }


def _probes(port: int, starting: int, alive: tuple[int, int] = (10, 6)) -> dict[str, Any]:
    """Alive, and ready; `starting` seconds may pass before the first answer. `alive`: how often asked, and misses."""

    def ask(path: str, every: int, misses: int) -> Manifest:
        return {
            "httpGet": {"path": path, "port": port},
            "periodSeconds": every,
            "timeoutSeconds": 5,
            "failureThreshold": misses,
        }

    return {
        "startupProbe": ask("/healthz", 2, starting // 2),
        "livenessProbe": ask("/healthz", *alive),
        "readinessProbe": ask("/readyz", 2, 3),
    }


def _apart(target: Target, group: WorkerGroup) -> Manifest:
    """Workers of a group would rather not share a node."""
    term = {
        "labelSelector": {"matchLabels": names.selector(target.name, names.WORKER, group.name)},
        "topologyKey": "kubernetes.io/hostname",
    }
    weighted = {"weight": 50, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}


def _model_volume(target: Target) -> Manifest:
    claim, path = model_claim(target.spec.model, target.name)
    source: Manifest = {"claimName": claim}
    return {"name": "models", "persistentVolumeClaim": source | ({"readOnly": True} if path else {})}


def _variable(variable: EnvVar) -> Manifest:
    return variable.model_dump(by_alias=True, exclude_none=True)


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _scratch(name: str) -> Manifest:
    return {"name": name, "emptyDir": {}}


def _mount(name: str, path: str) -> Manifest:
    return {"name": name, "mountPath": path, "readOnly": True}


def _secret(volume: str, name: str, key: str, path: str) -> Manifest:
    return {"name": volume, "secret": {"secretName": name, "items": [{"key": key, "path": path}]}}
