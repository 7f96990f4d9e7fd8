"""Objects of the API server -> the few facts that the operator acts on. Pure.

What keeps a pod from running is read from its status and turned into a reason and a sentence that says what to do.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drover.reports import REPLACED
from drover_operator import layout, names, troubles
from drover_operator.layout import Layout
from drover_operator.target import Manifest, Target
from drover_operator.troubles import Trouble


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's pod, or that it is not there."""

    name: str
    uid: str = ""
    address: str = ""
    host: str = ""
    ready: bool = False
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A Job and how it ended, if it did; `of` is the hash of what it is about, `report` what its pod said."""

    uid: str
    of: str
    state: Literal["running", "succeeded", "failed"]
    message: str = ""
    report: Mapping[str, Any] | None = None
    trouble: Trouble | None = None
    terminating: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of an InferenceCluster's objects."""

    workers: tuple[Worker, ...] = ()
    settled: bool = False
    """Every StatefulSet runs its current pods, all ready and no others."""
    header: Job | None = None
    fetch: Job | None = None
    load: Job | None = None
    header_pods: int = 0
    fetch_pods: int = 0
    load_pods: int = 0
    """Pods of Jobs that may still act."""
    coordinators: int = 0
    """Pods that serve, or are about to stop."""
    serving_ready: int = 0
    """Those that answer, and were ready after the last start of a worker: what it held went with it."""
    serving_current: bool = False
    serving_trouble: Trouble | None = None
    refuted: frozenset[str] = frozenset()
    """Loads, by their hashes, whose serving pods find another model on the volume than the load Job did."""
    claim: str | None = None
    """Phase of the claim that holds the model; None if there is none."""
    published: Layout | None = None
    exposed: tuple[str, ...] = ()
    objects: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    """Live objects of ours by kind and name."""


def read(target: Target, objects: Iterable[Manifest], claim: Manifest | None = None) -> Facts:
    """The facts in an InferenceCluster's objects; `claim` is the user's, for a model that lies on one."""
    live = list(objects)
    ours = {(body["kind"], body["metadata"]["name"]): body for body in live if _controller(body) == target.uid}
    alive = [body for body in live if body["kind"] == "Pod"]
    by_name = ours | {("Pod", body["metadata"]["name"]): body for body in alive}
    workers = tuple(_worker(seat.worker, by_name) for seat in layout.seats(target.spec, target.name, target.namespace))
    newest = max((troubles.started(by_name.get(("Pod", worker.name), {})) for worker in workers), default="")
    coordinators = [pod for pod in alive if _component(pod) == names.COORDINATOR and not _ended(pod)]
    claimed = claim or by_name.get(("PersistentVolumeClaim", names.model(target.name)))
    deployment = by_name.get(("Deployment", target.name), {})
    plan = by_name.get(("ConfigMap", names.plan(target.name)), {})
    return Facts(
        workers=workers,
        settled=all(_settled(target, group.name, group.replicas, by_name) for group in target.spec.workers),
        header=_job(by_name.get(("Job", names.header(target.name))), names.READS, alive),
        fetch=_job(by_name.get(("Job", names.fetch(target.name))), names.FETCHES, alive),
        load=_job(by_name.get(("Job", names.load(target.name))), names.LOADS, alive),
        header_pods=sum(_component(pod) == names.HEADER and not _ended(pod) for pod in alive),
        fetch_pods=sum(_component(pod) == names.FETCH and not _ended(pod) for pod in alive),
        load_pods=sum(_component(pod) == names.LOAD and not _ended(pod) for pod in alive),
        coordinators=len(coordinators),
        serving_ready=sum(troubles.ready(pod) and troubles.ready_since(pod) >= newest for pod in coordinators),
        serving_current=_current(deployment),
        serving_trouble=next((trouble for pod in coordinators if (trouble := troubles.of(pod))), None),
        refuted=frozenset(_loads(pod) for pod in coordinators if _finds_another_model(pod)),
        claim=claimed.get("status", {}).get("phase", "Pending") if claimed else None,
        published=layout.from_json(plan.get("data", {}).get("plan.json", "")),
        exposed=_exposed(target, by_name),
        objects=ours,
    )


def _worker(name: str, by_name: Mapping[tuple[str, str], Manifest]) -> Worker:
    pod = by_name.get(("Pod", name))
    if pod is None:
        return Worker(name)
    status = pod.get("status", {})
    return Worker(
        name,
        pod["metadata"]["uid"],
        status.get("podIP", ""),
        status.get("hostIP", ""),
        troubles.ready(pod) and "deletionTimestamp" not in pod["metadata"],
        troubles.of(pod),
    )


def _settled(target: Target, group: str, replicas: int, by_name: Mapping[tuple[str, str], Manifest]) -> bool:
    body = by_name.get(("StatefulSet", names.group(target.name, group)))
    if body is None:
        return False
    status = body.get("status", {})
    seen = status.get("observedGeneration", 0) >= body["metadata"].get("generation", 0)
    counts = [status.get(name, 0) for name in ("replicas", "readyReplicas", "updatedReplicas")]
    rolled = bool(status.get("currentRevision")) and status["currentRevision"] == status.get("updateRevision")
    return seen and (counts == [replicas] * 3 or (rolled and counts[:2] == [replicas] * 2))


def _job(body: Manifest | None, annotation: str, alive: Sequence[Manifest]) -> Job | None:
    if body is None:
        return None
    metadata, status = body["metadata"], body.get("status", {})
    mine = [pod for pod in alive if _controller(pod) == metadata["uid"]]
    mine.sort(key=lambda pod: pod["metadata"].get("creationTimestamp") or "")
    state, message = _end(status)
    ended = [pod for pod in mine if troubles.last_words(pod)]
    said = troubles.last_words(ended[-1]) if ended else ""
    report = _report(said)
    return Job(
        uid=metadata["uid"],
        of=(metadata.get("annotations") or {}).get(annotation, ""),
        state=state,
        message=_said(report, said) or message,
        report=report,
        trouble=next((trouble for pod in mine if not _ended(pod) and (trouble := troubles.of(pod))), None),
        terminating="deletionTimestamp" in metadata,
    )


def _end(status: Manifest) -> tuple[Literal["running", "succeeded", "failed"], str]:
    for condition in status.get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") == "Complete":
            return "succeeded", ""
        if condition.get("status") == "True" and condition.get("type") == "Failed":
            return "failed", condition.get("message", "")
    return "running", ""


def _report(text: str) -> Mapping[str, Any] | None:
    """The JSON object that a command left as its last words; logs are not one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _said(report: Mapping[str, Any] | None, text: str) -> str:
    """The error in a report, or the last line of a log."""
    if report is not None:
        return str(report.get("message") or "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _exposed(target: Target, by_name: Mapping[tuple[str, str], Manifest]) -> tuple[str, ...]:
    """Where clients outside reach each worker, as far as that is known."""
    if target.spec.expose.type == "None":
        return ()
    found = []
    for group in target.spec.workers:
        for index in range(group.replicas):
            service = by_name.get(("Service", names.exposed(target.name, group.name, index)), {})
            pod = by_name.get(("Pod", names.worker(target.name, group.name, index)), {})
            found.append(_address(target.spec.expose.type, service, pod))
    return tuple(found)


def _address(kind: str, service: Manifest, pod: Manifest) -> str:
    spec = service.get("spec", {})
    if kind == "NodePort":
        port = next((port.get("nodePort") for port in spec.get("ports", ())), None)
        host = pod.get("status", {}).get("hostIP")
        return f"{_bracketed(host)}:{port}" if host and port else ""
    if kind == "LoadBalancer":
        ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress") or ()
        host = next((entry.get("hostname") or entry.get("ip") for entry in ingress), None)
    else:
        host = spec.get("clusterIP")
    return f"{_bracketed(host)}:{names.RPC_PORT}" if host else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _current(deployment: Manifest) -> bool:
    """Whether all serving pods are of the newest template."""
    status = deployment.get("status", {})
    seen = status.get("observedGeneration", 0) >= deployment.get("metadata", {}).get("generation", 1)
    wanted = deployment.get("spec", {}).get("replicas", 0)
    return bool(seen and wanted and status.get("updatedReplicas", 0) == wanted == status.get("replicas", 0))


def _finds_another_model(pod: Manifest) -> bool:
    return not troubles.ready(pod) and troubles.exit_status(pod) == REPLACED


def _loads(body: Manifest) -> str:
    return str((body["metadata"].get("annotations") or {}).get(names.LOADS, ""))


def _controller(body: Manifest) -> str:
    references = body["metadata"].get("ownerReferences") or ()
    return next((reference["uid"] for reference in references if reference.get("controller")), "")


def _component(body: Manifest) -> str:
    return names.of(body["metadata"].get("labels") or {})[1]


def _ended(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
