"""Names, labels, ports and annotations of everything the operator makes. Pure."""

import hashlib
import json
from typing import Any

MANAGER = "drover"
"""The one field manager; also the value of the labels that say what an object belongs to."""

RPC_PORT = 50052
METRICS_PORT = 9090
API_PORT = 8080

APPLIED = "drover.dev/applied"
"""Annotation of every object: hash of the manifest it was last given."""
LOADS = "drover.dev/loads"
"""Annotation of the load Job and of serving pods: hash of the model, plan and workers they are about."""
FETCHES = "drover.dev/fetches"
"""Annotation of the fetch Job: hash of the source."""

READS = "drover.dev/reads"
"""Annotation of the header Job: hash of the source, and of the settings that decide how much memory the model takes."""

COORDINATOR = "coordinator"
WORKER = "worker"
LOAD = "load"
FETCH = "fetch"
HEADER = "header"
OPERATOR = "operator"

_NAME = "app.kubernetes.io/name"
_INSTANCE = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
_MANAGED_BY = "app.kubernetes.io/managed-by"
_GROUP = "drover.dev/group"


def group(cluster: str, name: str) -> str:
    """StatefulSet, headless Service, PodDisruptionBudget and NetworkPolicy of a group of workers."""
    return f"{cluster}-{name}"


def worker(cluster: str, name: str, index: int) -> str:
    """Pod `index` of a group."""
    return f"{cluster}-{name}-{index}"


def exposed(cluster: str, name: str, index: int) -> str:
    """The Service before one worker, for clients outside."""
    return f"{cluster}-{name}-{index}-rpc"


def model(cluster: str) -> str:
    """The claim of the volume that holds a downloaded model."""
    return f"{cluster}-model"


def fetch(cluster: str) -> str:
    """The Job that downloads the model."""
    return f"{cluster}-fetch"


def header(cluster: str) -> str:
    """The Job that reads the head of the model before it is downloaded."""
    return f"{cluster}-header"


def plan(cluster: str) -> str:
    """The ConfigMap that holds the plan and the settings of clients."""
    return f"{cluster}-plan"


def load(cluster: str) -> str:
    """The Job that loads the model into the workers and proves the split."""
    return f"{cluster}-load"


def host(cluster: str, name: str, index: int, namespace: str) -> str:
    """A worker's name in the cluster's DNS."""
    return f"{worker(cluster, name, index)}.{group(cluster, name)}.{namespace}.svc"


def pods(cluster: str) -> dict[str, str]:
    """The labels that all pods of an InferenceCluster share."""
    return {_NAME: MANAGER, _INSTANCE: cluster}


def selector(cluster: str, component: str, group_name: str | None = None) -> dict[str, str]:
    """The labels that pick the pods of one kind; they never change."""
    picked = {**pods(cluster), COMPONENT_LABEL: component}
    return picked | ({_GROUP: group_name} if group_name else {})


def labels(cluster: str, component: str, group_name: str | None = None) -> dict[str, str]:
    """The labels of an object."""
    return {**selector(cluster, component, group_name), _MANAGED_BY: MANAGER}


def owned(cluster: str) -> str:
    """A label selector for all that belongs to an InferenceCluster."""
    return f"{_INSTANCE}={cluster},{EVERY}"


MANAGED = {_MANAGED_BY: MANAGER}
EVERY = f"{_MANAGED_BY}={MANAGER}"
"""The label by which objects of ours are known, and the selector for them."""


def of(labels_: dict[str, str]) -> tuple[str, str, str]:
    """Cluster, component and group that labels name; "" for what they do not."""
    return labels_.get(_INSTANCE, ""), labels_.get(COMPONENT_LABEL, ""), labels_.get(_GROUP, "")


def digest(value: Any) -> str:
    """A short hash of plain data, the same for the same data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
