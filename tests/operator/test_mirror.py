from typing import Any

from drover_operator.mirror import AFRESH, Mirror, Mirrored, cluster_of

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

        get = write_status = tell = apply = delete = None

    source = Source()
    mirrored = Mirrored(source, mirror)  # type: ignore[arg-type]
    assert [body["metadata"]["name"] for body in mirrored.owned(*KEY)] == ["gone"]
    clock.now = AFRESH + 1
    for _ in range(3):
        assert [body["metadata"]["name"] for body in mirrored.owned(*KEY)] == ["there"]
    assert source.lists == 1
    assert mirrored.owned("farm", "new") == []
    assert source.lists == 1
