"""The samples. The other manifests are made of the chart: see charts/test_files.py."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from drover.spec_file import load
from drover_operator import desired, names
from drover_operator.layout import of, seats
from drover_operator.target import Defaults, read
from support import chart

SAMPLES = sorted((chart.ROOT / "manifests/samples").rglob("*.yaml"))
CLUSTERS = [path for path in SAMPLES if "\nkind: InferenceCluster\n" in path.read_text()]
LOCAL = chart.ROOT / "manifests/samples/two-workers.yaml"
STOCK = chart.ROOT / "manifests/samples/stock-llama-server"
GIB = 1 << 30


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def test_there_are_samples_of_both_kinds() -> None:
    assert len(CLUSTERS) >= 5
    assert {path.name for path in SAMPLES} - {path.name for path in CLUSTERS} == {"llama-server.yaml"}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_says_what_it_is_for(path: Path) -> None:
    assert path.read_text().startswith("# ")
    assert documents(path)[0]["metadata"]["name"] == path.stem


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_sample_is_an_inference_cluster(path: Path) -> None:
    assert load(path).metadata.name == path.stem


@pytest.mark.parametrize("path", [path for path in CLUSTERS if path != LOCAL], ids=lambda path: path.stem)
def test_the_operator_makes_a_cluster_of_a_sample(path: Path) -> None:
    (body,) = documents(path)
    body["metadata"] |= {"uid": "u", "namespace": "lab"}
    target = read(body, Defaults("drover-worker:1"))
    places = seats(target.spec, target.name, "lab")
    layout = of(target.spec, places, {seat.worker: [GIB] for seat in places}, {seat.worker: "u" for seat in places})
    made = desired.objects(target, desired.Stage(layout=layout, file="m.gguf", loads="l", load=True, serve=True))
    assert {manifest["kind"] for manifest in made} >= {"StatefulSet", "ConfigMap", "Job"}


def test_a_stock_server_is_let_in_and_told_the_plan() -> None:
    cluster = load(STOCK / "rpc-workers.yaml")
    deployment, service = documents(STOCK / "llama-server.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": names.plan(cluster.metadata.name)}}]
    (peer,) = cluster.spec.network.allow_from or ()
    assert peer["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    claim, _, file = cluster.spec.model.source.removeprefix("pvc://").partition("/")
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
    assert container["args"][:2] == ["--model", f"/models/{file}"]
    assert str(cluster.spec.context) in container["args"]


def test_a_stock_server_passes_the_restricted_level() -> None:
    spec = documents(STOCK / "llama-server.yaml")[0]["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
