"""What is watched, and what follows: the only kopf import. Every event about an InferenceCluster, or about an object of
one, puts it into the work queue; threads take it from there through a cycle of `reconcile`.

Only kopf's plain events and its indexing are used: they need no annotations and no finalizers, so nothing is written
to a resource because it was seen, and deleting one never waits for the operator. Retries and pauses are the queue's.
What is indexed goes into the mirror; kopf calls for no event before everything was indexed once.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import kopf
import structlog

from drover.errors import DroverError
from drover_operator import crd
from drover_operator.errors import UnavailableError
from drover_operator.metrics import Metrics
from drover_operator.mirror import Mirror, cluster_of
from drover_operator.reconcile import Outcome
from drover_operator.work_queue import Key, WorkQueue

log = structlog.get_logger()

SETTLE = 0.1
"""Seconds that events of one cluster may gather in: objects change in flocks."""
OWNED = (
    ("apps", "statefulsets", "StatefulSet"),
    ("apps", "deployments", "Deployment"),
    ("batch", "jobs", "Job"),
    ("policy", "poddisruptionbudgets", "PodDisruptionBudget"),
    ("networking.k8s.io", "networkpolicies", "NetworkPolicy"),
    ("", "services", "Service"),
    ("", "configmaps", "ConfigMap"),
    ("", "persistentvolumeclaims", "PersistentVolumeClaim"),
    ("", "pods", "Pod"),
)

Cycle = Callable[[str, str], Outcome]


@dataclass(frozen=True, slots=True)
class Watch:
    """How the operator watches: namespaces (none means all), threads that work, where `/healthz` is."""

    namespaces: Sequence[str] = ()
    threads: int = 4
    liveness: str = "http://0.0.0.0:8080/healthz"


@dataclass(slots=True)
class Herding:
    """The threads that take clusters from the queue."""

    queue: WorkQueue
    cycle: Cycle
    metrics: Metrics
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, count: int) -> None:
        """Start working."""
        for index in range(count):
            thread = threading.Thread(target=self._work, name=f"reconcile-{index}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self, seconds: float = 10.0) -> None:
        """Finish the cycles that run, begin no others."""
        self.queue.close()
        for thread in self.threads:
            thread.join(seconds)

    def _work(self) -> None:
        while (key := self.queue.take()) is not None:
            self.once(key)

    def once(self, key: Key) -> None:
        """One cycle; what goes wrong in it is logged, counted, and tried again after a pause."""
        started = time.perf_counter()
        try:
            outcome = self.cycle(*key)
        except DroverError as error:
            pause = self.queue.failed(key)
            log.warning("cycle failed", namespace=key[0], cluster=key[1], error=str(error), pause=pause)
            self.metrics.count(time.perf_counter() - started, failed=True)
        except Exception:
            pause = self.queue.failed(key)
            log.exception("cycle broke", namespace=key[0], cluster=key[1], pause=pause)
            self.metrics.count(time.perf_counter() - started, failed=True)
        else:
            pause = self.queue.done(key, outcome.again, wrote=outcome.writes > 0)
            if pause:
                log.warning(
                    "someone else keeps changing what is written", namespace=key[0], cluster=key[1], pause=pause
                )
            self.metrics.count(time.perf_counter() - started, failed=False, writes=outcome.writes)


def run(cycle: Cycle, mirror: Mirror, watch: Watch, metrics: Metrics) -> None:
    """Watch and work until told to stop."""
    herding = Herding(WorkQueue(time.monotonic), cycle, metrics)
    metrics.watch_queue(lambda: len(herding.queue))
    logging.basicConfig(level=logging.WARNING, handlers=[_Forward()], force=True)
    registry = kopf.OperatorRegistry()
    register(registry, herding.queue, mirror)

    @kopf.on.login(registry=registry)
    def login(**asked: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**asked) or kopf.login_with_kubeconfig(**asked)

    @kopf.on.startup(registry=registry)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.watching.server_timeout = 600
        settings.watching.client_timeout = 660
        settings.watching.connect_timeout = 30
        herding.start(watch.threads)
        log.info("watching", namespaces=list(watch.namespaces) or "all", threads=watch.threads)

    @kopf.on.cleanup(registry=registry)
    def finish(**_: Any) -> None:
        herding.stop()

    where: dict[str, Any] = {"namespaces": list(watch.namespaces)} if watch.namespaces else {"clusterwide": True}
    try:
        kopf.run(registry=registry, standalone=True, liveness_endpoint=watch.liveness, **where)
    except kopf.LoginError as error:
        raise UnavailableError(f"the API server does not let the operator in: {error}") from None


class _Forward(logging.Handler):
    """What kopf has to say, as lines of our log."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line of kopf's."""
        log.log(record.levelno, "kopf", said=record.getMessage())


def register(registry: kopf.OperatorRegistry, queue: WorkQueue, mirror: Mirror) -> None:
    """Put what happens into the queue, and what there is into the mirror."""

    @kopf.on.event(crd.GROUP, crd.VERSION, crd.PLURAL, registry=registry, id=crd.PLURAL)
    def changed(namespace: str | None, name: str | None, meta: kopf.Meta, status: kopf.Status, **_: Any) -> None:
        if namespace and name:
            queue.add((namespace, name), fresh=meta.get("generation") != status.get("observedGeneration"))

    for group, plural, kind in OWNED:
        _watch(registry, (group, "v1", plural), kind, queue, mirror)


def _watch(
    registry: kopf.OperatorRegistry, resource: tuple[str, str, str], kind: str, queue: WorkQueue, mirror: Mirror
) -> None:
    """Objects of one kind: into the mirror as they are indexed, and their cluster into the queue when they change."""

    def ours(body: kopf.Body, **_: Any) -> bool:
        return cluster_of(dict(body)) is not None

    def keep(body: kopf.Body, **_: Any) -> None:
        mirror.put(kind, dict(body))

    def part_changed(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        if event["type"] == "DELETED":
            mirror.drop(kind, dict(body))
        key = cluster_of(dict(body))
        if key is not None:
            queue.add(key, SETTLE)

    plural = resource[2]
    kopf.index(*resource, when=ours, registry=registry, id=f"keep-{plural}")(keep)
    kopf.on.event(*resource, when=ours, registry=registry, id=plural)(part_changed)
