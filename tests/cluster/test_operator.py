"""The operator end to end: the sample becomes an endpoint, proves itself, and stays what it is whatever happens to it.

One InferenceCluster serves all tests of this file, in a namespace of theirs; each begins by waiting until it is Ready.
"""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import cgroups, kubelet
from cluster.inference import CLAIM, PROMPT, TOKENS, Inference, layers, sample, small
from cluster.installed import Operator, helm, values
from cluster.kubectl import Kubectl, until
from cluster.workloads import Cluster, Upload, container, pod_spec, space
from drover.coordinator.model_file import ModelFile
from support.chart import CHART
from support.drover import MODEL

NAME = "cpu-pvc"
SOON = 120
"""Seconds from apply to Ready with images present."""
IDLE = 20
RUNNING = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component in (worker,coordinator)"
"""Pods of the sample that stay: two workers and one coordinator."""
COMMON = ("-m", f"/models/{MODEL.name}", "--host", "0.0.0.0", "--port", "8080", "-c", "512", "-t", "1", "-fit", "off")


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    """One namespace for this file."""
    with space(cluster, "operator") as made:
        yield made


@pytest.fixture(scope="module")
def applied(cluster: Cluster, operator: Operator, kubectl: Kubectl) -> tuple[Inference, float]:
    """The sample just as it is, and the seconds it took to be Ready."""
    Upload(kubectl, cluster.worker_image)(MODEL, CLAIM)
    started = time.monotonic()
    kubectl.apply(sample())
    made = Inference(kubectl, NAME)
    made.ready(2 * SOON)
    seconds = time.monotonic() - started
    print(f"apply to Ready: {seconds:.1f} s")
    return made, seconds


@pytest.fixture
def served(applied: tuple[Inference, float]) -> Inference:
    """The sample, Ready."""
    applied[0].ready()
    return applied[0]


@pytest.fixture(scope="module")
def alone(cluster: Cluster, kubectl: Kubectl, applied: tuple[Inference, float]) -> str:
    """What stock llama.cpp says to the prompt with nobody's help."""
    return stock(kubectl, cluster.stock_image, "alone", *COMMON, "--no-repack")


def stock(kubectl: Kubectl, image: str, name: str, *arguments: str, plan: str = "") -> str:
    """The greedy continuation of the prompt by a stock llama-server in a pod of its own."""
    server = container(
        "llama",
        image,
        ["llama-server", *arguments, "--no-ui"],
        {"models": "/models"},
        ports=[{"name": "http", "containerPort": 8080}],
        readinessProbe={"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        **({"envFrom": [{"configMapRef": {"name": plan}}]} if plan else {}),
    )
    spec = pod_spec(server, claims={"models": CLAIM}, terminationGracePeriodSeconds=0)
    kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    kubectl.wait(f"pod/{name}", "condition=Ready")
    asked = {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
    with kubectl.forwarded(f"pod/{name}", 8080) as url:
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = str(json.load(answer)["content"])
    kubectl.delete("pod", name)
    return text


def test_the_sample_is_ready_soon_and_says_what_it_is(applied: tuple[Inference, float]) -> None:
    made, seconds = applied
    status = made.status
    assert seconds < SOON, status
    assert {row["type"]: row["status"] for row in status["conditions"]} == dict.fromkeys(
        ("WorkersReady", "ModelAvailable", "Planned", "SplitVerified", "Serving", "Ready"), "True"
    )
    assert status["workers"] == "2/2"
    space = made.kubectl.namespace
    rpc = [f"{NAME}-cpu-{index}.{NAME}-cpu.{space}.svc:50052" for index in range(2)]
    assert status["endpoints"]["openai"] == f"http://{NAME}.{space}.svc:8080/v1"
    assert status["endpoints"]["rpc"] == rpc
    assert f"--rpc {','.join(rpc)} --tensor-split 1,1" in status["endpoints"]["llamaServerArgs"]
    assert [row["worker"] for row in status["plan"]] == [f"{NAME}-cpu-0", f"{NAME}-cpu-1"]
    assert all(layers(status)), "each worker holds layers"
    assert all(row["bytes"] > 0 for row in status["plan"])
    report = status["report"]
    assert report["tokensPerSecond"] > 0
    assert report["bytesUploaded"] > 3 << 20
    columns = made.kubectl("get", "ic", NAME, "--no-headers").split()
    assert columns[:4] == [NAME, "True", "2/2", f"pvc://{CLAIM}/{MODEL.name}"]


def test_its_service_speaks_openai(served: Inference) -> None:
    said = served.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    assert said["usage"]["completion_tokens"] == 8
    assert said["usage"]["total_tokens"] == said["usage"]["prompt_tokens"] + 8
    assert said["usage"]["prompt_tokens"] > 3
    (model,) = served.ask("/v1/models")["data"]
    chat = {"model": model["id"], "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    said = served.ask("/v1/chat/completions", chat)
    assert said["choices"][0]["message"]["role"] == "assistant"
    assert 0 < said["usage"]["completion_tokens"] <= 4


def test_nothing_is_written_while_nothing_happens(served: Inference) -> None:
    def versions() -> dict[str, str]:
        found = {name: body["metadata"]["resourceVersion"] for name, body in served.objects().items()}
        return {**found, "itself": served.body["metadata"]["resourceVersion"]}

    before = until("the last pod's status has settled", lambda: _same(versions, 4), seconds=60)
    assert len(before) > 8
    time.sleep(IDLE)
    assert versions() == before


def _same(ask: Callable[[], dict[str, str]], seconds: float) -> dict[str, str] | None:
    first = ask()
    time.sleep(seconds)
    return first if ask() == first else None


def test_a_stock_server_with_the_plan_says_what_stock_says_alone(
    cluster: Cluster, served: Inference, alone: str
) -> None:
    assert len(alone.split()) > TOKENS // 3
    before = served.condition("SplitVerified")["lastTransitionTime"]
    assert stock(served.kubectl, cluster.stock_image, "planned", *COMMON, plan=f"{NAME}-plan") == alone
    assert served.complete() == alone
    assert served.condition("SplitVerified")["lastTransitionTime"] == before


def test_a_pod_that_is_deleted_comes_back_on_its_cache(served: Inference) -> None:
    worker = f"{NAME}-cpu-1"
    before = served.kubectl.get("pod", worker)["metadata"]["uid"]
    served.kubectl("delete", "pod", worker, "--force", "--grace-period=0", "--wait=false")
    started = time.monotonic()
    served.until("Ready", "False", seconds=30)
    assert served.condition("Serving")["status"] == "False" or served.condition("WorkersReady")["status"] == "False"
    served.ready()
    print(f"pod deleted to Ready: {time.monotonic() - started:.1f} s")
    assert served.kubectl.get("pod", worker)["metadata"]["uid"] != before
    report = served.status["report"]
    assert (report["bytesUploaded"], report["ok"]) == (0, True)
    assert report["bytesCached"] > 3 << 20


def test_a_worker_that_is_killed_is_loaded_again_from_its_cache(
    cluster: Cluster, served: Inference, alone: str
) -> None:
    if not cluster.ours:
        pytest.skip("kills a process of the node: only on the node that the tests start")
    worker = f"{NAME}-cpu-0"
    uid = served.kubectl.get("pod", worker)["metadata"]["uid"]
    for pid in _processes(uid):
        os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    served.until("Ready", "False", seconds=30)
    served.ready()
    print(f"worker killed to Ready: {time.monotonic() - started:.1f} s")
    pod = served.kubectl.get("pod", worker)
    assert (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) == (uid, 1)
    assert served.complete() == alone
    placement = served.ask("/state")["placement"]
    assert sum(row["uploaded"] for row in placement) == 0
    assert sum(row["cached"] for row in placement) > 3 << 20


def _processes(uid: str) -> list[int]:
    """The `drover` processes of a pod, as this machine numbers them."""
    found = []
    for pid in cgroups.processes():
        group = Path(f"/proc/{pid}/cgroup").read_text().replace("_", "-")
        if uid in group and b"drover" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    assert found
    return found


def test_what_is_changed_by_hand_is_put_back_and_told(served: Inference) -> None:
    kubectl = served.kubectl
    kubectl("patch", "configmap", f"{NAME}-plan", "--type=merge", "-p", '{"data": {"LLAMA_ARG_RPC": "nowhere:1"}}')
    kubectl("patch", "service", NAME, "--type=merge", "-p", '{"spec": {"selector": {"app": "another"}}}')
    kubectl("delete", "poddisruptionbudget", f"{NAME}-cpu")

    def put_back() -> bool:
        plan = kubectl.get("configmap", f"{NAME}-plan")["data"]
        front = kubectl.get("service", NAME)["spec"]["selector"]
        budget = kubectl.find("poddisruptionbudget", f"{NAME}-cpu")
        named = front.get("app.kubernetes.io/instance") == NAME
        return plan["LLAMA_ARG_RPC"].startswith(f"{NAME}-cpu-0.") and named and budget is not None

    until("all three are as they were", put_back, seconds=30)
    told = until("it is told", lambda: served.events("PutBack"), seconds=10)
    assert any(f"ConfigMap {NAME}-plan was changed by hand and is put back" in line for line in told)
    assert any(f"Service {NAME} " in line for line in told)
    served.ready(30)


def test_an_object_that_lost_its_labels_is_taken_back(served: Inference) -> None:
    names = ("app.kubernetes.io/managed-by", "app.kubernetes.io/instance")
    served.kubectl("label", "configmap", f"{NAME}-plan", *(f"{name}-" for name in names))

    def labelled() -> bool:
        return names[0] in (served.kubectl.get("configmap", f"{NAME}-plan")["metadata"].get("labels") or {})

    until("it has them again", labelled, seconds=30)
    time.sleep(2)
    version = served.kubectl.get("configmap", f"{NAME}-plan")["metadata"]["resourceVersion"]
    served.ready(30)
    time.sleep(2)
    assert served.kubectl.get("configmap", f"{NAME}-plan")["metadata"]["resourceVersion"] == version


def test_what_belongs_to_someone_else_is_left_alone(operator: Operator, kubectl: Kubectl) -> None:
    name = "taken"
    assert operator.pod
    spec = {"selector": {"app": "another"}, "ports": [{"port": 1234}]}
    kubectl.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
    kubectl.apply(small(name))
    made = Inference(kubectl, name)
    refused = made.until("WorkersReady", "False", "Refused", seconds=60)
    assert f"Service {name}: there is one already, and it belongs to someone else" in refused["message"]
    assert kubectl.get("service", name)["spec"]["ports"][0]["port"] == 1234
    kubectl.delete("service", name)
    kubectl.delete("inferencecluster", name)


def test_scaled_up_and_down_it_is_planned_and_proven_anew(served: Inference, alone: str) -> None:
    for replicas in (3, 2):
        served.change(lambda spec, count=replicas: spec["workers"][0].update(replicas=count))  # type: ignore[misc]
        seconds = served.ready()
        print(f"scaled to {replicas}: {seconds:.1f} s")
        status = served.status
        assert (status["workers"], len(status["plan"])) == (f"{replicas}/{replicas}", replicas)
        assert all(layers(status))
        settings = served.kubectl.get("configmap", f"{NAME}-plan")["data"]
        assert len(settings["LLAMA_ARG_RPC"].split(",")) == replicas
        assert served.complete() == alone


def test_suspended_it_keeps_its_caches_only(served: Inference) -> None:
    def claims() -> dict[str, str]:
        found = served.objects().items()
        return {name: body["metadata"]["uid"] for name, body in found if name.startswith("PersistentVolumeClaim/")}

    before = claims()
    assert len(before) >= 2
    served.change(lambda spec: spec.update(suspend=True))
    served.until("Ready", "False", "Suspended")
    until("no pod runs", lambda: not running(served), 60, lambda: running(served))
    assert claims() == before
    served.change(lambda spec: spec.update(suspend=False))
    print(f"resumed: {served.ready():.1f} s")
    assert claims() == before
    assert served.status["report"]["bytesUploaded"] == 0


def running(made: Inference) -> list[str]:
    """Its pods, but for those of Jobs that have ended."""
    pods = [(name, body) for name, body in made.objects().items() if name.startswith("Pod/")]
    return [name for name, body in pods if body["status"].get("phase") not in ("Succeeded", "Failed")]


def test_the_chart_is_upgraded_under_it(
    cluster: Cluster, operator: Operator, served: Inference, alone: str, tmp_path: Path
) -> None:
    """First the operator alone, of which the pods notice nothing; then their image, to which they roll over."""
    if not cluster.ours:
        pytest.skip("needs a second name for the image: only on the node that the tests start")

    def pods() -> dict[str, str]:
        found = served.objects().items()
        return {name: body["metadata"]["uid"] for name, body in found if name.startswith("Pod/")}

    before, first = pods(), operator.pod["metadata"]["uid"]
    helm(operator.kubectl, "upgrade", str(CHART), *values(cluster, tmp_path, threads=2))
    assert operator.pod["metadata"]["uid"] != first
    served.ready(30)
    time.sleep(IDLE / 4)
    assert pods() == before

    newer = replace(cluster, worker_image=f"{cluster.worker_image}-newer")
    kubelet.tag(cluster.worker_image, newer.worker_image)
    helm(operator.kubectl, "upgrade", str(CHART), *values(newer, tmp_path))
    worker = f"{NAME}-cpu-0"
    until(
        "the workers are being replaced",
        lambda: served.kubectl.get("pod", worker)["metadata"]["uid"] not in before.values(),
    )
    print(f"image changed to Ready: {served.ready():.1f} s")
    images = [pod["spec"]["containers"][0]["image"] for pod in served.kubectl.items("pods", RUNNING)]
    assert images == [newer.worker_image] * 3
    assert served.status["report"]["bytesUploaded"] == 0
    assert served.complete() == alone


def test_a_model_that_is_replaced_on_its_volume_is_proven_anew(
    cluster: Cluster, served: Inference, kubectl: Kubectl, tmp_path: Path
) -> None:
    name, file = "replaced", tmp_path / "replaced.gguf"
    upload = Upload(kubectl, cluster.worker_image)
    file.write_bytes(MODEL.read_bytes())
    upload(file, CLAIM)
    kubectl.apply(small(name, model={"source": f"pvc://{CLAIM}/{file.name}"}))
    made = Inference(kubectl, name)
    made.ready()
    before, text = made.status["report"], made.complete()

    with ModelFile(MODEL) as model:
        norm = model.tensors["output_norm.weight"]
    changed = bytearray(file.read_bytes())
    changed[norm.offset : norm.offset + norm.nbytes] = bytes(norm.nbytes)
    file.write_bytes(changed)
    upload(file, CLAIM)
    assert made.complete() == text, "who serves has the model that was there"
    (pod,) = kubectl.items("pods", f"app.kubernetes.io/instance={name},app.kubernetes.io/component=coordinator")
    kubectl.delete("pod", pod["metadata"]["name"])
    said = made.until("SplitVerified", "False", "ModelReplaced", 60)
    assert file.name in said["message"]
    print(f"replaced model noticed to Ready: {made.ready():.1f} s")
    assert any(file.name in line for line in made.events("ModelReplaced"))
    assert made.status["report"]["fingerprint"] != before["fingerprint"]
    assert made.complete() != text
    kubectl.delete("inferencecluster", name)


def test_an_operator_killed_at_every_step_arrives_all_the_same(
    operator: Operator, served: Inference, kubectl: Kubectl
) -> None:
    name = "interrupted"
    kubectl.apply(small(name))
    made = Inference(kubectl, name)
    steps = (f"Service/{name}-cpu", f"Pod/{name}-cpu-0", f"ConfigMap/{name}-plan", f"Job/{name}-load")
    seen = {}
    for step in steps:
        seen[step] = until(f"{step} is there", lambda what=step: made.objects().get(what))["metadata"]["uid"]  # type: ignore[misc]
        operator.kill()
        operator.back()
    made.ready()
    there = made.objects()
    assert {step: there[step]["metadata"]["uid"] for step in steps} == seen
    kinds = sorted(name for name in there if not name.startswith(("Pod/", "Endpoint")))
    assert kinds == sorted(
        [
            f"ConfigMap/{name}-plan",
            f"Deployment/{name}",
            f"Job/{name}-load",
            f"NetworkPolicy/{name}-cpu",
            f"PersistentVolumeClaim/cache-{name}-cpu-0",
            f"PodDisruptionBudget/{name}-cpu",
            f"Service/{name}",
            f"Service/{name}-cpu",
            f"StatefulSet/{name}-cpu",
        ]
    )
    kubectl.delete("inferencecluster", name)


def test_deleted_it_leaves_the_caches_that_were_to_stay(operator: Operator, served: Inference) -> None:
    name = "short-lived"
    body = small(name)
    (group,) = body["spec"]["workers"]
    body["spec"]["workers"] = [group, {**group, "name": "gone", "cache": {**group["cache"], "retain": False}}]
    served.kubectl.apply(body)
    made = Inference(served.kubectl, name)
    print(f"two groups Ready: {made.ready():.1f} s")
    served.kubectl.delete("inferencecluster", name)
    kept = f"PersistentVolumeClaim/cache-{name}-cpu-0"
    until("only the retained cache is left", lambda: list(made.objects()) == [kept], 90, made.objects)
    assert operator.restarts == 0
