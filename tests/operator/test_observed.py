"""Objects as the API server gives them -> facts; and pod statuses -> what to do about them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from drover_operator import observed, target, troubles
from support.operator_world import DEFAULTS, body

Body = dict[str, Any]
TARGET = target.read(body(), DEFAULTS)


def part(kind: str, name: str, component: str = "worker", owner: str = "u", **rest: Any) -> Body:
    labels = {"app.kubernetes.io/instance": "herd", "app.kubernetes.io/component": component}
    owners = [{"kind": "X", "name": "x", "uid": owner, "controller": True}]
    metadata = {"name": name, "uid": f"uid-{name}", "labels": labels, "ownerReferences": owners, "annotations": {}}
    return {"kind": kind, "metadata": metadata | rest.pop("metadata", {}), **rest}


def pod(name: str, component: str = "worker", owner: str = "s", **status: Any) -> Body:
    given = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]} | status
    return part("Pod", name, component, owner, status=given)


def stateful_set(**status: Any) -> Body:
    given = {"observedGeneration": 1, "replicas": 2, "readyReplicas": 2, "updatedReplicas": 2} | status
    return part("StatefulSet", "herd-w", metadata={"generation": 1}, status=given)


def job(name: str, component: str, of: str, *conditions: str) -> Body:
    annotations = {"drover.dev/loads" if component == "load" else "drover.dev/fetches": of}
    rows = [{"type": kind, "status": "True", "message": "BackoffLimitExceeded"} for kind in conditions]
    return part("Job", name, component, metadata={"annotations": annotations}, status={"conditions": rows})


def ended(name: str, component: str, owner: str, message: str, code: int = 0) -> Body:
    state = {"terminated": {"exitCode": code, "message": message}}
    return pod(name, component, owner, phase="Failed" if code else "Succeeded", containerStatuses=[{"state": state}])


def test_nothing_is_there() -> None:
    facts = observed.read(TARGET, [])
    assert [worker.name for worker in facts.workers] == ["herd-w-0", "herd-w-1"]
    assert not any(worker.ready or worker.uid for worker in facts.workers)
    assert (facts.settled, facts.fetch, facts.load, facts.claim, facts.published) == (False, None, None, None, None)


def test_workers() -> None:
    going = pod("herd-w-1")
    going["metadata"]["deletionTimestamp"] = "now"
    facts = observed.read(TARGET, [stateful_set(), pod("herd-w-0"), going])
    first, second = facts.workers
    assert (first.uid, first.address, first.ready) == ("uid-herd-w-0", "10.0.0.1", True)
    assert second.ready is False


@pytest.mark.parametrize(
    ("status", "settled"),
    [
        ({}, True),
        ({"readyReplicas": 1}, False),
        ({"replicas": 3}, False),
        ({"updatedReplicas": 1}, False),
        ({"updatedReplicas": 0, "currentRevision": "a", "updateRevision": "a"}, True),
        ({"updatedReplicas": 1, "currentRevision": "a", "updateRevision": "b"}, False),
        ({"observedGeneration": 0}, False),
    ],
)
def test_a_group_is_settled_once_its_current_pods_are_ready(status: Body, settled: bool) -> None:
    assert observed.read(TARGET, [stateful_set(**status)]).settled is settled


@pytest.mark.parametrize(
    ("conditions", "words", "state", "message"),
    [
        ((), None, "running", ""),
        (("Complete",), '{"ok": true, "message": "fine"}', "succeeded", "fine"),
        (("Failed",), '{"ok": false, "reason": "X", "message": "no room"}', "failed", "no room"),
        (("Failed",), "Traceback\n  File\nOSError: gone", "failed", "OSError: gone"),
        (("Failed",), None, "failed", "BackoffLimitExceeded"),
        (("Failed",), "", "failed", "it ended with exit status 1"),
        (("FailureTarget",), "[1]", "running", "[1]"),
    ],
)
def test_jobs(conditions: tuple[str, ...], words: str | None, state: str, message: str) -> None:
    objects = [job("herd-load", "load", "abc", *conditions)]
    if words is not None:
        objects.append(ended("herd-load-x", "load", "uid-herd-load", words, int("Failed" in conditions)))
    found = observed.read(TARGET, objects).load
    assert found is not None
    assert (found.of, found.state, found.message) == ("abc", state, message)
    assert (found.report is not None) is bool(words and words.startswith("{"))


def test_the_last_pod_of_a_job_counts() -> None:
    objects = [job("herd-fetch", "fetch", "abc", "Complete")]
    for number, (name, words) in enumerate((("z", '{"message": "first"}'), ("a", '{"message": "second"}'))):
        made = ended(f"herd-fetch-{name}", "fetch", "uid-herd-fetch", words)
        made["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:0{number}Z"
        objects.insert(0, made)
    found = observed.read(TARGET, objects).fetch
    assert found is not None
    assert found.message == "second"


def test_the_last_line_of_a_log_is_not_why_a_file_was_cut_short() -> None:
    objects = [
        job("herd-load", "load", "l", "Failed"),
        ended("herd-load-a", "load", "uid-herd-load", '{"event": "loading"}', 135),
    ]
    found = observed.read(TARGET, objects).load
    assert found is not None
    assert found.message.startswith("it was killed (SIGBUS): a file was cut short while it was read")


def test_pods_that_may_still_act() -> None:
    objects = [
        pod("herd-load-a", "load", phase="Succeeded"),
        pod("herd-load-b", "load"),
        pod("herd-header-a", "header"),
        pod("herd-header-b", "header", phase="Failed"),
        pod("herd-fetch-a", "fetch", phase="Pending"),
        pod("herd-1", "coordinator"),
        pod("herd-2", "coordinator", conditions=[]),
        pod("herd-3", "coordinator", phase="Failed"),
    ]
    facts = observed.read(TARGET, objects)
    assert facts.header_pods == 1
    assert (facts.load_pods, facts.fetch_pods, facts.coordinators, facts.serving_ready) == (1, 1, 2, 1)


@pytest.mark.parametrize(("again", "serving"), [("00:01", 1), ("00:07", 0)])
def test_a_coordinator_that_was_ready_before_a_worker_started_anew_does_not_serve(again: str, serving: int) -> None:
    """It has not noticed yet that the worker it loaded holds nothing any more."""
    since = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:05Z"}
    worker = pod("herd-w-0", containerStatuses=[{"state": {"running": {"startedAt": f"2026-01-01T00:{again}Z"}}}])
    facts = observed.read(TARGET, [worker, pod("herd-1", "coordinator", conditions=[since])])
    assert (facts.coordinators, facts.serving_ready) == (1, serving)


@pytest.mark.parametrize(
    ("status", "refuted"),
    [
        (lambda: crashed(exitCode=4), {"l"}),
        (lambda: crashed(exitCode=1), set()),
        (lambda: {"containerStatuses": [{"state": {"terminated": {"exitCode": 4}}}]}, {"l"}),
        (lambda: crashed(exitCode=4) | {"phase": "Failed"}, set()),
        (lambda: crashed(exitCode=4) | {"conditions": [{"type": "Ready", "status": "True"}]}, set()),
        (dict, set()),
    ],
)
def test_pods_that_find_another_model_than_was_proven(status: Callable[[], Body], refuted: set[str]) -> None:
    found = pod("herd-1", "coordinator", **({"conditions": []} | status()))
    found["metadata"]["annotations"] = {"drover.dev/loads": "l"}
    assert observed.read(TARGET, [found]).refuted == refuted


def test_what_belongs_to_another_of_the_same_name_does_not_count() -> None:
    old = part("ConfigMap", "herd-plan", owner="older", data={"plan.json": "{}"})
    facts = observed.read(TARGET, [old, part("StatefulSet", "herd-w", owner="older", status=stateful_set()["status"])])
    assert facts.objects == {}
    assert facts.settled is False


def test_claims() -> None:
    ours = part("PersistentVolumeClaim", "herd-model", "fetch", status={"phase": "Bound"})
    theirs = {"kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "status": {"phase": "Lost"}}
    assert observed.read(TARGET, [ours]).claim == "Bound"
    assert observed.read(TARGET, [ours], theirs).claim == "Lost"


@pytest.mark.parametrize(
    ("kind", "service", "address"),
    [
        ("ClusterIP", {"spec": {"clusterIP": "10.1.1.1"}}, "10.1.1.1:50052"),
        ("ClusterIP", {"spec": {"clusterIP": "fd00::1"}}, "[fd00::1]:50052"),
        ("NodePort", {"spec": {"ports": [{"nodePort": 31000}]}}, "192.168.0.1:31000"),
        ("NodePort", {"spec": {"ports": [{}]}}, ""),
        ("LoadBalancer", {"spec": {}, "status": {"loadBalancer": {"ingress": [{"hostname": "lb"}]}}}, "lb:50052"),
        ("LoadBalancer", {"spec": {}, "status": {"loadBalancer": {}}}, ""),
    ],
)
def test_addresses_for_clients_outside(kind: str, service: Body, address: str) -> None:
    wanted = target.read(body(expose={"type": kind}), DEFAULTS)
    objects = [part("Service", "herd-w-0-rpc", **service), pod("herd-w-0", hostIP="192.168.0.1")]
    assert observed.read(wanted, objects).exposed[0] == address


def waiting(reason: str, message: str = "") -> Body:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}, "restartCount": 0}]}


def crashed(**ended_: Any) -> Body:
    last = {"terminated": ended_}
    state = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {"containerStatuses": [{"state": state, "lastState": last, "ready": False, "restartCount": 3}]}


def unplaced(message: str) -> Body:
    row = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [row]}


NODES = "0/3 nodes are available: "


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        ({}, None, ""),
        (unplaced(f"{NODES}3 Insufficient nvidia.com/gpu."), "DeviceMissing", "no node has a free GPU"),
        (unplaced(f"{NODES}3 Insufficient memory."), "Unschedulable", "lower memory or resources"),
        (unplaced(f"{NODES}1 Insufficient cpu, 2 Insufficient nvidia.com/gpu."), "DeviceMissing", "device plugin"),
        (unplaced(f"{NODES}3 Insufficient cpu."), "Unschedulable", "free processors"),
        (unplaced(f"{NODES}3 node(s) had untolerated taint {{gpu: }}."), "Unschedulable", "add tolerations"),
        (unplaced(f"{NODES}3 node(s) didn't match Pod's node affinity/selector."), "Unschedulable", "nodeSelector"),
        (unplaced("pod has unbound immediate PersistentVolumeClaims."), "VolumeNotBound", "check storageClassName"),
        (unplaced("didn't find available persistent volumes to bind."), "VolumeNotBound", "provisioner"),
        (unplaced("something new"), "Unschedulable", "something new"),
        (waiting("ImagePullBackOff", 'Back-off pulling image "x"'), "ImagePullFailed", "check the image's name"),
        (waiting("ErrImagePull", "not found"), "ImagePullFailed", "not found"),
        (waiting("InvalidImageName"), "ImagePullFailed", "not valid"),
        (waiting("CreateContainerConfigError", 'secret "tok" not found'), "CannotStart", 'secret "tok" not found'),
        (waiting("ContainerCreating"), None, ""),
        (crashed(exitCode=1, message="drover: error: --memory 0: nothing"), "Crashing", "--memory 0: nothing"),
        (crashed(exitCode=1, message="a\nb\nOSError: c\n"), "Crashing", "3 times so far: OSError: c"),
        (crashed(exitCode=137, reason="OOMKilled"), "Crashing", "more memory than resources.limits.memory allows"),
        (crashed(exitCode=137, reason="Error"), "Crashing", "it was killed (SIGKILL)"),
        (crashed(exitCode=135, reason="Error"), "Crashing", "(SIGBUS): a file was cut short while it was read"),
        ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"}, "PodFailed", "low on mem"),
    ],
)
def test_what_keeps_a_pod_from_running(status: Body, reason: str | None, words: str) -> None:
    found = troubles.of(pod("herd-w-0", **({"conditions": []} | status)))
    assert (found.reason if found else None) == reason
    if found:
        assert words in found.message
        assert found.message.startswith("herd-w-0")


def test_long_words_are_cut() -> None:
    found = troubles.of(pod("p", **waiting("ErrImagePull", "x" * 5000)))
    assert found is not None
    assert len(found.message) < 600


def test_a_container_that_runs_again_is_no_trouble() -> None:
    good = crashed(exitCode=1)
    good["containerStatuses"][0] |= {"state": {"running": {}}, "ready": True}
    assert troubles.of(pod("p", **good)) is None


def test_a_published_layout_that_is_damaged_is_none() -> None:
    plan = part("ConfigMap", "herd-plan", "coordinator", data={"plan.json": json.dumps({"shares": 1})})
    assert observed.read(TARGET, [plan]).published is None
