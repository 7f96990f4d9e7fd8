"""Whole manifests against tests/operator/snapshots, and what must be true of every one of them.

A snapshot that is missing is written, and the test fails once: look at it, then commit it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drover_operator import desired, layout, names, target
from drover_operator.desired import Stage
from support.operator_world import DEFAULTS, body

HERE = Path(__file__).parent
Manifest = dict[str, Any]
GIB = 1 << 30


def cluster(**spec: Any) -> target.Target:
    return target.read(body(**spec), DEFAULTS)


def far(wanted: target.Target, **changes: Any) -> Stage:
    """Everything that can be there, is to be there."""
    places = layout.seats(wanted.spec, wanted.name, wanted.namespace)
    counts = {seat.worker: [GIB] * (2 if seat.device == "cuda" else 1) for seat in places}
    found = layout.of(wanted.spec, places, counts, {seat.worker: f"uid-{seat.worker}" for seat in places})
    stage = {"layout": found, "file": "m.gguf", "loads": "1" * 16, "load": True, "serve": True}
    return Stage(**({"reads": "h" * 16, "fetches": "f" * 16} | stage | changes))


WHOLE = yaml.safe_load((HERE / "live/cluster.yaml").read_text())["spec"]
SPECS: dict[str, dict[str, Any]] = {
    "least": {},
    "whole": WHOLE,
    "on_a_claim": {"model": {"source": "pvc://models/llama/m.gguf"}, "network": {"policy": False}},
    "from_a_mirror": {
        "model": {
            "source": "https://mirror.farm/m.gguf",
            "caConfigMapRef": {"name": "ours"},
            "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "storage": {"size": "1Gi"},
        },
        "imagePullSecrets": [{"name": "registry"}],
    },
    "suspended": {"suspend": True, "workers": [{"name": "w", "cache": {"size": "1Gi", "retain": False}}]},
}


@pytest.mark.parametrize("name", SPECS)
def test_snapshots(name: str) -> None:
    wanted = cluster(**SPECS[name])
    stage = far(wanted, file="llama/m.gguf" if name == "on_a_claim" else "m.gguf")
    if name == "on_a_claim":
        stage = far(wanted, file="llama/m.gguf", reads=None, fetches=None)
    made = yaml.safe_dump_all(json.loads(json.dumps(desired.objects(wanted, stage))), sort_keys=False, width=120)
    path = HERE / f"snapshots/{name}.yaml"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(made)
        pytest.fail(f"{path} was not there and is written now: look at it")
    assert made == path.read_text()


def everything() -> list[Manifest]:
    return [made for spec in SPECS.values() for made in desired.objects(cluster(**spec), far(cluster(**spec)))]


def pods() -> list[tuple[str, Manifest]]:
    return [
        (made["metadata"]["name"], made["spec"]["template"]["spec"])
        for made in everything()
        if "template" in made.get("spec", {})
    ]


@pytest.mark.parametrize(("name", "pod"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_pod_is_admitted_by_the_restricted_level(name: str, pod: Manifest) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] != 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostPID", "hostIPC"} & pod.keys()
    assert not pod.get("hostNetwork")
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    assert all(volume.keys() & allowed for volume in pod["volumes"])
    for container in pod["containers"]:
        if container["name"] == "side":
            continue  # the user's own
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claims = {"cache"} if name.startswith(("full", "herd-w", "herd-cpu")) else set()
        assert mounted <= {volume["name"] for volume in pod["volumes"]} | claims


def test_every_object_is_named_labelled_and_owned() -> None:
    for made in everything():
        metadata = made["metadata"]
        assert metadata["name"].startswith("herd")
        assert metadata["namespace"] == "farm"
        assert names.of(metadata["labels"])[0] == "herd"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "drover"
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("InferenceCluster", "u", True)
        assert len(metadata["annotations"]["drover.dev/applied"]) == 16


def test_selectors_pick_the_pods_of_their_own_template() -> None:
    for made in everything():
        spec = made.get("spec", {})
        if "template" in spec and "selector" in spec:
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", SPECS)
def test_all_that_is_made_is_expected(name: str) -> None:
    """What is not expected is deleted as a left-over."""
    wanted = cluster(**SPECS[name])
    made = {(part["kind"], part["metadata"]["name"]) for part in desired.objects(wanted, far(wanted))}
    assert made - {("Job", "herd-header"), ("Job", "herd-fetch")} <= desired.expected(wanted)


def test_the_same_spec_gives_the_same_hashes() -> None:
    def hashes() -> list[str]:
        wanted = cluster(**WHOLE)
        made = desired.objects(wanted, far(wanted))
        return [part["metadata"]["annotations"]["drover.dev/applied"] for part in made]

    assert hashes() == hashes()
    assert len(set(hashes())) == len(hashes())


def arguments(kind: str, name: str, stage: dict[str, Any] | None = None, **spec: Any) -> list[str]:
    wanted = cluster(**spec)
    made = desired.objects(wanted, far(wanted, **(stage or {})))
    found = next(part for part in made if (part["kind"], part["metadata"]["name"]) == (kind, name))
    words: list[str] = found["spec"]["template"]["spec"]["containers"][0]["args"]
    return words


@pytest.mark.parametrize(
    ("kind", "name", "spec", "line"),
    [
        (
            "StatefulSet",
            "herd-w",
            {"workers": [{"name": "w"}]},
            "worker --host 0.0.0.0 --port 50052 --device cpu --http 9090 --grace 30 --log-format json",
        ),
        (
            "StatefulSet",
            "herd-w",
            {"workers": [{"name": "w", "cache": {"size": "1Gi"}, "memory": "1Gi", "threads": 2}]},
            (
                "worker --host 0.0.0.0 --port 50052 --device cpu "
                "--cache-dir /var/cache/drover --cache-size 966367641 --http 9090 --grace 30 "
                "--memory 1073741824 --threads 2 --log-format json"
            ),
        ),
        (
            "Job",
            "herd-load",
            {"context": 128, "workers": [{"name": "w"}]},
            (
                "load /models/m.gguf --rpc herd-w-0.herd-w.farm.svc:50052 --tensor-split 1 --ctx-size 128 --parallel 1 "
                "--cache-type-k f16 --cache-type-v f16 --report /dev/termination-log --log-format json"
            ),
        ),
        (
            "Job",
            "herd-load",
            {"model": {"source": "pvc://c/m.gguf", "sha256": "0" * 64}, "workers": [{"name": "w"}]},
            (
                "load /models/m.gguf --rpc herd-w-0.herd-w.farm.svc:50052 --tensor-split 1 --parallel 1 "
                f"--cache-type-k f16 --cache-type-v f16 --sha256 {'0' * 64} "
                "--report /dev/termination-log --log-format json"
            ),
        ),
        (
            "Job",
            "herd-header",
            {
                "model": {"source": "hf://a/b/c.gguf", "sha256": "0" * 64, "storage": {"size": "1Gi"}},
                "context": 128,
                "parallel": 2,
                "cacheTypes": {"k": "q8_0"},
            },
            (
                "fetch hf://a/b/c.gguf --header-only --ctx-size 128 --parallel 2 --cache-type-k q8_0 "
                f"--cache-type-v f16 --sha256 {'0' * 64} --report /dev/termination-log"
            ),
        ),
        (
            "Job",
            "herd-header",
            {"model": {"source": "ollama://a:b", "storage": {"size": "1Gi"}, "secretRef": {"name": "s"}}},
            (
                "fetch ollama://a:b --header-only --parallel 1 --cache-type-k f16 --cache-type-v f16 "
                "--token-file /etc/drover/token/token --report /dev/termination-log"
            ),
        ),
        (
            "Deployment",
            "herd",
            {"workers": [{"name": "w"}], "serving": {"port": 80, "apiKeySecretRef": {"name": "s", "key": "k"}}},
            (
                "serve /models/m.gguf --rpc herd-w-0.herd-w.farm.svc:50052 --tensor-split 1 --parallel 1 "
                "--cache-type-k f16 --cache-type-v f16 --host 0.0.0.0 --port 8080 "
                "--api-key-file /etc/drover/api-key/key --log-format json"
            ),
        ),
        (
            "Job",
            "herd-fetch",
            {"model": {"source": "ollama://a:b", "storage": {"size": "1Gi"}, "secretRef": {"name": "s"}}},
            "fetch ollama://a:b --into /models --token-file /etc/drover/token/token --report /dev/termination-log",
        ),
    ],
)
def test_commands_in_pods(kind: str, name: str, spec: dict[str, Any], line: str) -> None:
    assert " ".join(arguments(kind, name, **spec)) == line


def test_the_load_is_told_what_was_planned() -> None:
    words = arguments("Job", "herd-load", {"expect": '{"w:1":[0,3]}'})
    assert words[words.index("--expect") + 1] == '{"w:1":[0,3]}'
    assert "--expect" not in arguments("Job", "herd-load")


def test_pods_that_serve_take_the_model_that_was_proven_and_no_other() -> None:
    words = arguments("Deployment", "herd", {"fingerprint": "f" * 32})
    assert words[words.index("--fingerprint") + 1] == "f" * 32
    assert "--fingerprint" not in arguments("Deployment", "herd")


def test_a_download_that_was_replaced_is_checked_again() -> None:
    spec = {"model": {"source": "hf://o/r/m.gguf", "sha256": "0" * 64, "storage": {"size": "1Gi"}}}
    assert "--sha256" not in arguments("Job", "herd-load", **spec)
    assert "--sha256" in arguments("Job", "herd-load", {"replaced": True}, **spec)


@pytest.mark.parametrize(
    ("group", "resources"),
    [
        ({}, None),
        ({"memory": "1Gi"}, {"requests": {"memory": "1536Mi"}, "limits": {"memory": "1536Mi"}}),
        ({"memory": "1Gi", "resources": {"limits": {"memory": "2Gi"}}}, {"limits": {"memory": "2Gi"}}),
        ({"resources": {"requests": {"cpu": 2}}}, {"requests": {"cpu": "2"}}),
        ({"device": "cuda", "devicesPerWorker": 4}, {"limits": {"nvidia.com/gpu": "4"}}),
        ({"device": "cuda", "memory": "1Gi"}, {"limits": {"nvidia.com/gpu": "1"}}),
        ({"device": "cuda", "resources": {"limits": {"example.com/gpu": 1}}}, {"limits": {"example.com/gpu": "1"}}),
    ],
)
def test_resources_of_a_worker(group: dict[str, Any], resources: Manifest | None) -> None:
    made = desired.objects(cluster(workers=[{"name": "w"} | group]), Stage())
    (pod,) = [part["spec"]["template"]["spec"] for part in made if part["kind"] == "StatefulSet"]
    assert pod["containers"][0].get("resources") == resources


def test_a_user_cannot_take_the_labels_that_select_a_pod_away() -> None:
    template = {"metadata": {"labels": {"app.kubernetes.io/instance": "other", "mine": "x"}}}
    made = desired.objects(cluster(workers=[{"name": "w", "podTemplate": template}]), Stage())
    (labels,) = [part["spec"]["template"]["metadata"]["labels"] for part in made if part["kind"] == "StatefulSet"]
    assert (labels["app.kubernetes.io/instance"], labels["mine"]) == ("herd", "x")


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        (Stage(), []),
        (Stage(reads="a"), ["Job herd-header"]),
        (Stage(fetches="a"), ["Job herd-fetch"]),
        ({"load": False, "file": ""}, ["ConfigMap herd-plan"]),
        ({"load": False, "serve": False}, ["ConfigMap herd-plan", "Deployment herd"]),
    ],
)
def test_one_thing_after_another(stage: Stage | dict[str, Any], kinds: list[str]) -> None:
    wanted = cluster()
    given = stage if isinstance(stage, Stage) else far(wanted, reads=None, fetches=None, **stage)
    made = desired.objects(wanted, given)
    found = [f"{part['kind']} {part['metadata']['name']}" for part in made]
    assert [name for name in found if name.split()[0] in ("Job", "ConfigMap", "Deployment")] == kinds


def test_the_policy_lets_only_clients_in() -> None:
    wanted = cluster(network={"allowFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]})
    (spec,) = [part["spec"] for part in desired.objects(wanted, Stage()) if part["kind"] == "NetworkPolicy"]
    rpc, metrics = spec["ingress"]
    assert rpc["ports"] == [{"protocol": "TCP", "port": 50052}]
    coordinators, operator, user = rpc["from"]
    assert coordinators["podSelector"]["matchExpressions"][0]["values"] == ["coordinator", "load"]
    assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "drover-system"}}
    assert user == {"ipBlock": {"cidr": "10.0.0.0/8"}}
    assert metrics == {"ports": [{"protocol": "TCP", "port": 9090}]}


def test_volumes_outlive_suspension_even_where_scaling_down_deletes_them() -> None:
    for suspend, scaled in ((False, "Delete"), (True, "Retain")):
        wanted = cluster(suspend=suspend, workers=[{"name": "w", "cache": {"size": "1Gi", "retain": False}}])
        (spec,) = [part["spec"] for part in desired.objects(wanted, Stage()) if part["kind"] == "StatefulSet"]
        assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": scaled}
