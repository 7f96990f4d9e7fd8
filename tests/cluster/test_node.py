"""The cluster itself: what every other test of this folder takes for granted."""

import json
import urllib.request

import pytest

from cluster.kubectl import Kubectl, KubectlError, until
from cluster.workloads import Cluster, Upload, claim, container, pod_spec


def test_a_node_is_ready(cluster: Cluster) -> None:
    nodes = cluster.kubectl.items("nodes")
    ready = [
        node["metadata"]["name"]
        for node in nodes
        if {"type": "Ready", "status": "True"}.items()
        <= next(row for row in node["status"]["conditions"] if row["type"] == "Ready").items()
    ]
    assert ready


def test_a_pod_that_is_not_hardened_is_refused(cluster: Cluster, kubectl: Kubectl) -> None:
    spec = {"containers": [{"name": "it", "image": cluster.worker_image}]}
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": spec})


def test_what_is_uploaded_is_there_for_the_next_pod(
    cluster: Cluster, kubectl: Kubectl, upload: Upload, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Claims are bound, a non-root pod writes to them, names and services work, and so does a forwarded port."""
    file = tmp_path_factory.mktemp("upload") / "greeting.txt"
    file.write_text("from one pod to the next")
    upload(file, "shared")
    serve = ["python", "-m", "http.server", "8000", "--directory", "/data"]
    probe = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    web = container("web", cluster.worker_image, serve, {"data": "/data"}, readinessProbe=probe)
    meta = {"name": "web", "labels": {"app": "web"}}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod_spec(web, claims={"data": "shared"})},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "site"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
        },
    )
    kubectl.wait("pod/web", "condition=Ready")
    fetch = "import urllib.request; print(urllib.request.urlopen('http://site/greeting.txt').read().decode())"
    said = until("the service has found its pod", lambda: kubectl.execute("web", "python", "-c", fetch), seconds=20)
    assert said.strip() == file.read_text()
    with kubectl.forwarded("svc/site", 80) as url, urllib.request.urlopen(f"{url}/greeting.txt") as answer:
        assert answer.read().decode() == file.read_text()


def test_a_claim_of_the_tiny_class_is_a_disk_that_fills_up(cluster: Cluster, kubectl: Kubectl) -> None:
    if not cluster.ours:
        pytest.skip("the class drover-tiny is of the node that the tests start")
    tiny = claim("tiny", "8Mi")
    tiny["spec"]["storageClassName"] = "drover-tiny"
    fill = ["python", "-c", "open('/data/it', 'wb').write(bytes(64 << 20))"]
    meta = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "fill"}}
    filling = container(
        "fill", cluster.worker_image, fill, {"data": "/data"}, terminationMessagePolicy="FallbackToLogsOnError"
    )
    kubectl.apply(tiny, {**meta, "spec": pod_spec(filling, claims={"data": "tiny"}, restartPolicy="Never")})
    kubectl.wait("pod/fill", "jsonpath={.status.phase}=Failed")
    assert "No space left on device" in json.dumps(kubectl.get("pod", "fill")["status"])
