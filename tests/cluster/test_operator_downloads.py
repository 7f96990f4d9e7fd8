"""Models that the operator has downloaded, from a server in the cluster whose authority only a ConfigMap knows."""

import hashlib
from collections.abc import Iterator

import pytest

from cluster.inference import CLAIM, Bad, Inference, small
from cluster.installed import Operator
from cluster.kubectl import Kubectl, Object
from cluster.programs import run
from cluster.workloads import Cluster, Upload, container, pod_spec, space
from support import tiny_model
from support.drover import MODEL
from support.tiny_model import Tiny

SERVER, PORT = "mirror", 8443
LARGE, LARGE_SHAPE = "large.gguf", Tiny(layers=2, width=1024, ff=1024, heads=4, kv_heads=2, head_width=256)
"""A sound model of 48 MiB, more than a volume of the tiny class has."""
SERVE = f"""
import functools, http.server, ssl
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="/models")
server = http.server.ThreadingHTTPServer(("", {PORT}), handler)
trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
trust.load_cert_chain("/tls/tls.crt", "/tls/tls.key")
server.socket = trust.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    """One namespace for this file."""
    with space(cluster, "downloads") as made:
        yield made


@pytest.fixture(scope="module")
def server(cluster: Cluster, operator: Operator, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the server, which has both models."""
    folder = tmp_path_factory.mktemp("server")
    tiny_model.write(folder / LARGE, LARGE_SHAPE)
    upload = Upload(kubectl, cluster.worker_image)
    upload(MODEL, CLAIM)
    upload(folder / LARGE, CLAIM)
    host = f"{SERVER}.{kubectl.namespace}.svc"
    key, crt = folder / "tls.key", folder / "tls.crt"
    named = ("-subj", f"/CN={SERVER}", "-addext", f"subjectAltName=DNS:{host}")
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *named, "-keyout", key, "-out", crt)
    kubectl("create", "secret", "tls", "server", f"--cert={crt}", f"--key={key}")
    kubectl("create", "configmap", "authorities", f"--from-file=ours.pem={crt}")
    kubectl.apply(*_web(cluster.worker_image))
    kubectl.wait(f"pod/{SERVER}", "condition=Ready")
    return f"https://{host}:{PORT}"


def _web(image: str) -> list[Object]:
    web = container(
        "web",
        image,
        ["python", "-c", SERVE],
        {"models": "/models", "tls": "/tls"},
        readinessProbe={"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    )
    spec = pod_spec(web, claims={"models": CLAIM})
    spec["volumes"].append({"name": "tls", "secret": {"secretName": "server"}})
    labels = {"app": SERVER}
    service = {"selector": labels, "ports": [{"port": PORT}]}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": SERVER, "labels": labels}, "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVER}, "spec": service},
    ]


def model(url: str, storage: Object | None = None, **more: object) -> Object:
    """A source that is trusted through the ConfigMap."""
    trust = {"caConfigMapRef": {"name": "authorities", "key": "ours.pem"}}
    return {"source": url, "storage": storage or {"size": "64MiB"}, **trust, **more}


def test_a_model_is_downloaded_checked_and_served(server: str, kubectl: Kubectl) -> None:
    sha256 = hashlib.sha256(MODEL.read_bytes()).hexdigest()
    kubectl.apply(small("fetched", model=model(f"{server}/{MODEL.name}", sha256=sha256)))
    made = Inference(kubectl, "fetched")
    print(f"apply to Ready, with the download: {made.ready(180):.1f} s")
    assert made.status["model"]["bytes"] == made.status["header"]["bytes"] == MODEL.stat().st_size
    assert MODEL.name in made.condition("ModelAvailable")["message"]
    assert len(made.complete().split()) > 3
    made.change(lambda spec: spec["workers"][0].update(replicas=2))
    made.ready()
    fetches = [body for name, body in made.objects().items() if name.startswith("Job/fetched-fetch")]
    assert all(body["status"].get("succeeded", 0) <= 1 for body in fetches), "what is there is not fetched again"


@pytest.fixture(scope="module")
def bad(cluster: Cluster, kubectl: Kubectl, server: str) -> dict[str, Bad]:
    """What goes wrong with a download, each of them applied."""
    untrusted = {"source": f"{server}/{MODEL.name}", "storage": {"size": "64MiB"}}
    tiny = {"size": "512MiB", "storageClassName": "drover-tiny"}
    rows = [
        Bad(
            small("not-there", model=model(f"{server}/none.gguf")),
            "ModelAvailable",
            "NotFound",
            (f"{server}/none.gguf", "(404)", "check the name"),
        ),
        Bad(
            small("not-trusted", model=untrusted),
            "ModelAvailable",
            "UntrustedCertificate",
            ("its certificate is not trusted", "spec.model.caConfigMapRef"),
        ),
        Bad(
            small("other-bytes", model=model(f"{server}/{MODEL.name}", sha256="0" * 64)),
            "ModelAvailable",
            "ChecksumMismatch",
            (f"{MODEL.name} has the SHA-256 ", "was asked for 000", "change the spec or delete the Job"),
        ),
        Bad(
            small("no-room", model=model(f"{server}/{LARGE}", tiny)),
            "ModelAvailable",
            "DiskFull",
            (f"{LARGE} needs ", "16.0 MiB left", "ask for a larger volume"),
        ),
    ]
    if not cluster.ours:
        rows.pop()
    rows += [
        Bad(
            small("small-volume", model=model(f"{server}/{LARGE}", {"size": "16MiB"})),
            "ModelAvailable",
            "VolumeTooSmall",
            ("spec.model.storage.size", "are missing; ask for a larger one"),
        ),
        Bad(
            small("small-workers", model=model(f"{server}/{LARGE}"), memory="4MiB"),
            "Planned",
            "DoesNotFit",
            ("the model does not fit: it needs ", " are left over"),
        ),
    ]
    kubectl.apply(*(row.body for row in rows))
    return {row.body["metadata"]["name"]: row for row in rows}


@pytest.mark.parametrize(
    "name", ["not-there", "not-trusted", "other-bytes", "no-room", "small-volume", "small-workers"]
)
def test_it_says_what_is_wrong_and_what_to_do(
    cluster: Cluster, operator: Operator, kubectl: Kubectl, bad: dict[str, Bad], name: str
) -> None:
    if name not in bad:
        pytest.skip("the class drover-tiny is of the node that the tests start")
    bad[name].says(kubectl)
    assert operator.restarts == 0
    assert "Traceback" not in operator.log


@pytest.mark.parametrize("name", ["small-volume", "small-workers"])
def test_what_cannot_fit_is_not_downloaded(kubectl: Kubectl, bad: dict[str, Bad], name: str) -> None:
    bad[name].says(kubectl)
    made = Inference(kubectl, name)
    assert made.status["header"]["bytes"] > 48 << 20
    assert f"Job/{name}-fetch" not in made.objects()
