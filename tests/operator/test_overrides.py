from typing import Any

import pytest

from drover_operator.overrides import merged

BASE: dict[str, Any] = {
    "a": 1,
    "map": {"x": 1, "y": 2},
    "containers": [{"name": "worker", "image": "i", "env": [{"name": "A", "value": "1"}]}, {"name": "b"}],
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "args": ["x", "y"],
}


@pytest.mark.parametrize(
    ("changes", "path", "value"),
    [
        ({}, (), BASE),
        ({"a": 2}, ("a",), 2),
        ({"map": {"x": 3}}, ("map",), {"x": 3, "y": 2}),
        ({"map": {"x": None}}, ("map",), {"y": 2}),
        ({"args": ["z"]}, ("args",), ["z"]),
        ({"new": {"deep": {"er": 1}}}, ("new",), {"deep": {"er": 1}}),
        ({"a": {"now": "a map"}}, ("a",), {"now": "a map"}),
        ({"containers": [{"name": "worker", "image": "j"}]}, ("containers", 0, "image"), "j"),
        ({"containers": [{"name": "worker", "image": "j"}]}, ("containers", 0, "env"), [{"name": "A", "value": "1"}]),
        (
            {"containers": [{"name": "worker", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]}]},
            ("containers", 0, "env"),
            [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}],
        ),
        ({"containers": [{"name": "side"}]}, ("containers", 2), {"name": "side"}),
        (
            {"volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]},
            ("volumes", 0, "emptyDir", "medium"),
            "Memory",
        ),
        ({"hostAliases": [{"ip": "1.1.1.1"}]}, ("hostAliases",), [{"ip": "1.1.1.1"}]),
    ],
)
def test_changes(changes: dict[str, Any], path: tuple[str | int, ...], value: object) -> None:
    before = repr(BASE)
    found: Any = merged(BASE, changes)
    for step in path:
        found = found[step]
    assert found == value
    assert repr(BASE) == before
