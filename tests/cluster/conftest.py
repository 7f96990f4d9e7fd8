"""A cluster for the tests of this folder: any that KUBECONFIG names, else a node of our own for the time of the run.

On a cluster of somebody else's the images come from DROVER_E2E_WORKER_IMAGE, DROVER_E2E_OPERATOR_IMAGE and
DROVER_E2E_STOCK_IMAGE (stock llama.cpp, its programs on PATH), and claims use the cluster's default storage class.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import images, node, programs, state
from cluster.cache import ClusterUnavailableError, locked
from cluster.installed import CRD, Operator, helm, values
from cluster.kubectl import Kubectl
from cluster.workloads import Cluster, Upload, space
from support.chart import CHART

SECONDS = 900
"""What a test may take, fixtures included; images are built before the run (`make e2e`)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """What the namespace of a failed test looked like goes into its report, before the namespace is deleted."""
    report = yield
    space = getattr(item, "funcargs", {}).get("kubectl")
    if report.failed and call.when != "teardown" and space is not None:
        report.sections.append((f"namespace {space.namespace}", space.describe()))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster of the run."""
    if os.environ.get("KUBECONFIG"):
        yield _given()
        return
    try:
        with locked(state.LOCK):
            wanted = images.archives()
            node.up()
            try:
                node.load(*(image.archive for image in wanted))
                kubectl = Kubectl(programs.kubectl(), node.kubeconfig())
                yield Cluster(kubectl, True, *(image.name for image in wanted))
            finally:
                node.down()
    except ClusterUnavailableError as error:
        pytest.fail(str(error), pytrace=False)


def _given() -> Cluster:
    program = shutil.which("kubectl")
    if program is None:
        pytest.fail("KUBECONFIG is set, and there is no kubectl: install it", pytrace=False)
    names = []
    for variable in ("DROVER_E2E_WORKER_IMAGE", "DROVER_E2E_OPERATOR_IMAGE", "DROVER_E2E_STOCK_IMAGE"):
        if not os.environ.get(variable):
            pytest.fail(f"KUBECONFIG is set: set {variable} to an image that this cluster can pull", pytrace=False)
        names.append(os.environ[variable])
    return Cluster(Kubectl(Path(program), Path(os.environ["KUBECONFIG"])), False, *names)


@pytest.fixture
def kubectl(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl in a namespace that is the test's own: pods must pass the `restricted` level; gone afterwards."""
    with space(cluster, request.node.name.lower().removeprefix("test_")) as made:
        yield made


@pytest.fixture(scope="session")
def operator(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator, installed once for all tests that ask for it; it cares for every namespace."""
    there = cluster.kubectl.find("crd", CRD)
    if there and not cluster.ours:
        pytest.fail("an operator or its CRD is installed on this cluster: use one without", pytrace=False)
    with space(cluster, "drover-system") as kubectl:
        helm(kubectl, "install", str(CHART), *values(cluster, tmp_path_factory.mktemp("chart")))
        yield Operator(kubectl)
        helm(kubectl, "uninstall", "--wait")
        kubectl.delete("crd", CRD)


@pytest.fixture
def upload(cluster: Cluster, kubectl: Kubectl) -> Upload:
    """Puts files of this machine into a claim, for pods that read them."""
    return Upload(kubectl, cluster.worker_image)
