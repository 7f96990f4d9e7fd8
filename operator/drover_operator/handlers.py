"""What is watched, and what follows: the only kopf import. Every event that says something new about an
InferenceCluster, or about an object of one, puts it into the work queue; threads take it from there through a cycle of
`reconcile`.

Only kopf's plain events are used: they need no annotations and no finalizers, so nothing is written to a resource
because it was seen, and deleting one never waits for the operator. Retries and pauses are the queue's. Handlers are
`async` because kopf would start a thread for others; they wait for nothing. No cycle begins before the mirror knows all
that there is: kopf's own index would do for that, if its cost did not grow with the square of what there is.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import kopf
import structlog

from drover.errors import DroverError
from drover.spec import KIND
from drover_operator import crd, names
from drover_operator.errors import UnavailableError
from drover_operator.metrics import Metrics
from drover_operator.mirror import Mirror, cluster_of
from drover_operator.reconcile import Outcome
from drover_operator.target import Manifest
from drover_operator.work_queue import Key, WorkQueue

log = structlog.get_logger()

SETTLE = 0.1
"""Seconds that events of one cluster may gather in: objects change in flocks."""
LOOK = 0.2
"""Seconds between two looks whether everything is known, at the start."""
ROLL = 5.0
"""Seconds without anything new after which a roll is called again, at the start."""
CHUNK = 200
"""Objects in one answer when all are listed: the whole of an answer is in memory."""
REST = 0.5
"""Seconds after which kopf lets go of what it keeps for an object of which it hears nothing."""
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
Roll = Callable[[], Iterable[tuple[str, Manifest]]]
"""Kind and metadata of everything there is of ours; DroverError if the API server does not say."""


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
    stopped: threading.Event = field(default_factory=threading.Event)

    def start(self, count: int) -> None:
        """Start working."""
        for index in range(count):
            thread = threading.Thread(target=self._work, name=f"reconcile-{index}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def start_when(self, complete: Callable[[], bool], count: int) -> None:
        """Start working as soon as nothing is missing in what is known."""

        def wait() -> None:
            began = time.monotonic()
            while not self.stopped.wait(LOOK):
                if complete():
                    log.info("everything there is is known", seconds=round(time.monotonic() - began, 1))
                    self.start(count)
                    return

        threading.Thread(target=wait, name="begin", daemon=True).start()

    def stop(self, seconds: float = 10.0) -> None:
        """Finish the cycles that run, begin no others."""
        self.stopped.set()
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
            if outcome.moved:
                self.queue.add(key, SETTLE)  # events of what we did ourselves are no news
            if pause:
                log.warning(
                    "someone else keeps changing what is written", namespace=key[0], cluster=key[1], pause=pause
                )
            self.metrics.count(time.perf_counter() - started, failed=False, writes=outcome.writes)


def run(cycle: Cycle, mirror: Mirror, roll: Roll, watch: Watch, metrics: Metrics) -> None:
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
        settings.watching.chunk_size = CHUNK
        for group, plural, _kind in OWNED:
            settings.watching.label_selectors[group, "v1", plural] = names.EVERY
        settings.queueing.idle_timeout = REST
        settings.persistence.diffbase_storage = _NoDifferences()
        herding.start_when(Complete(mirror, roll, time.monotonic), watch.threads)
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


class _NoDifferences(kopf.DiffBaseStorage):
    """kopf's memory of how objects were; nobody asks what has changed, and it would copy every object to know."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """What is to be compared."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """What it was before."""
        return None

    def store(self, **_: Any) -> None:
        """Keep what it is."""


class Complete:
    """Whether the mirror knows all that is on the roll; if some of it stays unknown, it went, and the roll is old."""

    def __init__(self, mirror: Mirror, roll: Roll, clock: Callable[[], float]) -> None:
        self._mirror = mirror
        self._roll = roll
        self._clock = clock
        self._called: float | None = None
        self._missing: set[str] | None = None

    def __call__(self) -> bool:
        """Look."""
        if self._called is None or self._clock() - self._called > ROLL:
            self._called, self._missing = self._clock(), None
            try:
                roll = self._roll()
                self._missing = {body["metadata"]["uid"] for kind, body in roll if kind == KIND or cluster_of(body)}
            except DroverError as error:
                log.warning("what there is cannot be listed", error=str(error), pause=ROLL)
        if self._missing is None:
            return False
        missing = self._mirror.lacks(self._missing)
        if len(missing) < len(self._missing):
            self._called, self._missing = self._clock(), missing
        return not missing


def register(registry: kopf.OperatorRegistry, queue: WorkQueue, mirror: Mirror) -> None:
    """What there is goes into the mirror, and whose it is into the queue if that was news."""

    async def changed(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        told = _heard(mirror, KIND, event, body)
        fresh = body.meta.get("generation") != body.status.get("observedGeneration")
        if told or fresh:
            queue.add((body.meta["namespace"], body.meta["name"]), fresh=fresh)

    kopf.on.event(crd.GROUP, crd.VERSION, crd.PLURAL, registry=registry, id=crd.PLURAL)(changed)
    for group, plural, kind in OWNED:
        _watch(registry, (group, "v1", plural), kind, queue, mirror)


def _watch(
    registry: kopf.OperatorRegistry, resource: tuple[str, str, str], kind: str, queue: WorkQueue, mirror: Mirror
) -> None:
    """Objects of one kind."""

    async def part_changed(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        key = cluster_of(dict(body))
        if key is not None and _heard(mirror, kind, event, body):
            queue.add(key, SETTLE)

    kopf.on.event(*resource, registry=registry, id=resource[2])(part_changed)


def _heard(mirror: Mirror, kind: str, event: kopf.RawEvent, body: kopf.Body) -> bool:
    """Whether an event says something that the mirror did not know."""
    if event["type"] == "DELETED":
        mirror.gone(kind, dict(body))
        return True
    return mirror.put(kind, dict(body))
