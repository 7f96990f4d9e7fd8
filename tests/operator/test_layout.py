from typing import Any

import pytest

from drover.errors import PlanError
from drover.spec import Spec
from drover_operator import layout, target
from support.operator_world import DEFAULTS, body

GIB = 1 << 30
PODS = {"herd-a-0": "1", "herd-a-1": "2"}


def spec(**changes: Any) -> Spec:
    given = {"workers": [{"name": "a", "replicas": 2}]} | changes
    return target.read(body(**given), DEFAULTS).spec


def made(wanted: Spec, *totals: list[int], before: layout.Layout | None = None) -> layout.Layout:
    places = layout.seats(wanted, "herd", "farm")
    return layout.of(wanted, places, dict(zip([s.worker for s in places], totals, strict=True)), PODS, before)


@pytest.mark.parametrize(
    ("totals", "proportions"),
    [
        (([8 * GIB], [24 * GIB]), "8,24"),
        (([GIB], [GIB]), "1,1"),
        (([3 * GIB // 2], [GIB]), "1.5,1"),
        (([1 << 20], [GIB]), "0.01,1"),
        (([0], [GIB]), "0.01,1"),
        (([80 * GIB - 1], [80 * GIB]), "80,80"),
    ],
)
def test_shares_follow_memory(totals: tuple[list[int], ...], proportions: str) -> None:
    assert made(spec(), *totals).proportions == proportions


def test_devices_of_one_worker_are_shares_of_their_own() -> None:
    wanted = spec(workers=[{"name": "a"}, {"name": "g", "device": "cuda", "devicesPerWorker": 2}])
    found = made(wanted, [GIB], [2 * GIB, 3 * GIB])
    assert [(s.worker, s.device, s.proportion) for s in found.shares] == [
        ("herd-a-0", "cpu", 1.0),
        ("herd-g-0", "cuda:0", 2.0),
        ("herd-g-0", "cuda:1", 3.0),
    ]
    assert found.endpoints == ["herd-a-0.herd-a.farm.svc:50052", "herd-g-0.herd-g.farm.svc:50052"]


def test_given_proportions_are_taken_as_they_are() -> None:
    wanted = spec(split={"proportions": [3, 0]})
    assert made(wanted, [GIB], [GIB]).proportions == "3,0"
    assert made(wanted, [GIB], [9 * GIB], before=made(spec(), [GIB], [GIB])).proportions == "3,0"


def test_without_them_memory_counts_again() -> None:
    given = made(spec(split={"proportions": [3, 1]}), [GIB], [GIB])
    assert made(spec(), [GIB], [GIB], before=given).proportions == "1,1"


@pytest.mark.parametrize(
    ("changes", "totals", "fault"),
    [
        ({"split": {"proportions": [3, 1]}}, ([GIB, GIB], [GIB]), "2 numbers, and the workers have 3 devices"),
        ({}, ([0], [0]), "no worker offers any memory"),
    ],
)
def test_no_layout(changes: dict[str, Any], totals: tuple[list[int], ...], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        made(spec(**changes), *totals)


@pytest.mark.parametrize(
    ("before", "now", "stays"),
    [
        (([100], [100]), ([104], [97]), True),
        (([100], [100]), ([106], [100]), False),
        (([100], [100]), ([100, 100], [100]), False),
    ],
)
def test_a_layout_stays_while_memory_is_about_the_same(
    before: tuple[list[int], ...], now: tuple[list[int], ...], stays: bool
) -> None:
    first = made(spec(), *([size * GIB for size in sizes] for sizes in before))
    second = made(spec(), *([size * GIB for size in sizes] for sizes in now), before=first)
    assert (second.proportions == first.proportions) is stays
    assert [share.total for share in second.shares] == [size * GIB for sizes in now for size in sizes]


def test_a_layout_does_not_drift_away_from_the_memory_that_it_was_made_for() -> None:
    found = made(spec(), [100 * GIB], [100 * GIB])
    for size, stays in ((96, True), (104, True), (100, True), (95, True), (94, False)):
        found = made(spec(), [size * GIB], [100 * GIB], before=found)
        assert (found.proportions == "100,100") is stays
        assert layout.from_json(found.to_json()) == found


def test_it_survives_publication() -> None:
    found = made(spec(), [GIB], [2 * GIB])
    assert layout.from_json(found.to_json()) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shares": [{"a": 1}], "pods": {}, "explicit": true}', "null", "1"])
def test_what_is_no_layout(text: str) -> None:
    assert layout.from_json(text) is None


def test_which_spec_it_is_for() -> None:
    found = made(spec(), [GIB], [GIB])
    more = spec(workers=[{"name": "a", "replicas": 3}])
    explicit = spec(split={"proportions": [1, 1]})
    for wanted, fits in ((spec(), True), (more, False), (explicit, False)):
        assert layout.is_for(found, wanted, layout.seats(wanted, "herd", "farm")) is fits


def test_settings_of_a_stock_client() -> None:
    found = made(spec(), [GIB], [2 * GIB])
    rpc = "herd-a-0.herd-a.farm.svc:50052,herd-a-1.herd-a.farm.svc:50052"
    assert found.settings == {
        "LLAMA_ARG_RPC": rpc,
        "LLAMA_ARG_TENSOR_SPLIT": "1,2",
        "LLAMA_ARG_N_GPU_LAYERS": "999",
    }
    assert found.arguments == f"--rpc {rpc} --tensor-split 1,2 --n-gpu-layers 999"
