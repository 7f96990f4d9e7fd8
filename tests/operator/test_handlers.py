"""What events do to the queue, and what one turn of a thread does with the outcome of a cycle."""

import asyncio
import threading
import time
from typing import Any

import kopf
import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from drover_operator import __main__, cluster, handlers
from drover_operator.errors import UnavailableError
from drover_operator.handlers import Herding
from drover_operator.metrics import Metrics
from drover_operator.mirror import Mirror
from drover_operator.reconcile import Outcome
from drover_operator.work_queue import WorkQueue

KEY = ("farm", "herd")


def value(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(f"drover_operator_{name}")


def herding(outcome: Outcome | Exception) -> Herding:
    def cycle(namespace: str, name: str) -> Outcome:
        assert (namespace, name) == KEY
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    made = Herding(WorkQueue(time.monotonic), cycle, Metrics())
    made.queue.add(KEY)
    assert made.queue.take() == KEY
    made.once(KEY)
    return made


def test_a_cycle_that_went_well_is_over() -> None:
    made = herding(Outcome(3))
    assert len(made.queue) == 0
    found = {
        name: value(made.metrics.registry, name)
        for name in ("reconciles_total", "reconcile_errors_total", "writes_total")
    }
    assert found == {"reconciles_total": 1, "reconcile_errors_total": 0, "writes_total": 3}


def test_a_cycle_that_wants_to_be_looked_at_again_waits() -> None:
    assert len(herding(Outcome(0, again=60)).queue) == 1


@pytest.mark.parametrize("error", [UnavailableError("away"), ZeroDivisionError("a bug")])
def test_whatever_goes_wrong_is_counted_and_tried_again(error: Exception) -> None:
    made = herding(error)
    assert len(made.queue) == 1
    assert value(made.metrics.registry, "reconcile_errors_total") == 1


def test_a_cycle_that_changed_something_is_followed_by_another() -> None:
    assert len(herding(Outcome(1, moved=True)).queue) == 1


def test_threads_work_until_they_are_stopped() -> None:
    seen = []
    made = Herding(WorkQueue(time.monotonic), lambda *key: seen.append(key) or Outcome(), Metrics())
    made.metrics.watch_queue(lambda: len(made.queue))
    made.start(2)
    for number in range(20):
        made.queue.add(("farm", str(number)))
    deadline = time.monotonic() + 10
    while len(made.queue) and time.monotonic() < deadline:
        time.sleep(0.01)
    made.stop()
    assert sorted(seen) == sorted(("farm", str(number)) for number in range(20))
    assert not any(thread.is_alive() for thread in made.threads)
    assert value(made.metrics.registry, "queue_length") == 0


def registered() -> tuple[WorkQueue, Mirror, dict[str, Any]]:
    queue, mirror, registry = WorkQueue(time.monotonic), Mirror(time.monotonic), kopf.OperatorRegistry()
    handlers.register(registry, queue, mirror)
    return queue, mirror, {str(handler.id): handler for handler in registry._watching.get_all_handlers()}


def test_every_kind_that_is_made_is_watched() -> None:
    _, _, found = registered()
    plurals = {plural for _, plural in cluster.PATHS.values()} - {"events"}
    assert set(found) == plurals
    assert {(kind, plural) for _, plural, kind in handlers.OWNED} <= {
        (k, plural) for k, (_, plural) in cluster.PATHS.items()
    }


def pod(name: str, version: int = 1, **labels: str) -> kopf.Body:
    metadata = {"name": name, "namespace": "farm", "uid": name, "labels": labels, "resourceVersion": str(version)}
    return kopf.Body({"metadata": metadata})


def herd(version: int, generation: int = 1, observed: int | None = None) -> kopf.Body:
    metadata = {"name": "herd", "namespace": "farm", "uid": "u", "generation": generation}
    status = {} if observed is None else {"observedGeneration": observed}
    return kopf.Body({"metadata": metadata | {"resourceVersion": str(version)}, "spec": {}, "status": status})


OURS = {"app.kubernetes.io/instance": "herd", "app.kubernetes.io/managed-by": "drover"}


def tell(found: dict[str, Any], plural: str, what: str, body: kopf.Body) -> None:
    """An event as kopf passes it on."""
    asyncio.run(found[plural].fn(event={"type": what}, body=body, uid=body.metadata["uid"]))


def test_an_event_of_a_cluster_or_of_a_part_puts_the_cluster_into_the_queue() -> None:
    queue, mirror, found = registered()
    tell(found, "inferenceclusters", "ADDED", herd(1))
    tell(found, "pods", "ADDED", pod("herd-w-0", **OURS))
    assert len(queue) == 1
    assert [body["metadata"]["name"] for body in mirror.owned(KEY) or ()] == ["herd-w-0"]
    tell(found, "pods", "DELETED", pod("herd-w-0", 2, **OURS))
    assert mirror.owned(KEY) == []
    assert mirror.cluster(KEY) is not None
    tell(found, "inferenceclusters", "DELETED", herd(3))
    assert mirror.cluster(KEY) is None


def work_off(queue: WorkQueue) -> bool:
    """Whether there was something to do; nothing is, afterwards."""
    if not len(queue):
        return False
    key = queue.take()
    assert key == KEY
    queue.done(key)
    return True


def test_what_the_mirror_knew_is_no_reason_for_a_cycle() -> None:
    queue, mirror, found = registered()
    mirror.put("Pod", pod("herd-w-0", 2, **OURS))
    for version in (1, 2):
        tell(found, "pods", "MODIFIED", pod("herd-w-0", version, **OURS))
        assert not work_off(queue)
    tell(found, "pods", "MODIFIED", pod("herd-w-0", 3, **OURS))
    assert work_off(queue)
    tell(found, "pods", "DELETED", pod("herd-w-0", 3, **OURS))
    assert work_off(queue)


def test_a_spec_that_nobody_acted_on_is_one_even_if_the_mirror_knew_it() -> None:
    """The answer to a status of ours may be the first to tell of it."""
    queue, mirror, found = registered()
    for body, due in ((herd(5, 2, observed=1), True), (herd(6, 2, observed=2), False)):
        mirror.put("InferenceCluster", body)
        tell(found, "inferenceclusters", "MODIFIED", body)
        assert work_off(queue) is due


def test_what_is_not_ours_is_passed_over() -> None:
    queue, mirror, found = registered()
    for labels in ({}, {"app.kubernetes.io/instance": "herd"}):
        for what in ("ADDED", "DELETED"):
            tell(found, "pods", what, pod("x", **labels))
    assert (len(queue), mirror.owned(KEY)) == (0, [])


def test_no_cycle_begins_before_all_that_there_is_is_known() -> None:
    _, mirror, found = registered()
    now, calls, away = 0.0, 0, True
    there = [("InferenceCluster", herd(1)), ("Pod", pod("herd-w-0", **OURS)), ("Pod", pod("gone", **OURS))]

    def roll() -> list[tuple[str, Any]]:
        nonlocal calls
        calls += 1
        if away:
            raise UnavailableError("starting")
        return [*there, ("Pod", pod("nobodys"))]

    complete = handlers.Complete(mirror, roll, lambda: now)
    for _ in range(3):
        assert (complete(), calls) == (False, 1)
    now, away = handlers.ROLL + 1, False
    assert (complete(), calls) == (False, 2)
    tell(found, "inferenceclusters", "ADDED", herd(1))
    tell(found, "pods", "ADDED", pod("herd-w-0", **OURS))
    assert (complete(), calls) == (False, 2)
    now += handlers.ROLL - 1
    assert (complete(), calls) == (False, 2)
    now += 2
    there.pop()
    assert (complete(), calls) == (True, 3)


def test_threads_start_once_everything_is_known() -> None:
    made = Herding(WorkQueue(time.monotonic), lambda *_: Outcome(), Metrics())
    made.queue.add(KEY)
    known = threading.Event()
    made.start_when(known.is_set, 1)
    time.sleep(2 * handlers.LOOK)
    assert len(made.queue) == 1
    known.set()
    deadline = time.monotonic() + 10
    while len(made.queue) and time.monotonic() < deadline:
        time.sleep(0.01)
    made.stop()
    assert len(made.queue) == 0


def test_only_plain_events_are_used_so_that_nothing_is_written_because_it_was_seen() -> None:
    registry = kopf.OperatorRegistry()
    handlers.register(registry, WorkQueue(time.monotonic), Mirror(time.monotonic))
    assert not registry._changing.get_all_handlers()
    assert not registry._indexing.get_all_handlers()
    assert not registry._spawning.get_all_handlers()


def test_the_commands() -> None:
    runner = CliRunner()
    assert "kind: CustomResourceDefinition" in runner.invoke(__main__.app, ["crd"]).output
    missing = runner.invoke(__main__.app, ["run"], env={"DROVER_IMAGE": ""})
    assert missing.exit_code == 2


def test_without_an_api_server_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/not/there")
    monkeypatch.setattr("sys.argv", ["drover-operator", "run", "--image", "x"])
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert __main__.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("drover-operator: error: neither a service account nor a kubeconfig says")
