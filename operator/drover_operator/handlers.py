"""What is watched, and what follows: the only kopf import. Every event about an InferenceCluster, or about an object of
one, puts it into the work queue; threads take it from there through a cycle of `reconcile`.

Only kopf's plain events are used: they need no annotations and no finalizers, so nothing is written to a resource
because it was seen, and deleting one never waits for the operator. Retries and pauses are the queue's.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kopf
import structlog

from drover.errors import DroverError
from drover_operator import crd, names
from drover_operator.errors import UnavailableError
from drover_operator.metrics import Metrics
from drover_operator.reconcile import Outcome
from drover_operator.work_queue import Key, WorkQueue

log = structlog.get_logger()

SETTLE = 0.1
"""Seconds that events of one cluster may gather in: objects change in flocks."""
OWNED = (
    ("apps", "v1", "statefulsets"),
    ("apps", "v1", "deployments"),
    ("batch", "v1", "jobs"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
    ("", "v1", "services"),
    ("", "v1", "configmaps"),
    ("", "v1", "persistentvolumeclaims"),
    ("", "v1", "pods"),
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
            self.queue.done(key, outcome.again)
            self.metrics.count(time.perf_counter() - started, failed=False, writes=outcome.writes)


def run(cycle: Cycle, watch: Watch, metrics: Metrics) -> None:
    """Watch and work until told to stop."""
    herding = Herding(WorkQueue(time.monotonic), cycle, metrics)
    metrics.watch_queue(lambda: len(herding.queue))
    registry = kopf.OperatorRegistry()
    register(registry, herding.queue)

    @kopf.on.login(registry=registry)
    def login(**asked: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**asked) or kopf.login_with_kubeconfig(**asked)

    @kopf.on.startup(registry=registry)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.watching.server_timeout = 600
        settings.watching.client_timeout = 660
        settings.watching.connect_timeout = 30
        herding.start(watch.threads)

    @kopf.on.cleanup(registry=registry)
    def finish(**_: Any) -> None:
        herding.stop()

    where: dict[str, Any] = {"namespaces": list(watch.namespaces)} if watch.namespaces else {"clusterwide": True}
    try:
        kopf.run(registry=registry, standalone=True, liveness_endpoint=watch.liveness, **where)
    except kopf.LoginError as error:
        raise UnavailableError(f"the API server does not let the operator in: {error}") from None


def register(registry: kopf.OperatorRegistry, queue: WorkQueue) -> None:
    """Put what happens into the queue."""

    @kopf.on.event(crd.GROUP, crd.VERSION, crd.PLURAL, registry=registry)
    def changed(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            queue.add((namespace, name))

    def part_changed(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        cluster = names.of(dict(labels))[0]
        if namespace and cluster:
            queue.add((namespace, cluster), SETTLE)

    for group, version, plural in OWNED:
        kopf.on.event(group, version, plural, labels=dict(names.MANAGED), registry=registry, id=plural)(part_changed)
