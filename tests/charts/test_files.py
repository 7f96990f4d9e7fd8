"""The chart's files, and the manifests made of them; no helm is needed."""

import json
from typing import Any

import yaml

import drover
from support import chart

Object = dict[str, Any]
VALUES = yaml.safe_load((chart.CHART / "values.yaml").read_text())
SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())


def fields(schema: Object) -> Object | None:
    schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if not (inner := schema.get("properties")):
        return None
    assert schema["additionalProperties"] is False
    return {name: fields(field) for name, field in inner.items()}


def test_schema_and_values_name_the_same() -> None:
    free = {"requests", "limits", "nodeAffinity", "podAffinity", "podAntiAffinity"}

    def tree(schema: Object | None, values: Any) -> None:
        if not schema or free & schema.keys():
            return
        assert schema.keys() == values.keys()
        for name, inner in schema.items():
            tree(inner, values[name])

    every = fields(SCHEMA)
    assert every is not None
    assert every.pop("global", "missing") is None
    tree(every, VALUES)


def test_every_value_says_what_it_is() -> None:
    lines = (chart.CHART / "values.yaml").read_text().splitlines()
    given = [number for number, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")]
    quiet = [lines[number].strip() for number in given if not lines[number - 1].strip().startswith("#")]
    assert quiet == ["requests:", "cpu: 50m", "memory: 128Mi", "limits:", "memory: 512Mi"], "those of a container"


def test_versions_are_the_projects() -> None:
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == drover.__version__


def test_copies_of_the_crd_are_not_stale() -> None:
    """`make manifests` writes them."""
    assert chart.CRD.read_text() == chart.CHART_CRD.read_text() == chart.crd_text()


def test_the_plain_manifest_is_of_this_chart() -> None:
    """`make manifests` writes it. That it is what helm makes of the chart is tested where there is a helm."""
    assert chart.OPERATOR.read_text().startswith(chart.operator_head())


def test_the_plain_manifest_says_nothing_of_helm() -> None:
    made = [made for made in yaml.safe_load_all(chart.OPERATOR.read_text()) if made]
    assert {made["kind"] for made in made} == {
        "Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Service", "Deployment"
    }  # fmt: skip
    space = next(item["metadata"] for item in made if item["kind"] == "Namespace")
    assert {made["metadata"].get("namespace", space["name"]) for made in made} == {space["name"]}
    assert "helm" not in "\n".join(chart.OPERATOR.read_text().lower().splitlines()[2:])
