"""What events do to the queue, and what one turn of a thread does with the outcome of a cycle."""

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
    found = [*registry._watching.get_all_handlers(), *registry._indexing.get_all_handlers()]
    return queue, mirror, {str(handler.id): handler for handler in found}


def test_every_kind_that_is_made_is_watched() -> None:
    _, _, found = registered()
    plurals = {plural for _, plural in cluster.PATHS.values()} - {"events"}
    parts = plurals - {"inferenceclusters"}
    assert set(found) == plurals | {f"keep-{plural}" for plural in parts}
    assert {(kind, plural) for _, plural, kind in handlers.OWNED} <= {
        (k, plural) for k, (_, plural) in cluster.PATHS.items()
    }


def pod(name: str, **labels: str) -> kopf.Body:
    return kopf.Body({"metadata": {"name": name, "namespace": "farm", "uid": name, "labels": labels}})


OURS = {"app.kubernetes.io/instance": "herd", "app.kubernetes.io/managed-by": "drover"}


def test_an_event_of_a_cluster_or_of_a_part_puts_the_cluster_into_the_queue() -> None:
    queue, mirror, found = registered()
    found["inferenceclusters"].fn(namespace="farm", name="herd", meta={"generation": 1}, status={})
    found["keep-pods"].fn(body=pod("herd-w-0", **OURS))
    found["pods"].fn(event={"type": "ADDED"}, body=pod("herd-w-0", **OURS))
    assert len(queue) == 1
    assert [body["metadata"]["name"] for body in mirror.owned(KEY) or ()] == ["herd-w-0"]
    found["pods"].fn(event={"type": "DELETED"}, body=pod("herd-w-0", **OURS))
    assert mirror.owned(KEY) == []


def test_what_is_not_ours_is_passed_over() -> None:
    _, _, found = registered()
    for handler in (found["pods"], found["keep-pods"]):
        assert handler.when(body=pod("herd-w-0", **OURS))
        assert not handler.when(body=pod("x"))
        assert not handler.when(body=pod("x", **{"app.kubernetes.io/instance": "herd"}))


def test_only_plain_events_are_used_so_that_nothing_is_written_because_it_was_seen() -> None:
    registry = kopf.OperatorRegistry()
    handlers.register(registry, WorkQueue(time.monotonic), Mirror(time.monotonic))
    assert not registry._changing.get_all_handlers()
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
