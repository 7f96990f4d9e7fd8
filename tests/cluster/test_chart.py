"""What is installed: the chart by helm, and the plain manifests; on a cluster that has no InferenceClusters yet."""

import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.installed import CRD, helm, values
from cluster.kubectl import Kubectl, KubectlError, Object, until
from cluster.workloads import Cluster, space
from support import chart

SAMPLES = sorted((chart.ROOT / "manifests/samples").rglob("*.yaml"))
LOCAL = "two-workers.yaml"


@pytest.fixture
def bare(cluster: Cluster, kubectl: Kubectl) -> Iterator[Kubectl]:
    """A cluster without the CRD, before and after."""
    if not cluster.ours:
        pytest.skip("deletes the CRD, and with it every InferenceCluster: only on the node that the tests start")
    assert kubectl.find("crd", CRD) is None
    yield kubectl
    kubectl.delete("crd", CRD)


def columns(kubectl: Kubectl) -> list[str]:
    (version,) = kubectl.get("crd", CRD)["spec"]["versions"]
    return [column["name"] for column in version["additionalPrinterColumns"]]


def suspended(name: str) -> Object:
    """A sample that makes objects and runs nothing."""
    body: Object = yaml.safe_load((chart.ROOT / "manifests/samples/cpu-pvc.yaml").read_text())
    return body | {"metadata": {"name": name}, "spec": body["spec"] | {"suspend": True}}


def may(kubectl: Kubectl, verb: str, resource: str) -> bool:
    """Whether the operator's account may do this in the namespace."""
    account = f"--as=system:serviceaccount:{kubectl.namespace}:drover-operator"
    try:
        return kubectl("auth", "can-i", verb, resource, account).strip() == "yes"
    except KubectlError:
        return False


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "one namespace"])
def test_install_test_upgrade_uninstall(cluster: Cluster, bare: Kubectl, tmp_path: Path, everywhere: bool) -> None:
    watched = [] if everywhere else [bare.namespace]
    given = values(cluster, tmp_path, watchNamespaces=watched, networkPolicy={"enabled": True})
    older = shutil.copytree(chart.CHART, tmp_path / "older")
    stale = chart.CHART_CRD.read_text().replace("name: Tokens/s", "name: Speed")
    (older / "files/crd.yaml").write_text(stale)

    said = helm(bare, "install", str(older), *given)
    assert "kubectl get inferenceclusters" in said
    assert "Speed" in columns(bare)
    bare.apply(suspended("asleep"))
    until("the operator has made the workers' StatefulSet", lambda: bare.find("statefulset", "asleep-cpu"))
    helm(bare, "upgrade", str(chart.CHART), *given)
    assert "Tokens/s" in columns(bare)
    assert "Speed" not in columns(bare)
    assert "Succeeded" in helm(bare, "test", "--timeout", "120s")
    bare.apply(suspended("after"))
    until("the upgraded operator has made one too", lambda: bare.find("statefulset", "after-cpu"))

    assert may(bare, "create", "statefulsets.apps")
    assert not [what for what in ("secrets", "pods/exec", "serviceaccounts") if may(bare, "get", what)]
    logs = bare("logs", "deployment/drover-operator")
    assert "orbidden" not in logs
    assert "Traceback" not in logs
    with bare.forwarded("svc/drover-operator", 9090) as url, urllib.request.urlopen(f"{url}/metrics") as answer:
        assert b"drover_operator_reconciles_total" in answer.read()

    helm(bare, "uninstall", "--wait")
    left = bare("get", "deployment,service,serviceaccount,role,rolebinding,networkpolicy", "-o", "name")
    assert "drover-operator" not in left
    assert "drover-operator" not in bare("get", "clusterrole,clusterrolebinding", "-o", "name")
    assert bare.find("inferencecluster", "asleep"), "the CRD is kept, and so is what was asked for"
    if everywhere:
        with space(cluster, "another-home") as elsewhere:
            helm(elsewhere, "install", str(chart.CHART), *given, "--take-ownership")
            helm(elsewhere, "uninstall", "--wait")


def test_plain_manifests_and_every_sample_are_taken(bare: Kubectl) -> None:
    bare("apply", "--validate=strict", "-f", str(chart.CRD))
    bare("wait", f"crd/{CRD}", "--for=condition=Established")
    plain = bare.within(chart.NAMESPACE)
    try:
        plain("apply", "--validate=strict", "-f", str(chart.OPERATOR))
        assert plain.find("deployment", "drover-operator")
        for sample in SAMPLES:
            if sample.name == LOCAL:
                with pytest.raises(KubectlError, match="a path is for `drover up` only"):
                    bare("apply", "--dry-run=server", "-f", str(sample))
            else:
                bare("apply", "--dry-run=server", "--validate=strict", "-f", str(sample))
    finally:
        plain("delete", "--ignore-not-found", "-f", str(chart.OPERATOR))
