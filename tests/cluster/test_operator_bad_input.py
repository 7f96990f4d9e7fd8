"""What the operator says of specs that cannot come true: each ends in a condition that says what to do.

All of them stand in one namespace at the same time; what is wrong with each is in its own test.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.inference import CLAIM, Bad, Inference, small
from cluster.installed import Operator
from cluster.kubectl import Kubectl, KubectlError, Object
from cluster.workloads import Cluster, Upload, space
from support.drover import MODEL
from support.refused_specs import REFUSED, SPEC, UNCHANGEABLE, changed

BROKEN = "broken.gguf"


def group(**changes: object) -> list[Object]:
    """The workers of a small cluster, changed."""
    (made,) = small("any")["spec"]["workers"]
    return [made | changes]


OLDER = """
import http.server, socketserver, threading
class Fine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
class Old(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.recv(64)
        self.request.sendall((28).to_bytes(8, "little") + bytes([7, 0, 0, 0]) + bytes(24))
threading.Thread(target=http.server.HTTPServer(("", 9090), Fine).serve_forever).start()
socketserver.ThreadingTCPServer(("", 50052), Old).serve_forever()
"""
"""Says that it is well, and speaks ggml RPC 7.0."""
RUN_OLDER = {"command": ["python", "-c", OLDER]}

BAD = [
    Bad(
        small("no-file", model={"source": f"pvc://{CLAIM}/elsewhere/none.gguf"}),
        "ModelAvailable",
        "ModelUnreadable",
        ("/models/elsewhere/none.gguf", "to try again, change the spec or delete the Job no-file-load"),
    ),
    Bad(
        small("no-model", model={"source": f"pvc://{CLAIM}/{BROKEN}"}),
        "ModelAvailable",
        "ModelUnreadable",
        (BROKEN, "change the spec"),
    ),
    Bad(
        small("no-claim", model={"source": "pvc://nothing/m.gguf"}),
        "ModelAvailable",
        "ClaimMissing",
        ("there is no usable claim nothing: make it",),
    ),
    Bad(
        small("no-host", model={"source": "https://nothing.invalid/m.gguf", "storage": {"size": "1GiB"}}),
        "ModelAvailable",
        "Fetching",
        ("the head of https://nothing.invalid/m.gguf is being read", "the last attempt said: "),
    ),
    Bad(
        small("too-large", memory="2MiB"),
        "Planned",
        "DoesNotFit",
        ("MiB",),
    ),
    Bad(
        small("no-image", image="localhost/nothing:here"),
        "WorkersReady",
        "ImagePullFailed",
        ("0 of 1 workers are ready", "localhost/nothing:here", "check the image's name"),
    ),
    Bad(
        small("no-gpu", workers=group(device="cuda")),
        "WorkersReady",
        "DeviceMissing",
        ("no-gpu-cpu-0 cannot be placed", "no node has a free GPU", "nvidia.com/gpu"),
    ),
    Bad(
        small("no-class", workers=group(cache={"size": "1GiB", "storageClassName": "no-such-class"})),
        "WorkersReady",
        "VolumeNotBound",
        ("no-class-cpu-0 cannot be placed", "check storageClassName"),
    ),
    Bad(
        small("another-model", model={"source": f"pvc://{CLAIM}/{MODEL.name}", "sha256": "0" * 64}),
        "ModelAvailable",
        "ChecksumMismatch",
        (f"/models/{MODEL.name} has the SHA-256 ", "and should have 000", "delete the Job another-model-load"),
    ),
    Bad(
        small("older", workers=group(podTemplate={"spec": {"containers": [{"name": "worker", **RUN_OLDER}]}})),
        "Planned",
        "ProbeFailed",
        ("speaks ggml RPC 7.0", "use workers of the operator's own version"),
    ),
    Bad(
        small("lopsided", replicas=2, split={"proportions": [1, 0]}),
        "SplitVerified",
        "SplitMismatch",
        ("lopsided-cpu-1", "holds nothing of the model"),
    ),
]


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    """One namespace for this file."""
    with space(cluster, "bad-input") as made:
        yield made


@pytest.fixture(scope="module")
def applied(
    cluster: Cluster, operator: Operator, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Kubectl:
    """All of them at once."""
    broken: Path = tmp_path_factory.mktemp("broken") / BROKEN
    broken.write_bytes(b"this is no model")
    upload = Upload(kubectl, cluster.worker_image)
    upload(MODEL, CLAIM)
    upload(broken, CLAIM)
    kubectl.apply(*(row.body for row in BAD))
    return kubectl


@pytest.mark.parametrize("row", BAD, ids=lambda row: row.body["metadata"]["name"])
def test_it_says_what_is_wrong_and_what_to_do(operator: Operator, applied: Kubectl, row: Bad) -> None:
    """`lopsided` is forced: its spec gives one of two workers no share, and the proof does not let that pass."""
    row.says(applied)
    assert operator.restarts == 0
    assert "Traceback" not in operator.log


def test_with_its_spec_corrected_it_becomes_ready(operator: Operator, applied: Kubectl) -> None:
    made = Inference(applied, "too-large")
    made.until("Planned", "False", "DoesNotFit", 180)
    made.change(lambda spec: spec["workers"][0].update(memory="256MiB"))
    print(f"corrected to Ready: {made.ready(180):.1f} s")
    assert operator.restarts == 0


def test_with_both_workers_given_a_share_the_split_is_verified(applied: Kubectl) -> None:
    made = Inference(applied, "lopsided")
    made.until("SplitVerified", "False", "SplitMismatch", 180)
    made.change(lambda spec: spec.update(split={"proportions": [1, 1]}))
    print(f"shares given to Ready: {made.ready(180):.1f} s")


def test_what_the_api_server_can_refuse_it_refuses_with_words(operator: Operator, kubectl: Kubectl) -> None:
    def body(spec: Object) -> Object:
        kind = {"apiVersion": "drover.dev/v1alpha1", "kind": "InferenceCluster"}
        return {**kind, "metadata": {"name": "refused"}, "spec": spec}

    unknown = body({**SPEC, "wrokers": []})
    with pytest.raises(KubectlError, match="wrokers"):
        kubectl.apply(unknown)
    for row in REFUSED:
        with pytest.raises(KubectlError) as caught:
            kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(body(changed(row))))
        assert row.words in str(caught.value)
    kubectl.apply(body({**SPEC, "suspend": True}))
    for row in UNCHANGEABLE:
        with pytest.raises(KubectlError) as caught:
            kubectl.apply(body({**changed(row), "suspend": True}))
        assert row.words in str(caught.value)
    kubectl.delete("inferencecluster", "refused")
