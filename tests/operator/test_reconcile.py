"""Whole cycles against a small Kubernetes: what comes to be, what is put back, and that it comes to rest."""

import copy
import json
from typing import Any

import pytest

from drover.errors import WorkerError
from drover_operator.errors import ExistsError
from drover_operator.mirror import Mirrored
from drover_operator.reconcile import reconcile
from support.fake_kubernetes import FakeKubernetes, PowerCutError
from support.operator_world import DEFAULTS, FETCHED, HEADER, LOADED, World, body

CONDITIONS = ("WorkersReady", "ModelAvailable", "Planned", "SplitVerified", "Serving", "Ready")


def names(api: FakeKubernetes) -> set[tuple[str, str]]:
    return {(kind, name) for kind, _, name in api.objects if kind != "Pod"}


def test_from_nothing_to_ready(world: World) -> None:
    world.run()
    assert {name: world.said(name)[0] for name in CONDITIONS} == dict.fromkeys(CONDITIONS, "True")
    assert names(world.api) == {
        ("InferenceCluster", "herd"),
        ("StatefulSet", "herd-w"),
        ("Service", "herd-w"),
        ("PodDisruptionBudget", "herd-w"),
        ("NetworkPolicy", "herd-w"),
        ("PersistentVolumeClaim", "herd-model"),
        ("Job", "herd-header"),
        ("Job", "herd-fetch"),
        ("ConfigMap", "herd-plan"),
        ("Job", "herd-load"),
        ("Deployment", "herd"),
        ("Service", "herd"),
    }
    status = world.status
    assert status["workers"] == "2/2"
    assert status["endpoints"] == {
        "rpc": ["herd-w-0.herd-w.farm.svc:50052", "herd-w-1.herd-w.farm.svc:50052"],
        "openai": "http://herd.farm.svc:8080/v1",
        "llamaServerArgs": "--rpc herd-w-0.herd-w.farm.svc:50052,herd-w-1.herd-w.farm.svc:50052 --tensor-split 1,1 "
        "--n-gpu-layers 999",
    }
    assert status["plan"] == [
        {"worker": "herd-w-0", "device": "cpu", "proportion": 1.0, "layers": "0-4", "bytes": 100},
        {"worker": "herd-w-1", "device": "cpu", "proportion": 1.0, "layers": "5-7 + output", "bytes": 50},
    ]
    assert (status["report"]["tokensPerSecond"], status["report"]["bytesUploaded"]) == (12.5, 150)
    assert "text" not in status["report"]
    assert "odd" not in status["report"]["stages"][1]


def test_the_plan_is_what_a_stock_client_needs(world: World) -> None:
    world.totals = {"10.0.0.1": [6 << 30], "10.0.0.2": [2 << 30]}
    world.run()
    data = world.api.one("ConfigMap", "herd-plan")["data"]
    plan = json.loads(data.pop("plan.json"))
    assert data == {
        "LLAMA_ARG_RPC": "herd-w-0.herd-w.farm.svc:50052,herd-w-1.herd-w.farm.svc:50052",
        "LLAMA_ARG_TENSOR_SPLIT": "6,2",
        "LLAMA_ARG_N_GPU_LAYERS": "999",
    }
    assert [share["total"] for share in plan["shares"]] == [6 << 30, 2 << 30]


def test_when_nothing_changes_nothing_is_written_and_nobody_asked(world: World) -> None:
    world.run()
    writes, asked = len(world.api.writes), len(world.asked)
    for _ in range(5):
        world.wait(3600)
        world.api.settle()
        assert world.cycle().again is None
    assert (len(world.api.writes), len(world.asked)) == (writes, asked)


def test_a_cycle_that_sees_only_what_it_wrote_itself_does_not_write_it_again(world: World) -> None:
    """Events may be late; what the operator wrote it knows from the answers."""
    world.cycle()
    writes = len(world.api.writes)
    assert world.mirror is not None
    for _ in range(3):
        reconcile("farm", "herd", Mirrored(world.api, world.mirror), world.probe, DEFAULTS, lambda: world.now)
    assert len(world.api.writes) <= writes + 2  # a status, and news of it
    world.run()
    assert world.said("Ready")[0] == "True"


def test_an_object_whose_going_was_missed_is_made_again_in_the_end(world: World) -> None:
    world.run()
    world.api.remove(world.api.one("PodDisruptionBudget", "herd-w"))
    world.known = copy.deepcopy(world.api.objects)
    world.cycle()
    assert not world.api.has("PodDisruptionBudget", "herd-w")
    world.wait(601)
    world.cycle()
    assert world.api.has("PodDisruptionBudget", "herd-w")


def test_serving_starts_only_when_the_split_is_verified(world: World) -> None:
    del world.api.ends["herd-load"]
    world.run()
    assert world.api.one("Deployment", "herd")["spec"]["replicas"] == 0
    assert world.said("SplitVerified") == ("Unknown", "Loading")
    world.api.ends["herd-load"] = (0, LOADED)
    world.run()
    assert world.api.one("Deployment", "herd")["spec"]["replicas"] == 1


def test_a_split_that_is_not_proven_is_not_served(world: World) -> None:
    fault = {"ok": False, "reason": "SplitMismatch", "message": "worker herd-w-1 holds nothing of the model"}
    world.api.ends["herd-load"] = (1, fault)
    world.run()
    assert world.said("SplitVerified") == ("False", "SplitMismatch")
    assert "holds nothing" in world.message("SplitVerified")
    assert "delete the Job herd-load" in world.message("SplitVerified")
    assert world.said("Ready") == ("False", "SplitMismatch")
    assert world.api.one("Deployment", "herd")["spec"]["replicas"] == 0
    assert world.api.writes.count("apply Job herd-load") == 1


def test_a_model_that_does_not_fit_is_a_fault_of_the_plan(world: World) -> None:
    fault = {"ok": False, "reason": "DoesNotFit", "message": "the model does not fit: 3 GiB are left over"}
    world.api.ends["herd-load"] = (1, fault)
    world.run()
    assert world.said("Planned") == ("False", "DoesNotFit")
    assert "3 GiB are left over" in world.message("Ready")


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"ok": False, "reason": "ChecksumMismatch", "message": "m.gguf has the hash 12"}, "ChecksumMismatch"),
        ("Traceback\nOSError: no space left on device", "FetchFailed"),
    ],
)
def test_a_download_that_fails_ends_in_a_condition(world: World, report: Any, reason: str) -> None:
    world.api.ends["herd-fetch"] = (1, report)
    world.run()
    assert world.said("ModelAvailable") == ("False", reason)
    assert world.said("Ready") == ("False", reason)
    said = report["message"] if isinstance(report, dict) else report.splitlines()[-1]
    assert said in world.message("ModelAvailable")
    assert not world.api.has("Job", "herd-load")


def test_the_header_comes_before_the_download(world: World) -> None:
    ends = world.api.ends
    world.api.ends = {}
    world.run()
    assert world.api.has("Job", "herd-header")
    assert not world.api.has("Job", "herd-fetch")
    assert world.said("ModelAvailable") == ("False", "Fetching")
    assert world.message("ModelAvailable").startswith("the head of hf://org/repo/m.gguf is being read")
    world.api.ends = {"herd-header": ends["herd-header"]}
    world.run()
    assert world.api.has("Job", "herd-fetch")
    assert world.said("ModelAvailable") == ("False", "Fetching")
    assert "is being downloaded" in world.message("ModelAvailable")
    assert not [volume for volume in pod_spec(world, "herd-header")["volumes"] if "persistentVolumeClaim" in volume]


def pod_spec(world: World, job: str) -> dict[str, Any]:
    spec: dict[str, Any] = world.api.one("Job", job)["spec"]["template"]["spec"]
    return spec


def test_layers_are_known_before_the_model_is_there(world: World) -> None:
    world.api.ends = {"herd-header": (0, HEADER)}
    world.run()
    rows = [(row["worker"], row["layers"], row["bytes"]) for row in world.status["plan"]]
    assert rows == [("herd-w-0", "0-4", 100), ("herd-w-1", "5-7 + output", 50)]
    assert world.said("Planned")[0] == "True"
    world.api.ends |= {"herd-fetch": (0, FETCHED)}
    world.run()
    args = pod_spec(world, "herd-load")["containers"][0]["args"]
    assert json.loads(args[args.index("--expect") + 1]) == {
        "herd-w-0.herd-w.farm.svc:50052": [0, 4],
        "herd-w-1.herd-w.farm.svc:50052": [5, 7],
    }


def test_a_model_that_is_larger_than_its_volume_is_not_downloaded(world: World) -> None:
    world.api.ends["herd-header"] = (0, HEADER | {"bytes": 3 << 30})
    world.run()
    assert world.said("ModelAvailable") == ("False", "VolumeTooSmall")
    assert "1.0 GiB are missing" in world.message("Ready")
    assert "apply Job herd-fetch" not in world.api.writes
    world.api.ends["herd-fetch"] = (0, FETCHED | {"bytes": 3 << 30})
    world.api.change("herd", model={"source": "hf://org/repo/m.gguf", "storage": {"size": "4Gi"}})
    world.run()
    assert world.said("Ready")[0] == "True"
    assert world.api.writes.count("apply Job herd-header") == 1


def test_a_model_that_the_workers_cannot_hold_is_not_downloaded(world: World) -> None:
    world.totals = {"10.0.0.1": [60], "10.0.0.2": [60]}
    ends, world.api.ends = world.api.ends, {}
    world.run()
    world.api.ends = ends
    world.run()
    assert world.said("Planned") == ("False", "DoesNotFit")
    assert "70 B, are left over" in world.message("Planned")
    assert world.said("Ready") == ("False", "DoesNotFit")
    assert world.said("ModelAvailable") == ("False", "Waiting")
    assert "apply Job herd-fetch" not in world.api.writes
    world.totals = {}
    world.api.change("herd", workers=[{"name": "w", "replicas": 2, "memory": "2Gi"}])
    world.run()
    assert world.said("Ready")[0] == "True"


def test_a_download_is_stopped_once_the_model_is_known_not_to_fit_and_goes_on_when_it_does(world: World) -> None:
    """The workers may come later than the header; what was downloaded stays on the volume."""
    world.totals = {"10.0.0.1": [60], "10.0.0.2": [60]}
    world.fault = WorkerError("not yet")
    del world.api.ends["herd-fetch"]
    world.run()
    assert world.api.has("Job", "herd-fetch")
    world.fault = None
    world.run()
    assert world.said("Planned") == ("False", "DoesNotFit")
    assert world.said("ModelAvailable") == ("False", "Waiting")
    assert not world.api.has("Job", "herd-fetch")
    assert world.api.has("PersistentVolumeClaim", "herd-model")
    world.totals, world.api.ends["herd-fetch"] = {}, (0, FETCHED)
    world.api.change("herd", workers=[{"name": "w", "replicas": 2, "memory": "2Gi"}])
    world.run()
    assert world.said("Ready")[0] == "True"
    assert world.api.writes.count("apply Job herd-fetch") == 2
    assert world.api.writes.count("apply Job herd-header") == 1


def test_a_model_that_is_there_is_not_loaded_into_workers_that_cannot_hold_it(world: World) -> None:
    world.run()
    world.totals = {"10.0.0.1": [60], "10.0.0.2": [60]}
    world.api.change("herd", workers=[{"name": "w", "replicas": 2, "memory": "60"}])
    world.run()
    assert world.said("Planned") == ("False", "DoesNotFit")
    assert world.said("ModelAvailable")[0] == "True"
    assert world.api.one("Deployment", "herd")["spec"]["replicas"] == 0
    assert world.api.writes.count("apply Job herd-load") == 1


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"ok": False, "reason": "NotFound", "message": "no such repository"}, "NotFound"),
        ({"ok": False, "reason": "ModelUnreadable", "message": "not a GGUF file but a web page"}, "ModelUnreadable"),
        ({"ok": False, "reason": "UnsupportedArchitecture", "message": "'qwen25vl'"}, "UnsupportedArchitecture"),
        ("Killed", "FetchFailed"),
    ],
)
def test_a_header_that_cannot_be_had_is_no_model(world: World, report: Any, reason: str) -> None:
    world.api.ends["herd-header"] = (1, report)
    world.run()
    assert world.said("ModelAvailable") == ("False", reason)
    assert world.said("Ready") == ("False", reason)
    said = report["message"] if isinstance(report, dict) else report
    assert said in world.message("ModelAvailable")
    assert "delete the Job herd-header" in world.message("ModelAvailable")
    assert not world.api.has("Job", "herd-fetch")
    world.api.ends["herd-header"] = (0, HEADER)
    world.api.remove(world.api.one("Job", "herd-header"))
    world.run()
    assert world.said("Ready")[0] == "True"


def test_a_header_is_remembered_when_its_job_is_gone(world: World) -> None:
    world.api.ends = {"herd-header": (0, HEADER)}
    world.run()
    world.api.remove(world.api.one("Job", "herd-header"))
    world.run()
    assert world.status["header"]["units"] == [[20, 5], [10, 3], [20, 1]]
    assert world.status["plan"][0]["layers"] == "0-4"
    assert not world.api.has("Job", "herd-header")


def test_another_context_is_asked_about_until_the_model_is_there(world: World) -> None:
    world.api.ends = {"herd-header": (0, HEADER)}
    world.run()
    world.api.change("herd", context=2048)
    world.run()
    assert world.api.writes.count("apply Job herd-header") == 2
    assert world.api.writes.count("apply Job herd-fetch") == 1, "the download goes on"
    world.api.ends |= {"herd-fetch": (0, FETCHED), "herd-load": (0, LOADED)}
    world.run()
    assert "header" in world.status
    world.api.change("herd", context=1024)
    world.run()
    assert world.said("Ready")[0] == "True"
    assert world.api.writes.count("apply Job herd-header") == 2, "the load reads the file itself"
    assert "header" not in world.status
    assert "--expect" not in pod_spec(world, "herd-load")["containers"][0]["args"]


def test_a_header_without_units_stops_nothing(world: World) -> None:
    world.api.ends["herd-header"] = (0, HEADER | {"units": None})
    world.run()
    assert world.said("Ready")[0] == "True"
    assert world.status["header"]["units"] == []


def test_a_header_is_not_asked_for_where_the_model_is_there(world: World) -> None:
    """As of an operator that did not ask for headers yet."""
    world.run()
    world.api.remove(world.api.one("Job", "herd-header"))
    del world.status["header"]
    writes = len(world.api.writes)
    world.run()
    assert world.api.writes[writes:] == []


def test_deleting_a_failed_job_tries_again(world: World) -> None:
    world.api.ends["herd-fetch"] = (1, "no route")
    world.run()
    world.api.ends["herd-fetch"] = (0, FETCHED)
    world.api.remove(world.api.one("Job", "herd-fetch"))
    world.run()
    assert world.said("Ready")[0] == "True"


def test_a_successful_load_is_remembered_when_its_job_is_gone(world: World) -> None:
    world.run()
    for name in ("herd-load", "herd-fetch"):
        world.api.remove(world.api.one("Job", name))
    world.run()
    assert world.said("Ready")[0] == "True"
    assert not world.api.has("Job", "herd-load")


def test_a_load_runs_again_when_a_worker_is_another_pod(world: World) -> None:
    world.run()
    first = world.api.one("Job", "herd-load")["metadata"]["uid"]
    world.api.remove(world.api.one("Pod", "herd-w-1"))
    world.run()
    assert world.said("Ready")[0] == "True"
    assert world.api.one("Job", "herd-load")["metadata"]["uid"] != first
    world.cycle()
    assert world.api.writes.count("apply Job herd-load") == 2
    deletes = [what for what in world.api.writes if what.startswith("delete")]
    assert deletes == ["delete Job herd-load"]


def test_nobody_serves_an_old_plan_while_a_new_one_is_loaded(world: World) -> None:
    world.run()
    world.api.remove(world.api.one("Pod", "herd-w-1"))
    del world.api.ends["herd-load"]
    seen = []
    for _ in range(12):
        world.api.settle()
        world.cycle()
        parts = [pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in world.api.all("Pod")]
        seen.append((parts.count("load"), parts.count("coordinator")))
    assert (1, 0) in seen
    assert not any(loading and coordinators for loading, coordinators in seen)


@pytest.mark.parametrize("replicas", [3, 1])
def test_scaling_a_group_makes_a_new_plan(world: World, replicas: int) -> None:
    world.run()
    world.api.change("herd", workers=[{"name": "w", "replicas": replicas, "memory": "1Gi"}])
    world.run()
    assert world.said("Ready")[0] == "True"
    assert len(world.status["endpoints"]["rpc"]) == replicas
    assert world.api.one("ConfigMap", "herd-plan")["data"]["LLAMA_ARG_TENSOR_SPLIT"] == ",".join(["1"] * replicas)


def test_another_model_is_fetched_and_loaded(world: World) -> None:
    world.run()
    world.api.ends["herd-fetch"] = (0, FETCHED | {"path": "/models/n.gguf"})
    world.api.change("herd", model={"source": "hf://org/repo/n.gguf", "storage": {"size": "2Gi"}})
    world.run()
    assert world.said("Ready")[0] == "True"
    (container,) = world.api.one("Deployment", "herd")["spec"]["template"]["spec"]["containers"]
    assert container["args"][1] == "/models/n.gguf"


def test_a_removed_group_goes_and_its_volumes_stay(world: World) -> None:
    group = {"name": "old", "cache": {"size": "1Gi"}}
    world.api.change("herd", workers=[{"name": "w", "replicas": 2}, group])
    world.run()
    assert world.api.has("StatefulSet", "herd-old")
    world.api.change("herd", workers=[{"name": "w", "replicas": 2}])
    world.run()
    assert not [name for _, name in names(world.api) if name == "herd-old"]
    assert world.said("Ready")[0] == "True"


def test_suspend_stops_everything_and_keeps_the_model(world: World) -> None:
    world.run()
    world.api.change("herd", suspend=True)
    world.run()
    assert {pod["status"]["phase"] for pod in world.api.all("Pod")} == {"Succeeded"}
    assert world.api.has("PersistentVolumeClaim", "herd-model")
    assert world.said("Ready") == ("False", "Suspended")
    assert world.status["workers"] == "0/2"
    assert {event[0] for event in world.api.events if event[1] == "Suspended"} == {"Normal"}
    world.api.change("herd", suspend=False)
    world.run()
    assert world.said("Ready")[0] == "True"


def test_hand_made_changes_are_put_back_with_an_event(world: World) -> None:
    world.run()
    world.api.edit("StatefulSet", "herd-w", "replicas", 5)
    world.cycle()
    assert world.api.one("StatefulSet", "herd-w")["spec"]["replicas"] == 2
    assert [event for event in world.api.events if event[1] == "PutBack"] == [
        (
            "Warning",
            "PutBack",
            "StatefulSet herd-w was changed by hand and is put back; change the InferenceCluster instead",
        )
    ]
    world.cycle()
    assert len([event for event in world.api.events if event[1] == "PutBack"]) == 1


def test_what_was_deleted_by_hand_comes_back(world: World) -> None:
    world.run()
    for kind in ("NetworkPolicy", "Service", "StatefulSet"):
        world.api.remove(world.api.one(kind, "herd-w"))
    world.run()
    assert world.said("Ready")[0] == "True"


def test_an_object_that_belongs_to_someone_else_is_left_alone(world: World) -> None:
    foreign = {"kind": "Service", "metadata": {"name": "herd", "namespace": "farm", "labels": {}}, "spec": {"a": 1}}
    world.api.create(foreign)
    world.run()
    assert world.api.one("Service", "herd")["spec"] == {"a": 1}
    assert world.said("Ready") == ("False", "Refused")
    assert "belongs to someone else" in world.message("Ready")


def test_what_came_a_moment_before_is_left_alone_too(world: World) -> None:
    """The operator has not heard of it, and does not ask before it makes an object."""
    world.deliver()
    foreign = {"kind": "Service", "metadata": {"name": "herd", "namespace": "farm", "labels": {}}, "spec": {"a": 1}}
    world.api.create(foreign)
    assert world.mirror is not None
    reconcile("farm", "herd", Mirrored(world.api, world.mirror), world.probe, DEFAULTS, lambda: world.now)
    assert world.api.one("Service", "herd")["spec"] == {"a": 1}
    world.api.remove(world.api.one("Service", "herd"))
    world.run()
    assert world.said("Ready")[0] == "True"


def test_an_object_of_ours_that_lost_its_labels_is_taken_back(world: World) -> None:
    world.run()
    plan = world.api.one("ConfigMap", "herd-plan")
    labels, plan["metadata"]["labels"] = plan["metadata"]["labels"], {}
    assert world.mirror is not None
    world.mirror.drop("ConfigMap", plan)
    reconcile("farm", "herd", Mirrored(world.api, world.mirror), world.probe, DEFAULTS, lambda: world.now)
    assert world.api.one("ConfigMap", "herd-plan")["metadata"]["labels"] == labels
    world.run()
    assert world.said("Ready")[0] == "True"


def test_an_api_server_that_makes_nothing_where_a_version_is_named_is_asked_plainly(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(manifest: dict[str, Any]) -> Any:
        raise ExistsError(f"{manifest['kind']} {manifest['metadata']['name']}")

    monkeypatch.setattr(world.api, "make", refuse)
    world.run()
    assert world.said("Ready")[0] == "True"


def test_a_new_cluster_costs_a_request_an_object_a_status_and_an_event(world: World) -> None:
    world.cycle()
    assert world.api.calls == len(world.api.objects) - 1 + 2
    assert world.said("ModelAvailable") == ("False", "Fetching")
    world.cycle()
    assert world.api.calls == len(world.api.objects) - 1 + 2


def test_what_the_api_server_refuses_is_a_condition_and_the_rest_goes_on(world: World) -> None:
    world.api.refuse = lambda made: "exceeded quota" if made["kind"] == "StatefulSet" else None
    world.run()
    assert world.said("WorkersReady") == ("False", "Refused")
    assert "StatefulSet herd-w: exceeded quota" in world.message("WorkersReady")
    assert world.api.has("NetworkPolicy", "herd-w")
    assert world.cycle().again == 60


def test_a_service_that_cannot_be_put_back_is_made_anew(world: World) -> None:
    world.run()
    uid = world.api.one("Service", "herd")["metadata"]["uid"]
    world.api.edit("Service", "herd", "ports", [{"name": "http", "port": 9999}])
    world.api.refuse = lambda made: (
        "duplicate port" if made["metadata"]["name"] == "herd" and world.api.has("Service", "herd") else None
    )
    world.run()
    assert world.api.one("Service", "herd")["metadata"]["uid"] != uid
    assert world.said("Ready")[0] == "True"


def test_a_worker_that_does_not_answer_is_asked_again(world: World) -> None:
    world.fault = WorkerError("the worker at 10.0.0.1:50052 speaks ggml RPC 7.0, we speak 8.0")
    world.run()
    assert world.said("Planned") == ("False", "ProbeFailed")
    assert "speaks ggml RPC 7.0" in world.message("Planned")
    assert world.cycle().again == 10
    world.fault = None
    world.run()
    assert world.said("Ready")[0] == "True"


def test_proportions_that_do_not_match_the_devices_found_are_not_asked_again(world: World) -> None:
    world.api.change("herd", split={"proportions": [1, 2]})
    world.totals = {"10.0.0.1": [1 << 30, 1 << 30]}
    world.run()
    assert world.said("Planned") == ("False", "InvalidSplit")
    assert world.cycle().again is None


def assert_loads_end(world: World, cycles: int) -> None:
    """Four loads, each after a pause twice as long as the one before, and then no more."""
    pauses = []
    for _ in range(cycles):
        world.run()
        world.api.settle()
        again = world.cycle().again
        pauses.append(again)
        world.wait(again or 3600)
    assert pauses[:3] == [20, 40, 80]
    assert set(pauses[3:]) == {None}
    assert world.api.writes.count("apply Job herd-load") == 4


def test_loads_that_keep_failing_come_later_and_later_and_then_no_more(world: World) -> None:
    world.api.ends["herd-load"] = (3, {"ok": False, "reason": "WorkerUnavailable", "message": "worker w-1 went away"})
    assert_loads_end(world, cycles=10)
    assert world.status["loadFailures"]["count"] == 4
    world.api.ends["herd-load"] = (0, LOADED)
    world.api.change("herd", context=2048)
    world.run()
    assert world.said("Ready")[0] == "True"
    assert "loadFailures" not in world.status


def test_a_crash_loop_of_workers_does_not_load_for_ever(world: World) -> None:
    """Each time the load kills a worker, that comes back as another pod: the same failure about other pods."""
    world.api.ends["herd-load"] = (1, {"ok": False, "reason": "OutOfMemory", "message": "worker w-1 cannot reserve"})
    for _ in range(12):
        world.run()
        world.api.remove(world.api.one("Pod", "herd-w-1"))
        world.wait(3600)
    world.run()
    assert world.api.writes.count("apply Job herd-load") == 4
    assert world.said("SplitVerified") == ("False", "TooManyFailures")


def proven(world: World, fingerprint: str) -> None:
    """What the load Job will find."""
    world.api.ends["herd-load"] = (0, LOADED | {"fingerprint": fingerprint})


def serving_arguments(world: World) -> str:
    return " ".join(world.api.one("Deployment", "herd")["spec"]["template"]["spec"]["containers"][0]["args"])


def test_a_model_that_is_replaced_under_a_running_cluster_is_proven_anew(world: World) -> None:
    proven(world, "aaaa")
    world.run()
    assert world.status["report"]["fingerprint"] == "aaaa"
    assert "--fingerprint aaaa " in serving_arguments(world)
    first = world.api.one("Job", "herd-load")["metadata"]
    world.api.volume = "bbbb"
    proven(world, "bbbb")
    world.run()
    assert world.said("SplitVerified") == ("False", "ModelReplaced")
    assert world.said("Ready") == ("False", "ModelReplaced")
    assert not world.api.has("Job", "herd-load")
    assert world.api.one("Deployment", "herd")["spec"]["replicas"] == 0
    told = [(kind, reason) for kind, reason, _ in world.api.events if reason == "ModelReplaced"]
    assert told == [("Warning", "ModelReplaced")]
    assert world.cycle().again == 20
    world.wait(20)
    world.run()
    assert world.said("Ready")[0] == "True"
    assert world.status["report"]["fingerprint"] == "bbbb"
    assert "--fingerprint bbbb " in serving_arguments(world)
    second = world.api.one("Job", "herd-load")["metadata"]
    assert second["annotations"]["drover.dev/loads"] != first["annotations"]["drover.dev/loads"]
    assert "loadFailures" not in world.status
    assert world.status["modelReplaced"]["proven"] is True
    assert (world.cycle().writes, world.cycle().again) == (0, None)


def test_a_model_that_is_replaced_while_the_operator_is_away_is_proven_anew(world: World) -> None:
    proven(world, "aaaa")
    world.run()
    world.restart()
    world.api.volume = "bbbb"
    proven(world, "bbbb")
    world.run()
    world.restart()
    world.wait(20)
    world.run()
    assert world.said("Ready")[0] == "True"
    assert world.status["report"]["fingerprint"] == "bbbb"


def test_a_replaced_model_of_another_hash_than_the_spec_says_is_not_served(world: World) -> None:
    proven(world, "aaaa")
    world.run()
    world.api.volume = "bbbb"
    mismatch = {"ok": False, "reason": "ChecksumMismatch", "message": "m.gguf has the SHA-256 1, and should have 2"}
    world.api.ends["herd-load"] = (1, mismatch)
    world.run()
    world.wait(20)
    world.run()
    for name in ("SplitVerified", "ModelAvailable"):
        assert world.said(name) == ("False", "ChecksumMismatch")
        assert "write the new one's hash into spec.model.sha256" in world.message(name)
    assert world.api.one("Deployment", "herd")["spec"]["replicas"] == 0
    assert world.cycle().again is None
    world.api.volume = "aaaa"
    proven(world, "aaaa")
    world.api.remove(world.api.one("Job", "herd-load"))
    world.wait(40)
    world.run()
    assert world.said("Ready")[0] == "True"


def test_nodes_that_do_not_show_the_same_file_do_not_load_for_ever(world: World) -> None:
    proven(world, "aaaa")
    world.api.volume = "bbbb"
    assert_loads_end(world, cycles=8)
    assert world.said("SplitVerified") == ("False", "TooManyFailures")
    assert "see that all nodes show the same file" in world.message("SplitVerified")
    world.api.volume = "aaaa"
    world.api.change("herd", context=2048)
    world.run()
    assert world.said("Ready")[0] == "True"


def test_memory_that_is_about_the_same_keeps_the_plan(world: World) -> None:
    world.totals = {"10.0.0.1": [1000 << 20], "10.0.0.2": [1000 << 20]}
    world.run()
    before = world.api.one("ConfigMap", "herd-plan")["data"]["LLAMA_ARG_TENSOR_SPLIT"]
    world.totals = {"10.0.0.1": [990 << 20], "10.0.0.2": [1010 << 20]}
    world.api.remove(world.api.one("Pod", "herd-w-0"))
    world.run()
    assert world.api.one("ConfigMap", "herd-plan")["data"]["LLAMA_ARG_TENSOR_SPLIT"] == before
    world.totals = {"10.0.0.1": [2000 << 20], "10.0.0.2": [1000 << 20]}
    world.api.remove(world.api.one("Pod", "herd-w-0"))
    world.run()
    assert world.api.one("ConfigMap", "herd-plan")["data"]["LLAMA_ARG_TENSOR_SPLIT"] == "1.95,0.98"


def test_a_spec_that_is_not_valid_is_a_condition_and_changes_nothing(world: World) -> None:
    world.run()
    world.api.change("herd", workers=[{"name": "w", "replicas": 2, "memory": "much"}])
    writes = len(world.api.writes)
    assert world.cycle().again is None
    assert world.said("Ready") == ("False", "SpecInvalid")
    assert "spec.workers[0].memory: 'much' is not a size" in world.message("Ready")
    assert [what for what in world.api.writes[writes:] if what not in ("status", "event")] == []
    assert world.said("WorkersReady")[0] == "True"
    world.cycle()
    assert world.api.writes[writes:].count("status") == 1


def test_a_model_on_a_claim_of_the_users(world: World) -> None:
    world.api.change("herd", model={"source": "pvc://models/llama/m.gguf"})
    world.run()
    assert world.said("ModelAvailable") == ("False", "ClaimMissing")
    assert world.cycle().again == 15
    metadata = {"name": "models", "namespace": "farm"}
    world.api.create({"kind": "PersistentVolumeClaim", "metadata": metadata, "status": {"phase": "Bound"}})
    world.run()
    assert world.said("Ready")[0] == "True"
    assert not world.api.has("Job", "herd-fetch")
    assert not world.api.has("PersistentVolumeClaim", "herd-model")
    pod = world.api.one("Deployment", "herd")["spec"]["template"]["spec"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod["volumes"]
    assert pod["containers"][0]["args"][1] == "/models/llama/m.gguf"


def test_without_serving_the_workers_are_ready_for_others(world: World) -> None:
    world.api.change("herd", serving={"enabled": False})
    world.run()
    assert (world.said("Serving"), world.said("Ready")[0]) == (("False", "Disabled"), "True")
    assert not world.api.has("Deployment", "herd")
    assert "openai" not in world.status["endpoints"]


def test_exposed_workers_have_services_and_addresses(world: World) -> None:
    world.api.change("herd", expose={"type": "NodePort"})
    world.run()
    for index in range(2):
        world.api.one("Service", f"herd-w-{index}-rpc")["spec"]["ports"][0]["nodePort"] = 30000 + index
    world.run()
    assert world.status["endpoints"]["exposed"] == ["192.168.0.9:30000", "192.168.0.9:30001"]
    world.api.change("herd", expose={"type": "None"})
    world.run()
    assert not world.api.has("Service", "herd-w-0-rpc")


def test_deleting_takes_everything_with_it(world: World) -> None:
    world.run()
    world.api.remove(world.api.one("InferenceCluster", "herd"))
    assert world.api.objects == {}
    assert world.cycle().writes == 0


def shape(api: FakeKubernetes) -> dict[tuple[str, str, str], Any]:
    """Everything but what differs from one run to the next: uids, and what follows from them."""
    text = json.dumps({"|".join(key): value for key, value in sorted(api.objects.items())}, sort_keys=True)
    data = json.loads(text)
    for value in data.values():
        metadata = value["metadata"]
        for key in ("uid", "managedFields", "generation", "ownerReferences", "annotations"):
            metadata.pop(key, None)
        template = value.get("spec", {}).get("template", {})
        template.get("metadata", {}).pop("annotations", None)
        for key in ("observedGeneration", "currentRevision", "updateRevision"):
            value.get("status", {}).pop(key, None)
        value.get("status", {}).get("report", {}).pop("of", None)
        value.get("data", {}).pop("plan.json", None)
    pods = {key for key in data if key.startswith("Pod|")}
    for key in pods:
        value = data.pop(key)
        data.setdefault("|".join([*key.split("|")[:2], value["metadata"]["labels"]["app.kubernetes.io/component"]]), 0)
    return data


def test_killed_between_any_two_calls_it_comes_to_the_same(world: World) -> None:
    world.run()
    wanted, calls = shape(world.api), world.api.calls
    assert calls > 20
    for moment in range(1, calls + 1):
        for when in ("dies_before", "dies_after"):
            other = World()
            other.api.create(body())
            other.api.ends = world.api.ends
            setattr(other.api, when, moment)
            with pytest.raises(PowerCutError):
                other.run()
            other.restart()
            other.run()
            assert shape(other.api) == wanted, (when, moment)


def test_killed_while_a_model_is_found_too_large_it_comes_to_the_same(world: World) -> None:
    """The header, a download that is stopped, and one that goes on."""
    ends = world.api.ends

    def start(other: World) -> None:
        other.totals, other.fault = {"10.0.0.1": [60], "10.0.0.2": [60]}, WorkerError("not yet")
        other.api.ends = {name: end for name, end in ends.items() if name != "herd-fetch"}

    def story(other: World) -> None:
        other.run()
        other.fault = None
        other.run()

    def end(other: World) -> None:
        other.totals, other.api.ends = {}, ends
        other.api.change("herd", workers=[{"name": "w", "replicas": 2, "memory": "2Gi"}])
        other.run()

    start(world)
    story(world)
    calls = world.api.calls
    end(world)
    wanted = shape(world.api)
    for moment in range(1, calls + 1):
        other = World()
        other.api.create(body())
        start(other)
        other.api.dies_after = moment
        with pytest.raises(PowerCutError):
            story(other)
        other.restart()
        story(other)
        end(other)
        assert shape(other.api) == wanted, moment


def test_killed_while_a_model_is_replaced_it_comes_to_the_same(world: World) -> None:
    def replaced(other: World) -> None:
        other.api.volume = "bbbb"
        proven(other, "bbbb")

    def finish(other: World) -> None:
        for _ in range(3):  # one that was killed before it wrote the status finds out once more
            other.run()
            other.wait(60)
        other.run()

    proven(world, "aaaa")
    world.run()
    before = world.api.calls
    replaced(world)
    finish(world)
    wanted, calls = shape(world.api), world.api.calls
    for moment in range(before + 1, calls + 1):
        other = World()
        other.api.create(body())
        other.api.ends = {**world.api.ends}
        proven(other, "aaaa")
        other.run()
        replaced(other)
        other.api.dies_after = moment
        with pytest.raises(PowerCutError):
            finish(other)
        other.restart()
        finish(other)
        assert shape(other.api) == wanted, moment


def test_killed_while_a_worker_is_replaced_it_comes_to_the_same(world: World) -> None:
    world.run()
    before = world.api.calls
    world.api.remove(world.api.one("Pod", "herd-w-1"))
    world.run()
    wanted, calls = shape(world.api), world.api.calls
    for moment in range(before + 1, calls + 1):
        other = World()
        other.api.create(body())
        other.api.ends = world.api.ends
        other.run()
        other.api.remove(other.api.one("Pod", "herd-w-1"))
        other.api.dies_after = moment
        with pytest.raises(PowerCutError):
            other.run()
        other.restart()
        other.run()
        assert shape(other.api) == wanted, moment
