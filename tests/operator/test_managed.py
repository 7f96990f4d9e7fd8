"""Differences against objects that a real API server (1.35) wrote down, managed fields and all: tests/operator/live."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drover_operator import desired, managed, target
from drover_operator.managed import Difference
from support.operator_world import DEFAULTS

HERE = Path(__file__).parent
SPEC = yaml.safe_load((HERE / "live/cluster.yaml").read_text())
Body = dict[str, Any]


def live(name: str) -> Body:
    body: Body = json.loads((HERE / f"live/{name}.json").read_text())
    return body


def wanted(like: Body) -> Body:
    """What we would apply now, for an InferenceCluster of the same uid."""
    (owner,) = like["metadata"]["ownerReferences"]
    metadata = {"name": "full", "namespace": "default", "uid": owner["uid"], "generation": 1}
    cluster = target.read(SPEC | {"metadata": metadata}, DEFAULTS)
    stage = desired.Stage(fetches=like["metadata"]["annotations"].get("drover.dev/fetches"))
    return next(
        body
        for body in desired.objects(cluster, stage)
        if (body["kind"], body["metadata"]["name"]) == (like["kind"], like["metadata"]["name"])
    )


def said(body: Body, like: Body) -> Body:
    """With the hash of that time: what a manifest says has its own tests, in test_desired."""
    body["metadata"]["annotations"]["drover.dev/applied"] = like["metadata"]["annotations"]["drover.dev/applied"]
    return body


@pytest.mark.parametrize("name", ["stateful_set", "service", "job"])
def test_an_object_as_it_was_applied_does_not_differ(name: str) -> None:
    body = live(name)
    assert managed.difference(said(wanted(body), body), body) is Difference.NONE


def test_what_is_not_there_is_missing() -> None:
    assert managed.difference(wanted(live("job")), None) is Difference.MISSING


def test_another_manifest_makes_it_outdated() -> None:
    body = live("stateful_set")
    manifest = said(wanted(body), body)
    manifest["metadata"]["annotations"]["drover.dev/applied"] = "other"
    assert managed.difference(manifest, body) is Difference.OUTDATED
    del body["metadata"]["annotations"]["drover.dev/applied"]
    assert managed.difference(said(wanted(live("stateful_set")), live("stateful_set")), body) is Difference.OUTDATED


def test_an_object_that_we_never_applied_is_outdated() -> None:
    body = live("service")
    body["metadata"]["managedFields"] = []
    assert managed.difference(said(wanted(live("service")), body), body) is Difference.OUTDATED


CONTAINER = ("f:spec", "f:template", "f:spec", "f:containers", 'k:{"name":"worker"}')


@pytest.mark.parametrize(
    "lost",
    [
        ("f:metadata", "f:labels", "f:app.kubernetes.io/component"),
        ("f:metadata", "f:ownerReferences"),
        ("f:spec", "f:replicas"),
        ("f:spec", "f:template", "f:spec", "f:tolerations"),
        ("f:spec", "f:volumeClaimTemplates"),
        CONTAINER,
        (*CONTAINER, "f:image"),
        (*CONTAINER, "f:args"),
        (*CONTAINER, "f:resources", "f:limits", "f:memory"),
        (*CONTAINER, "f:env", 'k:{"name":"XDG_CACHE_HOME"}', "f:value"),
        (*CONTAINER, "f:ports", 'k:{"containerPort":50052,"protocol":"TCP"}'),
    ],
    ids=lambda lost: "/".join(lost[-2:]),
)
def test_a_field_that_someone_else_took_is_an_edit(lost: tuple[str, ...]) -> None:
    """A hand that changes a field takes it over: it is in our set no more."""
    body = live("stateful_set")
    manifest = said(wanted(body), body)
    changed = copy.deepcopy(body)
    entry = next(entry for entry in changed["metadata"]["managedFields"] if entry["manager"] == "drover")
    *steps, last = lost
    fields = entry["fieldsV1"]
    for step in steps:
        fields = fields[step]
    del fields[last]
    assert managed.difference(manifest, changed) is Difference.EDITED


def test_what_others_add_is_no_difference() -> None:
    body = live("stateful_set")
    manifest = said(wanted(body), body)
    body["metadata"]["annotations"]["note"] = "mine"
    body["metadata"]["managedFields"].append({"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:x": {}}})
    assert managed.difference(manifest, body) is Difference.NONE
