"""One cycle of one InferenceCluster, top to bottom: read, observe, plan, apply, report.

The API server and the probe are handed in. Nothing is remembered between cycles that the API server does not hold, and
each step can be repeated: a cycle that was cut off anywhere is made good by the next.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import structlog

from drover.errors import PlanError, SpecError, WorkerError
from drover_operator import desired, layout, managed, names, observed, pods, progress, status, target
from drover_operator.errors import ExistsError, RefusedError
from drover_operator.layout import Layout
from drover_operator.managed import Difference
from drover_operator.observed import Facts
from drover_operator.progress import Progress
from drover_operator.target import Defaults, Manifest, Target
from drover_operator.troubles import Trouble

log = structlog.get_logger()

PROBE_FAILED = "ProbeFailed"
PROBE_PAUSE = 10.0
"""Seconds until workers that did not answer are asked again."""
CLAIM_PAUSE = 15.0
"""Seconds until a claim of the user's that is not there is looked for again: it is not watched."""
REFUSED_PAUSE = 60.0
"""Seconds until an object that was refused is tried again: a quota may have grown."""


class Cluster(Protocol):
    """The API server, as far as a cycle needs it."""

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object."""

    def owned(self, namespace: str, name: str) -> list[Manifest]:
        """All objects with the labels of an InferenceCluster."""

    def make(self, manifest: Manifest) -> object:
        """Make an object; ExistsError if there is one of its name, RefusedError if the API server will not have it."""

    def apply(self, manifest: Manifest) -> object:
        """Make an object what the manifest says; RefusedError if the API server will not have it."""

    def delete(self, body: Manifest) -> None:
        """Remove an object, and what it owns."""

    def write_status(self, body: Manifest, made: Manifest) -> object:
        """Replace the status of an InferenceCluster."""

    def tell(self, body: Manifest, kind: str, reason: str, message: str) -> None:
        """An event about an InferenceCluster: Normal or Warning."""


Probe = Callable[[str, int], Sequence[int]]
"""Address and port of a worker -> bytes that each of its devices offers; WorkerError if it does not say."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cycle ended: objects written, and seconds until the next one is due though nothing changes."""

    writes: int = 0
    again: float | None = None
    moved: bool = False
    """Whether objects were made, changed or deleted, so that there may be more to do."""


def reconcile(
    namespace: str,
    name: str,
    cluster: Cluster,
    probe: Probe,
    defaults: Defaults,
    clock: Callable[[], datetime],
) -> Outcome:
    """Bring one InferenceCluster a step nearer to what its spec asks for."""
    # 1. What is asked for?
    body = cluster.get("InferenceCluster", namespace, name)
    if body is None or "deletionTimestamp" in body["metadata"]:
        return Outcome()  # what it owned goes with it
    before = body.get("status") or {}
    try:
        wanted = target.read(body, defaults)
    except SpecError as error:
        fault = "; ".join(str(error).splitlines())
        return Outcome(_report(cluster, body, status.invalid(_generation(body), fault, before, clock())))

    # 2. What is there?
    claim = _users_claim(wanted, cluster)
    facts = observed.read(wanted, cluster.owned(namespace, name), claim)

    # 3. Which share of the layers does each worker take?
    plan, trouble = _plan(wanted, facts, probe)

    # 4. How far has it come, and what is next?
    now = clock()
    reached = progress.of(wanted, facts, plan, before, now, trouble)

    # 5. Make it so.
    deleted = _remove(wanted, facts, reached.stale_jobs, cluster)
    applied, refusals = _apply(wanted, facts, desired.objects(wanted, reached.stage), cluster, body)

    # 6. Say so, and that of what was made just now too.
    if applied and not deleted:
        facts = observed.read(wanted, cluster.owned(namespace, name), claim)
        reached = progress.of(wanted, facts, plan, before, now, trouble)
    reported = _report(cluster, body, status.of(wanted, facts, reached, before, now, refusals))
    return Outcome(deleted + applied + reported, _again(wanted, reached, refusals), deleted + applied > 0)


def _again(wanted: Target, reached: Progress, refusals: Sequence[str]) -> float | None:
    """Seconds until the next cycle, for what no event tells of."""
    unanswered = reached.plan_trouble is not None and reached.plan_trouble.reason == PROBE_FAILED
    claim_missing = wanted.spec.model.scheme == "pvc" and reached.model is None
    pauses = (
        reached.again,
        PROBE_PAUSE if unanswered else None,
        CLAIM_PAUSE if claim_missing else None,
        REFUSED_PAUSE if refusals else None,
    )
    return min((seconds for seconds in pauses if seconds is not None), default=None)


def _users_claim(wanted: Target, cluster: Cluster) -> Manifest | None:
    """The claim that the user keeps the model on, if the source names one."""
    claim, path = pods.model_claim(wanted.spec.model, wanted.name)
    return cluster.get("PersistentVolumeClaim", wanted.namespace, claim) if path else None


def _plan(wanted: Target, facts: Facts, probe: Probe) -> tuple[Layout | None, Trouble | None]:
    """The layout for the workers as they are; the published one while they are not all there, or do not answer."""
    published = progress.published(wanted, facts)
    if not progress.needs_probe(wanted, facts):
        return published, None
    try:
        totals = {worker.name: probe(worker.address, names.RPC_PORT) for worker in facts.workers}
    except WorkerError as error:
        log.warning("probe failed", cluster=wanted.name, namespace=wanted.namespace, error=str(error))
        return published, Trouble(PROBE_FAILED, str(error))
    places = layout.seats(wanted.spec, wanted.name, wanted.namespace)
    try:
        made = layout.of(wanted.spec, places, totals, progress.identity(facts), published)
    except PlanError as error:
        return None, Trouble("InvalidSplit", str(error))
    log.info("planned", cluster=wanted.name, namespace=wanted.namespace, proportions=made.proportions)
    return made, None


def _remove(wanted: Target, facts: Facts, stale: Sequence[str], cluster: Cluster) -> int:
    """Delete stale Jobs, and objects of groups or kinds that the spec no longer asks for."""
    kept = desired.expected(wanted)
    gone = [
        body
        for (kind, name), body in facts.objects.items()
        if (kind in REMOVABLE and (kind, name) not in kept) or (kind == "Job" and name in stale)
    ]
    gone = [body for body in gone if "deletionTimestamp" not in body["metadata"]]
    for body in gone:
        log.info("deleted", kind=body["kind"], name=body["metadata"]["name"], namespace=wanted.namespace)
        cluster.delete(body)
    return len(gone)


REMOVABLE = {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "Job"}
"""Kinds that are deleted once nothing asks for them; volumes stay until the InferenceCluster goes."""


REPLACEABLE = {"Service", "PodDisruptionBudget", "NetworkPolicy"}
"""Kinds that may be made anew without a loss when the API server will not have a change of them."""


def _apply(
    wanted: Target, facts: Facts, manifests: Sequence[Manifest], cluster: Cluster, body: Manifest
) -> tuple[int, list[str]]:
    """Apply what differs; how many that were, and what was refused."""
    writes, refusals = 0, []
    for manifest in manifests:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        live = facts.objects.get((kind, name))
        found = managed.difference(manifest, live)
        if found is Difference.NONE:
            continue
        try:
            if found is Difference.MISSING:
                _make(wanted, manifest, cluster)
            else:
                cluster.apply(manifest)
        except RefusedError as error:
            log.warning("refused", kind=kind, name=name, namespace=wanted.namespace, error=str(error))
            refusals.append(str(error))
            if live is not None and kind in REPLACEABLE:
                cluster.delete(live)  # what others added to it cannot stay beside what we say; it is made anew
                writes += 1
            continue
        writes += 1
        log.info("applied", kind=kind, name=name, namespace=wanted.namespace, because=found.value)
        if found is Difference.EDITED:
            said = f"{kind} {name} was changed by hand and is put back; change the InferenceCluster instead"
            cluster.tell(body, "Warning", "PutBack", said)
    return writes, refusals


def _make(wanted: Target, manifest: Manifest, cluster: Cluster) -> None:
    """Make an object that is missing; if it is there, and one of ours that lost its labels or its owner, take it."""
    try:
        cluster.make(manifest)
    except ExistsError:
        _check_ours(wanted, manifest, cluster)
        cluster.apply(manifest)


def _check_ours(wanted: Target, manifest: Manifest, cluster: Cluster) -> None:
    """RefusedError if the object of this name is another's."""
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    other = cluster.get(kind, wanted.namespace, name)
    if other is None:
        return  # it went since, or this API server makes nothing of an apply that names a resourceVersion
    owner = next((row for row in other["metadata"].get("ownerReferences") or () if row.get("controller")), None)
    mine = names.of(other["metadata"].get("labels") or {})[0] == wanted.name
    if owner is not None and owner["uid"] != wanted.uid:
        whose = f"{owner['kind']} {owner['name']}"
    elif owner is None and not mine:
        whose = "someone else"
    else:
        return
    raise RefusedError(
        f"{kind} {name}: there is one already, and it belongs to {whose}; delete it, or choose another name"
    )


def _report(cluster: Cluster, body: Manifest, made: Mapping[str, Any]) -> int:
    """Write the status if it is another one, and tell what is new."""
    before = body.get("status") or {}
    if before == made:
        return 0
    cluster.write_status(body, dict(made))
    for row in status.news(before, made):
        quiet = row["status"] == "True" or row["reason"] in status.PATIENT | status.WANTED
        log.info("condition", cluster=body["metadata"]["name"], namespace=body["metadata"].get("namespace"), **row)
        cluster.tell(body, "Normal" if quiet else "Warning", row["reason"], f"{row['type']}: {row['message']}")
    return 1


def _generation(body: Manifest) -> int:
    generation: int = body["metadata"].get("generation", 0)
    return generation
