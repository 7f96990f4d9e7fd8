import json
from typing import Any

from drover_operator.mirror import AFRESH, HEARD, MOST_GONE, Mirror, Mirrored, cluster_of

KEY = ("farm", "herd")
LABELS = {"app.kubernetes.io/instance": "herd", "app.kubernetes.io/managed-by": "drover"}


def part(name: str, version: int = 1, uid: str = "u", **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "farm", "uid": uid, "labels": LABELS, "resourceVersion": str(version)}
    return {"metadata": metadata | rest.pop("metadata", {}), **rest}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def seen(mirror: Mirror) -> list[tuple[str, str, str]]:
    found = mirror.owned(KEY)
    assert found is not None
    return [(body["kind"], body["metadata"]["name"], body["metadata"]["resourceVersion"]) for body in found]


def test_the_newest_version_counts_in_whatever_order_it_comes() -> None:
    mirror = Mirror(Clock())
    for version in (2, 3, 1):
        mirror.put("Pod", part("a", version))
    mirror.put("Job", part("a"))
    assert seen(mirror) == [("Pod", "a", "3"), ("Job", "a", "1")]


def test_only_the_very_object_is_dropped() -> None:
    mirror = Mirror(Clock())
    mirror.put("Pod", part("a", 5, uid="new"))
    mirror.drop("Pod", part("a", 4, uid="old"))
    assert len(seen(mirror)) == 1
    mirror.drop("Pod", part("a", 5, uid="new"))
    mirror.drop("Pod", part("b"))
    assert seen(mirror) == []


def test_whose_an_object_is() -> None:
    owner = {"kind": "InferenceCluster", "name": "barn", "controller": True}
    assert cluster_of(part("a")) == KEY
    assert cluster_of(part("a", metadata={"ownerReferences": [owner]})) == ("farm", "barn")
    assert cluster_of(part("a", metadata={"labels": {}, "ownerReferences": [owner]})) == ("farm", "barn")
    assert cluster_of(part("a", metadata={"labels": {}})) is None
    mirror = Mirror(Clock())
    mirror.put("Pod", part("a", metadata={"labels": {}}))
    mirror.drop("Pod", part("a", metadata={"labels": {}}))
    assert seen(mirror) == []


def test_what_others_manage_is_not_kept() -> None:
    mirror = Mirror(Clock())
    fields = [{"manager": "kubectl"}, {"manager": "drover", "operation": "Apply"}]
    mirror.put("Pod", part("a", metadata={"managedFields": fields}))
    (body,) = mirror.owned(KEY) or ()
    assert body["metadata"]["managedFields"] == fields[1:]


def test_now_and_then_a_cluster_is_listed_afresh() -> None:
    clock = Clock()
    mirror = Mirror(clock)
    mirror.put("Pod", part("gone"))

    class Source:
        lists = 0

        def owned(self, namespace: str, name: str) -> list[dict[str, Any]]:
            assert (namespace, name) == KEY
            self.lists += 1
            return [part("there", 7) | {"kind": "Pod"}]

        get = write_status = tell = apply = make = delete = None

    source = Source()
    mirrored = Mirrored(source, mirror)  # type: ignore[arg-type]
    assert [body["metadata"]["name"] for body in mirrored.owned(*KEY)] == ["gone"]
    clock.now = AFRESH + 1
    for _ in range(3):
        assert [body["metadata"]["name"] for body in mirrored.owned(*KEY)] == ["there"]
    assert source.lists == 1
    assert mirrored.owned("farm", "new") == []
    assert source.lists == 1


def herd(version: int, uid: str = "u", **status: Any) -> dict[str, Any]:
    metadata = {"name": "herd", "namespace": "farm", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata | {"managedFields": [{"manager": "drover"}]}, "status": status}


class OneHerd:
    """An API server with one InferenceCluster; every question is counted."""

    def __init__(self, body: dict[str, Any] | None) -> None:
        self.body, self.asked = body, 0

    def get(self, *asked: str) -> dict[str, Any] | None:
        assert asked == ("InferenceCluster", *KEY)
        self.asked += 1
        return self.body

    def write_status(self, body: dict[str, Any], made: dict[str, Any]) -> dict[str, Any] | None:
        self.body = herd(int(body["metadata"]["resourceVersion"]) + 1, **made)
        return self.body

    owned = tell = apply = make = delete = None


def version(mirrored: Mirrored) -> str | None:
    found = mirrored.get("InferenceCluster", *KEY)
    return found and found["metadata"]["resourceVersion"]


def test_put_says_what_is_news() -> None:
    mirror = Mirror(Clock())
    for kind, bodies in (
        ("Pod", [part("a", version) for version in (2, 2, 1, 3)]),
        ("InferenceCluster", [herd(version) for version in (2, 2, 1, 3)]),
    ):
        assert [mirror.put(kind, body) for body in bodies] == [True, False, False, True]
    assert not mirror.put("Pod", part("x", metadata={"labels": {}}))


def test_a_cluster_that_was_heard_of_is_not_asked_for() -> None:
    clock = Clock()
    mirror, source = Mirror(clock), OneHerd(herd(4))
    mirrored = Mirrored(source, mirror)  # type: ignore[arg-type]
    assert (version(mirrored), source.asked) == ("4", 1)
    mirror.put("InferenceCluster", herd(5))
    mirror.put("InferenceCluster", herd(3))
    clock.now = HEARD
    assert (version(mirrored), source.asked) == ("5", 1)
    source.body = herd(6)
    clock.now += 1
    assert (version(mirrored), source.asked) == ("6", 2)
    assert "managedFields" not in json.dumps(mirror.cluster(KEY)).replace('"managedFields": []', "")


def test_a_cycle_sees_the_status_that_the_one_before_wrote() -> None:
    mirror, source = Mirror(Clock()), OneHerd(None)
    mirrored = Mirrored(source, mirror)  # type: ignore[arg-type]
    mirror.put("InferenceCluster", herd(4))
    mirrored.write_status(herd(4), {"workers": "2/2"})
    found = mirrored.get("InferenceCluster", *KEY)
    assert found is not None
    assert found["status"] == {"workers": "2/2"}
    assert not mirror.put("InferenceCluster", herd(5, workers="2/2"))


def test_a_cluster_whose_going_was_missed_is_found_out() -> None:
    clock = Clock()
    mirror = Mirror(clock)
    mirrored = Mirrored(OneHerd(None), mirror)  # type: ignore[arg-type]
    mirror.put("InferenceCluster", herd(4))
    clock.now = HEARD + 1
    assert version(mirrored) is None
    assert mirror.cluster(KEY) is None


def test_a_late_answer_does_not_bring_back_what_is_gone() -> None:
    mirror = Mirror(Clock())
    for kind, body in (("Pod", part("a", 5)), ("InferenceCluster", herd(5, uid="h"))):
        mirror.put(kind, body)
        mirror.gone(kind, body)
        assert not mirror.put(kind, body)
    assert (seen(mirror), mirror.cluster(KEY)) == ([], None)
    mirror.put("Pod", part("a", 9, uid="another"))
    assert seen(mirror) == [("Pod", "a", "9")]


def test_what_lost_its_label_is_back_with_it() -> None:
    """To a watch that selects a label, losing it is going."""
    mirror = Mirror(Clock())
    mirror.put("Pod", part("a", 5))
    mirror.gone("Pod", part("a", 6))
    assert mirror.put("Pod", part("a", 7))
    assert seen(mirror) == [("Pod", "a", "7")]


def test_what_we_delete_may_be_seen_once_more_while_it_goes() -> None:
    mirror = Mirror(Clock())
    mirror.put("Job", part("a", 5))
    mirror.drop("Job", part("a", 5))
    assert seen(mirror) == []
    assert mirror.put("Job", part("a", 6, metadata={"deletionTimestamp": "now"}))


def test_it_does_not_remember_for_ever_what_is_gone() -> None:
    mirror = Mirror(Clock())
    for number in range(MOST_GONE + 1):
        mirror.gone("Pod", part("a", uid=str(number)))
    assert mirror.put("Pod", part("a", uid="0"))
    assert not mirror.put("Pod", part("a", uid="1"))


def test_what_it_lacks_of_a_roll() -> None:
    mirror = Mirror(Clock())
    mirror.put("InferenceCluster", herd(1, uid="h"))
    mirror.put("Pod", part("a", uid="a"))
    mirror.gone("Pod", part("b", uid="b"))
    assert mirror.lacks(["h", "a", "b", "c"]) == {"c"}
