"""What ought to be there: an InferenceCluster and how far it has come -> manifests. Pure.

`objects` is the whole of it; it is worked out anew in every cycle and applied where something differs. The order is
that in which things are needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from drover.spec import WorkerGroup
from drover_operator import names, pods
from drover_operator.layout import Layout
from drover_operator.target import Manifest, Target

FETCH_TRIES = 8
LOAD_TRIES = 2
LOAD_SECONDS = 4 * 3600


@dataclass(frozen=True, slots=True)
class Stage:
    """How far a cluster has come, as far as manifests depend on it."""

    reads: str | None = None
    """Hash of what a Job is to read the model's head for; None for no Job."""
    fetches: str | None = None
    """Hash of the download that a Job is to do; None for no Job."""
    layout: Layout | None = None
    """The plan to publish."""
    file: str = ""
    """Where the model lies on its volume."""
    loads: str = ""
    """Hash of model, plan and workers."""
    expect: str = ""
    """Layers that the load must find on each worker, as `drover load --expect` takes them."""
    load: bool = False
    """Whether the load Job is to be there."""
    serve: bool = False
    """Whether serving pods are to run."""
    fingerprint: str = ""
    """Of the model that the load Job proved, if it said so."""
    replaced: bool = False
    """Whether the model is another one than its source gave."""


def objects(target: Target, stage: Stage) -> list[Manifest]:
    """Every object of an InferenceCluster, complete but for what the API server adds."""
    made = [manifest for group in target.spec.workers for manifest in _group(target, group)]
    if target.spec.model.scheme != "pvc":
        made.append(_model_claim(target))
    if stage.reads:
        about = {names.READS: stage.reads}
        made.append(_job(target, names.header(target.name), names.HEADER, pods.header(target), about, FETCH_TRIES))
    if stage.fetches:
        about = {names.FETCHES: stage.fetches}
        made.append(_job(target, names.fetch(target.name), names.FETCH, pods.fetch(target), about, FETCH_TRIES))
    if stage.layout:
        made.append(_plan(target, stage.layout))
    if stage.layout and stage.load:
        made.append(_load_job(target, stage.layout, stage))
    if target.spec.serving.enabled:
        made.append(_front(target))
        if stage.layout and stage.file:
            made.append(_serving(target, stage.layout, stage))
    for manifest in made:
        manifest["metadata"].setdefault("annotations", {})[names.APPLIED] = names.digest(manifest)
    return made


def expected(target: Target) -> set[tuple[str, str]]:
    """Kind and name of every object that an InferenceCluster may have; others are left from an older spec."""
    name = target.name
    made = [manifest for group in target.spec.workers for manifest in _group(target, group)]
    found = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in made}
    found |= {("Job", names.load(name)), ("ConfigMap", names.plan(name))}
    if target.spec.model.scheme != "pvc":
        found |= {("Job", names.header(name)), ("Job", names.fetch(name)), ("PersistentVolumeClaim", names.model(name))}
    if target.spec.serving.enabled:
        found |= {("Deployment", name), ("Service", name)}
    return found


def _group(target: Target, group: WorkerGroup) -> Iterator[Manifest]:
    yield _headless(target, group)
    if target.spec.network.policy:
        yield _network_policy(target, group)
    yield _disruption_budget(target, group)
    yield _stateful_set(target, group)
    if target.spec.expose.type != "None":
        for index in range(group.replicas):
            yield _exposed(target, group, index)


def _stateful_set(target: Target, group: WorkerGroup) -> Manifest:
    spec: Manifest = {
        "replicas": 0 if target.spec.suspend else group.replicas,
        "serviceName": names.group(target.name, group.name),
        "podManagementPolicy": "Parallel",
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": names.selector(target.name, names.WORKER, group.name)},
        "template": pods.worker(target, group),
    }
    if group.cache.enabled:
        kept = "Retain" if group.cache.retain else "Delete"
        spec["persistentVolumeClaimRetentionPolicy"] = {
            "whenDeleted": kept,
            "whenScaled": "Retain" if target.spec.suspend else kept,
        }
        cache = group.cache
        claim = {
            "accessModes": [cache.access_mode],
            "resources": {"requests": {"storage": pods.size(cache.size or 0)}},
            **({"storageClassName": cache.storage_class_name} if cache.storage_class_name is not None else {}),
        }
        labels = names.labels(target.name, names.WORKER, group.name)
        metadata = {"name": "cache", "labels": labels}
        spec["volumeClaimTemplates"] = [
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim}
        ]
    name = names.group(target.name, group.name)
    return _object(target, "apps/v1", "StatefulSet", name, names.WORKER, group.name, spec=spec)


def _headless(target: Target, group: WorkerGroup) -> Manifest:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(target.name, names.WORKER, group.name),
        "ports": [_port("rpc", names.RPC_PORT), _port("http", names.METRICS_PORT)],
    }
    name = names.group(target.name, group.name)
    return _object(target, "v1", "Service", name, names.WORKER, group.name, spec=spec)


def _exposed(target: Target, group: WorkerGroup, index: int) -> Manifest:
    pod = {"statefulset.kubernetes.io/pod-name": names.worker(target.name, group.name, index)}
    spec = {
        "type": target.spec.expose.type,
        "selector": names.selector(target.name, names.WORKER, group.name) | pod,
        "ports": [_port("rpc", names.RPC_PORT)],
    }
    name = names.exposed(target.name, group.name, index)
    return _object(target, "v1", "Service", name, names.WORKER, group.name, spec=spec)


def _disruption_budget(target: Target, group: WorkerGroup) -> Manifest:
    selected = {"matchLabels": names.selector(target.name, names.WORKER, group.name)}
    spec = {"maxUnavailable": 1, "selector": selected}
    name = names.group(target.name, group.name)
    return _object(target, "policy/v1", "PodDisruptionBudget", name, names.WORKER, group.name, spec=spec)


def _network_policy(target: Target, group: WorkerGroup) -> Manifest:
    """Only coordinators, the operator's probe and named clients reach the RPC port; metrics are open."""
    clients = {
        "matchLabels": names.pods(target.name),
        "matchExpressions": [
            {"key": names.COMPONENT_LABEL, "operator": "In", "values": [names.COORDINATOR, names.LOAD]}
        ],
    }
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": target.defaults.namespace}},
        "podSelector": {"matchLabels": {names.COMPONENT_LABEL: names.OPERATOR}},
    }
    rpc = {
        "from": [{"podSelector": clients}, operator, *(target.spec.network.allow_from or ())],
        "ports": [{"protocol": "TCP", "port": names.RPC_PORT}],
    }
    spec = {
        "podSelector": {"matchLabels": names.selector(target.name, names.WORKER, group.name)},
        "policyTypes": ["Ingress"],
        "ingress": [rpc, {"ports": [{"protocol": "TCP", "port": names.METRICS_PORT}]}],
    }
    name = names.group(target.name, group.name)
    return _object(target, "networking.k8s.io/v1", "NetworkPolicy", name, names.WORKER, group.name, spec=spec)


def _model_claim(target: Target) -> Manifest:
    storage = target.spec.model.storage
    spec = {
        "accessModes": [storage.access_mode],
        "resources": {"requests": {"storage": pods.size(storage.size or 0)}},
        **({"storageClassName": storage.storage_class_name} if storage.storage_class_name is not None else {}),
    }
    return _object(target, "v1", "PersistentVolumeClaim", names.model(target.name), names.FETCH, spec=spec)


def _load_job(target: Target, layout: Layout, stage: Stage) -> Manifest:
    template = pods.load(target, layout, stage.file, stage.expect, replaced=stage.replaced)
    about = {names.LOADS: stage.loads}
    made = _job(target, names.load(target.name), names.LOAD, template, about, LOAD_TRIES)
    made["spec"]["activeDeadlineSeconds"] = LOAD_SECONDS
    return made


def _job(target: Target, name: str, component: str, template: Manifest, about: dict[str, str], tries: int) -> Manifest:
    """A Job that tries again, ever later, but not after an error that would only come again; `about` what it is."""
    container = template["spec"]["containers"][0]["name"]
    hopeless = {"containerName": container, "operator": "In", "values": list(pods.HOPELESS)}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": hopeless},
    ]
    spec = {
        "backoffLimit": tries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }
    made = _object(target, "batch/v1", "Job", name, component, spec=spec)
    made["metadata"]["annotations"] = about
    return made


def _plan(target: Target, layout: Layout) -> Manifest:
    made = _object(target, "v1", "ConfigMap", names.plan(target.name), names.COORDINATOR)
    return made | {"data": {**layout.settings, "plan.json": layout.to_json()}}


def _serving(target: Target, layout: Layout, stage: Stage) -> Manifest:
    spec = {
        "replicas": target.spec.serving.replicas if stage.serve and not target.spec.suspend else 0,
        "revisionHistoryLimit": 3,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "progressDeadlineSeconds": LOAD_SECONDS,
        "selector": {"matchLabels": names.selector(target.name, names.COORDINATOR)},
        "template": pods.serving(target, layout, stage.file, stage.loads, stage.fingerprint),
    }
    return _object(target, "apps/v1", "Deployment", target.name, names.COORDINATOR, spec=spec)


def _front(target: Target) -> Manifest:
    asked = target.spec.serving
    port = _port("http", asked.port) | {"targetPort": names.API_PORT}
    spec = {
        "type": asked.type,
        "selector": names.selector(target.name, names.COORDINATOR),
        "ports": [port | ({"nodePort": asked.node_port} if asked.node_port else {})],
    }
    return _object(target, "v1", "Service", target.name, names.COORDINATOR, spec=spec)


def _port(name: str, port: int) -> Manifest:
    return {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}


def _object(
    target: Target, version: str, kind: str, name: str, component: str, group: str | None = None, **parts: Manifest
) -> Manifest:
    metadata = {
        "name": name,
        "namespace": target.namespace,
        "labels": names.labels(target.name, component, group),
        "ownerReferences": [target.owner],
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}
