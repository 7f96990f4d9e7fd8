"""The chart, as helm renders it. What runs in a cluster is tried in one: `make e2e`."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer.main
import yaml

import drover
from cluster.cache import ClusterUnavailableError
from drover_operator import cluster, crd, names
from drover_operator.__main__ import app
from support import chart

pytestmark = pytest.mark.timeout(900)  # helm is built where it is not there yet

Object = dict[str, Any]
EVERYTHING: Object = {
    "fullnameOverride": "",
    "image": {"repository": "r.example/drover-operator", "tag": "2", "pullPolicy": "Always"},
    "workerImage": {"repository": "r.example/drover-worker", "digest": f"sha256:{'a' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "logLevel": "debug",
    "logFormat": "console",
    "extraEnv": [{"name": "A", "value": "b"}],
    "serviceAccount": {"annotations": {"a": "b"}},
    "rbac": {"userRoles": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "namespace": "monitoring"},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "podDisruptionBudget": {"enabled": True},
    "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
    "podLabels": {"team": "a", "app.kubernetes.io/component": "something else"},
    "podAnnotations": {"a": "b"},
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
}
SETS: dict[str, Object] = {
    "as it comes": {},
    "everything": EVERYTHING,
    "some namespaces": {"watchNamespaces": ["inference", "lab"], "podMonitor": {"enabled": True}},
    "nothing global": {
        "watchNamespaces": ["lab"],
        "crds": {"install": False},
        "metrics": {"enabled": False},
    },
    "roles and account of one's own": {
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "runAsUser": None,
        "resources": None,
    },
}
each_set = pytest.mark.parametrize("values", SETS.values(), ids=SETS)


@pytest.fixture(scope="module", autouse=True)
def _helm() -> None:
    try:
        chart.programs.helm()
    except ClusterUnavailableError as error:
        pytest.skip(f"no helm: {error}")


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [made for made in objects if made["kind"] in kinds]


def one(objects: list[Object], kind: str) -> Object:
    (only,) = of_kind(objects, kind)
    return only


def pod_specs(objects: list[Object]) -> list[Object]:
    return [made["spec"] for made in of_kind(objects, "Pod")] + [
        made["spec"]["template"]["spec"] for made in of_kind(objects, "Deployment", "StatefulSet", "Job", "DaemonSet")
    ]


def operator(objects: list[Object]) -> Object:
    (container,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def granted(role: Object) -> set[tuple[str, str, str]]:
    assert not [key for rule in role["rules"] for key in rule if key not in ("apiGroups", "resources", "verbs")]
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used() -> set[tuple[str, str, str]]:
    """The table at the head of drover_operator.cluster."""
    rows = [line.strip("| ").split(" | ") for line in (cluster.__doc__ or "").splitlines() if line.startswith("| ")]
    return {
        ("" if group == "(core)" else group, resource, verb)
        for group, resources, verbs in rows[2:]
        for resource in resources.split(", ")
        for verb in verbs.split(", ")
    }


@each_set
def test_lint(values: Object) -> None:
    assert "0 chart(s) failed" in chart.lint(values)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"imagee": {}}, "imagee"),
        ({"image": {"name": "x"}}, "/image"),
        ({"image": {"repository": "has a space"}}, "/image/repository"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"threads": 0}, "/threads"),
        ({"replicas": 2}, "replicas"),
        ({"logLevel": "warn"}, "/logLevel"),
        ({"watchNamespaces": ["*"]}, "/watchNamespaces/0"),
        ({"watchNamespaces": "lab"}, "/watchNamespaces"),
        ({"runAsUser": 0}, "/runAsUser"),
        ({"podLabels": {"a": True}}, "/podLabels/a"),
        ({"extraEnv": [{"name": "POD_ID", "value": "x"}]}, "/extraEnv/0/name"),
        ({"extraEnv": [{"name": "A"}]}, "/extraEnv/0"),
        ({"metrics": {"port": 0}}, "/metrics/port"),
        ({"serviceMonitor": {"interval": "often"}}, "/serviceMonitor/interval"),
        ({"networkPolicy": {"apiServerPorts": []}}, "/networkPolicy/apiServerPorts"),
        ({"serviceMonitor": {"enabled": True}, "metrics": {"enabled": False}}, "serviceMonitor.enabled needs metrics"),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(values: Object, where: str) -> None:
    with pytest.raises(chart.HelmError, match=where):
        chart.template(values)


def test_the_plain_manifest_is_not_stale() -> None:
    """`make manifests` writes it."""
    assert chart.OPERATOR.read_text() == chart.operator_text()


@pytest.mark.parametrize("keep", [True, False])
def test_the_crd_is_a_template_so_that_it_is_upgraded(keep: bool) -> None:
    made = one(chart.rendered({"crds": {"keep": keep}}), "CustomResourceDefinition")
    marks = {"helm.sh/resource-policy": "keep"} if keep else {}
    assert made["metadata"].pop("annotations", {}) == marks
    assert made["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
    assert made == crd.definition()


def test_the_crd_can_be_left_out() -> None:
    assert not of_kind(chart.rendered({"crds": {"install": False}}), "CustomResourceDefinition")


def test_the_role_is_what_the_operator_uses() -> None:
    assert granted(one(chart.rendered(), "ClusterRole")) == used()
    assert len(used()) > 40
    kinds = {resource for _, resource, _ in used()}
    assert {plural for _, plural in cluster.PATHS.values()} <= kinds


def test_some_namespaces_take_no_cluster_role() -> None:
    made = chart.rendered({"watchNamespaces": ["inference", "lab"]})
    assert not of_kind(made, "ClusterRole", "ClusterRoleBinding")
    roles = of_kind(made, "Role")
    assert [role["metadata"]["namespace"] for role in roles] == ["inference", "lab"]
    assert [granted(role) for role in roles] == [used()] * 2
    assert [word for word in operator(made)["args"] if "namespace" in word] == [
        "--namespace=inference",
        "--namespace=lab",
    ]


def test_nothing_global_is_possible() -> None:
    kinds = {made["kind"] for made in chart.rendered(SETS["nothing global"])}
    assert kinds == {"Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "Pod"}


@each_set
def test_bindings_join_what_is_there(values: Object) -> None:
    made = chart.rendered(values)
    (account,) = {spec["serviceAccountName"] for spec in pod_specs(made)}
    for binding in of_kind(made, "RoleBinding", "ClusterRoleBinding"):
        role = binding["roleRef"]
        places = [
            found["metadata"].get("namespace")
            for found in of_kind(made, role["kind"])
            if found["metadata"]["name"] == role["name"]
        ]
        assert binding["metadata"].get("namespace") in places
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": chart.NAMESPACE}]
    accounts = [account["metadata"]["name"] for account in of_kind(made, "ServiceAccount")]
    assert accounts == ([account] if values.get("serviceAccount", {}).get("create", True) else [])


def test_users_roles_are_added_to_those_of_the_cluster() -> None:
    made = of_kind(chart.rendered({"rbac": {"userRoles": True}}), "ClusterRole")
    marked = {label: granted(role) for role in made for label in role["metadata"]["labels"] if "aggregate" in label}
    view, edit = (marked[f"rbac.authorization.k8s.io/aggregate-to-{who}"] for who in ("view", "edit"))
    assert {verb for _, _, verb in view} == {"get", "list", "watch"}
    assert {verb for _, _, verb in edit} == {"create", "update", "patch", "delete", "deletecollection"}
    assert {resource for _, resource, _ in view | edit} == {"inferenceclusters"}


@each_set
def test_pods_pass_the_restricted_level(values: Object) -> None:
    specs = pod_specs(chart.rendered(values))
    assert len(specs) == 2, "the operator and the test"
    for spec in specs:
        restricted(spec)
        assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in spec["containers"])
        user = spec["securityContext"].get("runAsUser")
        assert user is None if "runAsUser" in values else user > 0


def restricted(spec: Object) -> None:
    """As the Pod Security Standards define it."""
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    kinds = {key for volume in spec["volumes"] for key in volume if key != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not {"runAsUser", "runAsNonRoot", "privileged", "seccompProfile"} & context.keys()
        assert not [port for port in container.get("ports", ()) if "hostPort" in port]


@each_set
def test_the_command_line_is_one_that_the_operator_takes(values: Object) -> None:
    container = operator(chart.rendered(values))
    assert container["command"] == ["python", "-m", "drover_operator"]
    verb, *flags = container["args"]
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    asked = command.make_context(verb, flags).params
    assert list(asked["namespace"] or ()) == values.get("watchNamespaces", [])
    assert asked["metrics_port"] == (9090 if values.get("metrics", {}).get("enabled", True) else 0)
    assert asked["verbose"] is (values.get("logLevel") == "debug")
    assert asked["log_format"] == values.get("logFormat", "json")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"health": asked["health_port"]} | ({"metrics": 9090} if asked["metrics_port"] else {})


def test_images() -> None:
    container = operator(chart.rendered())
    assert container["image"] == f"drover-operator:{drover.__version__}"
    assert f"--image=drover-worker:{drover.__version__}" in container["args"]
    made = chart.rendered(EVERYTHING)
    assert {spec["containers"][0]["image"] for spec in pod_specs(made)} == {"r.example/drover-operator:2"}
    assert f"--image=r.example/drover-worker@sha256:{'a' * 64}" in operator(made)["args"]
    assert all(spec["imagePullSecrets"] == [{"name": "registry"}] for spec in pod_specs(made))


def test_the_operator_knows_itself() -> None:
    """Without POD_ID kopf asks for the name of a user that has none."""
    fields = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in operator(chart.rendered())["env"]}
    assert fields == {"POD_NAMESPACE": "metadata.namespace", "POD_ID": "metadata.name"}


def test_there_is_one_operator_at_a_time() -> None:
    spec = one(chart.rendered(), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


@each_set
def test_selectors_pick_the_operator_and_nothing_else(values: Object) -> None:
    made = chart.rendered(values)
    labels = one(made, "Deployment")["spec"]["template"]["metadata"]["labels"]
    (test,) = of_kind(made, "Pod")
    selectors = [one(made, "Service")["spec"]["selector"], one(made, "Deployment")["spec"]["selector"]["matchLabels"]]
    selectors += [
        item["spec"]["selector"]["matchLabels"] for item in of_kind(made, "PodDisruptionBudget", "ServiceMonitor")
    ]
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in of_kind(made, "NetworkPolicy")]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= test["metadata"]["labels"].items()


def test_workers_let_the_operator_in() -> None:
    """Their NetworkPolicies name its component, and its labels never make it part of an InferenceCluster."""
    labels = one(chart.rendered(EVERYTHING), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels[names.COMPONENT_LABEL] == names.OPERATOR
    assert not names.MANAGED.items() <= labels.items()
    assert labels["team"] == "a"


def test_the_network_policy_lets_the_operator_work() -> None:
    spec = one(chart.rendered(EVERYTHING), "NetworkPolicy")["spec"]
    (workers,) = [rule for rule in spec["egress"] if "to" in rule]
    assert workers["ports"] == [{"protocol": "TCP", "port": names.RPC_PORT}]
    assert workers["to"][0]["podSelector"]["matchLabels"].items() <= names.labels("herd", names.WORKER, "cpu").items()
    assert {port["port"] for rule in spec["egress"] for port in rule["ports"]} == {53, 443, 6443, names.RPC_PORT}
    assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == [8080, 9090]
    assert "from" not in spec["ingress"][0]
    assert spec["ingress"][1]["from"] == [{"namespaceSelector": {}}]


def test_monitors_find_what_they_are_for() -> None:
    made = chart.rendered(EVERYTHING)
    service, monitor = one(made, "Service"), one(made, "ServiceMonitor")
    assert monitor["metadata"]["namespace"] == "monitoring"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    pods = one(made, "PodMonitor")["spec"]
    assert pods["namespaceSelector"] == {"any": True}
    (components,) = pods["selector"]["matchExpressions"]
    assert components["values"] == [names.WORKER, names.COORDINATOR]
    for component in components["values"]:
        assert pods["selector"]["matchLabels"].items() <= names.labels("herd", component).items()
    some = one(chart.rendered(SETS["some namespaces"]), "PodMonitor")["spec"]
    assert some["namespaceSelector"] == {"matchNames": ["inference", "lab"]}


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("drover", {}, "drover-operator"),
        ("farm", {}, "farm-drover-operator"),
        ("farm", {"nameOverride": "herd"}, "farm-herd-operator"),
        ("farm", {"fullnameOverride": "shepherd"}, "shepherd"),
        ("x" * 53, {}, f"{'x' * 40}-operator"),
    ],
)
def test_names(release: str, values: Object, name: str) -> None:
    made = chart.rendered(values, release=release)
    assert one(made, "Deployment")["metadata"]["name"] == name
    roles = {role["metadata"]["name"] for role in of_kind(made, "ClusterRole")}
    assert roles == {name}


@each_set
def test_two_releases_share_nothing_but_the_crd(values: Object) -> None:
    mine, others = (
        {(made["kind"], made["metadata"].get("namespace"), made["metadata"]["name"]) for made in objects}
        for objects in (chart.rendered(values, release="mine"), chart.rendered(values, release="other"))
    )
    assert {kind for kind, _, _ in mine & others} <= {"CustomResourceDefinition"}


@each_set
def test_notes(values: Object, tmp_path: Path) -> None:
    """helm shows them on a cluster only: here they are the text of an object."""
    copy = shutil.copytree(chart.CHART, tmp_path / "drover")
    notes = copy / "templates/NOTES.txt"
    wrapped = (
        'kind: Notes\ntext: {{ include "notes" . | quote }}\n{{ define "notes" }}' + notes.read_text() + "{{ end }}"
    )
    (copy / "templates/notes.yaml").write_text(wrapped)
    notes.unlink()
    text = one(chart.rendered(values, chart=copy), "Notes")["text"]
    assert text.startswith(f"Drover {drover.__version__} is installed.")
    assert ("The CRD was left out" in text) is (not values.get("crds", {}).get("install", True))
    sample = text[text.index("apiVersion") : text.index("EOF\n  kubectl")]
    assert yaml.safe_load("  " + sample)["apiVersion"] == "drover.dev/v1alpha1"


class Answers(BaseHTTPRequestHandler):
    """An operator's health and an API server in one; `status` is what InferenceClusters are answered with."""

    status: ClassVar[int] = 200
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path.partition("?")[0])
        found = 200 if self.path == "/healthz" else self.status
        self.send_response(found)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"items": []}')

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def api(tmp_path: Path) -> Iterator[tuple[type[Answers], dict[str, str], str]]:
    kind = type("Fresh", (Answers,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "c", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    yield kind, {"KUBECONFIG": str(tmp_path / "config")}, url
    server.shutdown()
    server.server_close()


def check(api: tuple[type[Answers], dict[str, str], str], *namespaces: str) -> subprocess.CompletedProcess[str]:
    """What the test pod runs, as it runs it."""
    _, env, url = api
    (container,) = one(chart.rendered({"watchNamespaces": list(namespaces)}), "Pod")["spec"]["containers"]
    _, *words = container["command"]
    address, *spaces = container["args"]
    assert address == "http://drover-operator.drover-system.svc:8080/healthz"
    return subprocess.run(
        [sys.executable, *words, f"{url}/healthz", *spaces], env=env, capture_output=True, text=True, check=False
    )


def test_helm_test_asks_operator_and_api_server(api: tuple[type[Answers], dict[str, str], str]) -> None:
    done = check(api)
    assert (done.returncode, done.stdout) == (0, "InferenceClusters are served, and the operator is healthy\n"), done
    assert api[0].asked == ["/healthz", "/apis/drover.dev/v1alpha1/inferenceclusters"]


def test_helm_test_reads_only_the_namespaces_watched(api: tuple[type[Answers], dict[str, str], str]) -> None:
    assert check(api, "lab").returncode == 0
    assert api[0].asked[1:] == ["/apis/drover.dev/v1alpha1/namespaces/lab/inferenceclusters"]


@pytest.mark.parametrize(("status", "advice"), [(404, "the chart's value crds"), (403, "the chart's value rbac")])
def test_helm_test_says_what_is_wrong(api: tuple[type[Answers], dict[str, str], str], status: int, advice: str) -> None:
    api[0].status = status
    done = check(api)
    assert done.returncode == 1
    assert f"InferenceClusters cannot be read: {status}" in done.stdout
    assert advice in done.stdout
