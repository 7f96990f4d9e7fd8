"""Two real Drover workers as the operator would run them, and a stock llama-server that knows them by a ConfigMap."""

import json
import urllib.request
from typing import Any

from cluster.kubectl import Kubectl, Object
from cluster.workloads import Cluster, Upload, claim_spec, container, pod_spec
from support.drover import MODEL

PROMPT = "The licensor grants you"
TOKENS = 24


def workers(image: str, replicas: int) -> list[Object]:
    """A StatefulSet with a cache volume for each pod, and the headless Service that names them."""
    command = ["drover", "worker", "--host", "0.0.0.0", "--memory", "256MiB", "--threads", "1", "--log-format", "json"]
    worker = container(
        "worker",
        image,
        [*command, "--cache-dir", "/var/cache/drover"],
        {"cache": "/var/cache/drover"},
        ports=[{"name": "rpc", "containerPort": 50052}],
        readinessProbe={"tcpSocket": {"port": "rpc"}, "periodSeconds": 1},
    )
    labels = {"app": "worker"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "worker"},
            "spec": {"clusterIP": "None", "selector": labels, "ports": [{"name": "rpc", "port": 50052}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "worker"},
            "spec": {
                "serviceName": "worker",
                "replicas": replicas,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod_spec(worker)},
                "volumeClaimTemplates": [{"metadata": {"name": "cache"}, "spec": claim_spec("1Gi")}],
            },
        },
    ]


def llama(image: str, servers: list[str]) -> list[Object]:
    """A stock llama-server whose layers go where the ConfigMap says; the model comes from the claim `models`."""
    settings = {
        "LLAMA_ARG_RPC": ",".join(servers),
        "LLAMA_ARG_TENSOR_SPLIT": ",".join("1" for _ in servers),
        "LLAMA_ARG_N_GPU_LAYERS": "99",
    }
    server = container(
        "llama",
        image,
        [
            "llama-server",
            "-m",
            f"/models/{MODEL.name}",
            "--host",
            "0.0.0.0",
            "--port",
            "8080",
            "-c",
            "512",
            "-t",
            "1",
            "--no-ui",
            "-fit",
            "off",
        ],
        {"models": "/models"},
        envFrom=[{"configMapRef": {"name": "plan"}}],
        ports=[{"name": "http", "containerPort": 8080}],
        readinessProbe={"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
    )
    labels = {"app": "llama"}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plan"}, "data": settings},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "llama"},
            "spec": {"selector": labels, "ports": [{"port": 8080, "targetPort": "http"}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "llama"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": pod_spec(server, claims={"models": "models"}),
                },
            },
        },
    ]


def complete(url: str) -> str:
    """The greedy continuation of the prompt."""
    asked = {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: Any = json.load(answer)["content"]
    return str(text)


def events(kubectl: Kubectl, pod: str) -> list[Any]:
    """What a worker has logged, line by line; a line that is not JSON is not its log."""
    return [json.loads(line) for line in kubectl.logs(pod).splitlines() if line.startswith("{")]


def test_a_stock_server_computes_on_two_workers(cluster: Cluster, kubectl: Kubectl, upload: Upload) -> None:
    kubectl.apply(*workers(cluster.worker_image, 2))
    upload(MODEL, "models")
    kubectl.rolled_out("statefulset/worker")
    compiled = "find /var/cache/drover/kernels -name '*.nbc' -newer /etc/hostname"  # written since the pod started
    assert kubectl.execute("worker-0", "sh", "-c", compiled) == "", "the image's kernels are for the CPU that built it"
    names = [f"worker-{number}.worker" for number in range(2)]
    kubectl.apply(*llama(cluster.stock_image, [f"{name}:50052" for name in names]))
    kubectl.rolled_out("deployment/llama")
    with kubectl.forwarded("svc/llama", 8080) as url:
        text = complete(url)
    assert len(text.split()) > TOKENS // 3
    for number in range(2):
        stored = kubectl.execute(f"worker-{number}", "sh", "-c", "ls /var/cache/drover; id -u; touch /it 2>&1 || true")
        assert stored.split()[:2] == ["kernels", "rpc"]
        assert "10001" in stored
        assert "Read-only file system" in stored
        assert any(event.get("event") for event in events(kubectl, f"worker-{number}"))
