import math
from itertools import accumulate, combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover import plan as plans
from drover.errors import PlanError
from drover.plan import Plan, Room, Stage, Unit, describe, split, table

GIB = 1 << 30


def units(*sizes: int) -> list[Unit]:
    return [Unit(f"unit {i}", size) for i, size in enumerate(sizes)]


def rooms(*free: int) -> list[Room]:
    return [Room(f"worker-{i}", size, size) for i, size in enumerate(free)]


def counts(plan: Plan, devices: int) -> list[int]:
    held = {stage.device_index: stage.end - stage.first for stage in plan.stages}
    return [held.get(i, 0) for i in range(devices)]


@pytest.mark.parametrize(
    ("count", "free", "proportions", "expected"),
    [
        (7, [100, 100], None, [4, 3]),
        (7, [100, 100, 100], None, [3, 2, 2]),
        (33, [300, 100], None, [25, 8]),
        (33, [100, 100], [3, 1], [25, 8]),
        (33, [100, 100], [1, 3], [9, 24]),
        (8, [100, 100], [1, 1], [4, 4]),
        (1, [100, 100], None, [1, 0]),
        (5, [100], None, [5]),
        (10, [100, 100, 100], [1, 0, 1], [5, 0, 5]),
        (10, [100, 100], [0, 1], [0, 10]),
        (3, [100] * 5, None, [1, 1, 0, 1, 0]),
        (10, [0, 100], None, [0, 10]),
        (10, [100, 0], None, [10, 0]),
    ],
)
def test_units_go_where_the_cumulative_share_covers_them(
    count: int, free: list[int], proportions: list[float] | None, expected: list[int]
) -> None:
    plan = split(units(*[1] * count), rooms(*free), proportions)
    assert counts(plan, len(free)) == expected


@pytest.mark.parametrize(
    ("sizes", "free", "proportions", "reserve", "expected"),
    [
        ([10] * 8, [40, 40], [3, 1], 0, [4, 4]),  # 6 would overfill the first
        ([10] * 8, [45, 65], [3, 1], 5, [4, 4]),
        ([10] * 8, [100, 20], [1, 1], 0, [6, 2]),  # 4 would overfill the second
        ([1, 1, 1, 1, 20], [30, 10], None, 0, [5, 0]),  # the large head must not lie on the small device
        ([20, 1, 1, 1, 1], [10, 30], None, 0, [0, 5]),
        ([10, 10, 10], [10, 10, 10], [100, 1, 1], 0, [1, 1, 1]),
        ([10] * 4, [20, 15, 20], None, 0, [2, 1, 1]),
        ([10] * 4, [40, 100], [1, 0], 0, [4, 0]),
    ],
)
def test_cuts_move_only_as_far_as_memory_demands(
    sizes: list[int], free: list[int], proportions: list[float] | None, reserve: int, expected: list[int]
) -> None:
    assert counts(split(units(*sizes), rooms(*free), proportions, reserve), len(free)) == expected


def test_a_stage_names_its_device_its_units_and_its_bytes() -> None:
    plan = split(units(5, 6, 7), rooms(100, 50))
    assert plan.stages == (Stage(0, "worker-0", 0, 2, 11), Stage(1, "worker-1", 2, 3, 7))


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9),
    free=st.lists(st.integers(0, 120), min_size=1, max_size=4),
    weights=st.none() | st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
    reserve=st.integers(0, 20),
)
def test_any_split(sizes: list[int], free: list[int], weights: list[float] | None, reserve: int) -> None:
    """Every unit once, in order, never over a device's room; refused exactly when no contiguous split fits."""
    proportions = weights[: len(free)] if weights else None
    capacities = [max(0, room - reserve) if proportions or room else 0 for room in free]
    try:
        plan = split(units(*sizes), rooms(*free), proportions, reserve)
    except PlanError:
        assert not any(fits(sizes, capacities, cuts) for cuts in every_cut(len(sizes), len(free)))
        return
    assert [i for stage in plan.stages for i in range(stage.first, stage.end)] == list(range(len(sizes)))
    assert [stage.device_index for stage in plan.stages] == sorted({stage.device_index for stage in plan.stages})
    for stage in plan.stages:
        assert stage.bytes == sum(sizes[stage.first : stage.end]) <= capacities[stage.device_index]
    assert plan == split(units(*sizes), rooms(*free), proportions, reserve)


@given(
    count=st.integers(1, 130),
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
)
def test_with_memory_to_spare_it_is_the_stock_rule(count: int, weights: list[int]) -> None:
    """Unit i lies on the first device whose normalised cumulative proportion is above i / count."""
    bounds = [bound / sum(weights) for bound in accumulate(weights)]
    expected = [next(device for device, bound in enumerate(bounds) if bound > i / count) for i in range(count)]
    plan = split(units(*[1] * count), rooms(*[1000] * len(weights)), [float(weight) for weight in weights])
    assert [stage.device_index for stage in plan.stages for _ in range(stage.first, stage.end)] == expected


def test_a_model_too_large_is_refused_with_what_is_missing_and_what_would_do() -> None:
    with pytest.raises(PlanError) as error:
        split(units(*[GIB] * 12), rooms(4 * GIB, 5 * GIB), None, reserve=GIB // 2)
    text = str(error.value)
    assert "needs 12.0 GiB" in text
    assert "worker-0 4.0 GiB, worker-1 5.0 GiB free, 512.0 MiB of each kept for compute" in text
    assert "5 of its 12 layers, 5.0 GiB, are left over" in text
    assert "one more device with 5.5 GiB free" in text
    split(units(*[GIB] * 12), rooms(4 * GIB, 5 * GIB, 5 * GIB + GIB // 2), None, reserve=GIB // 2)


@pytest.mark.parametrize(
    ("proportions", "message"),
    [
        ([1.0], "1 proportions for 2 devices"),
        ([1.0, 1.0, 1.0], "3 proportions for 2 devices"),
        ([1.0, -1.0], "from 0 up"),
        ([1.0, math.nan], "from 0 up"),
        ([1.0, math.inf], "from 0 up"),
        ([0.0, 0.0], "one above 0"),
    ],
)
def test_senseless_proportions(proportions: list[float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split(units(1), rooms(1, 1), proportions)


def test_no_device() -> None:
    with pytest.raises(PlanError, match="at least one worker"):
        split(units(1), [])


def test_a_device_with_share_0_stays_empty_even_where_the_rest_do_not_suffice() -> None:
    with pytest.raises(PlanError, match="left over"):
        split(units(10, 10), rooms(15, 100), [1, 0])


def test_table() -> None:
    layers = units(*[64 << 20] * 4, 32 << 20)
    devices = [Room("gpu", GIB, 2 * GIB), Room("idle", 0, GIB), Room("127.0.0.1:50052", GIB, GIB)]
    assert table(split(layers, devices), layers, devices).splitlines() == [
        "device           layers        MiB  free MiB  full",
        "gpu              0-2         192.0    1024.0   19%",
        "idle             -             0.0       0.0     -",
        "127.0.0.1:50052  3 + output   96.0    1024.0    9%",
        "total                        288.0    2048.0   14%",
    ]


@pytest.mark.parametrize(
    ("first", "end", "text"),
    [(0, 5, "0-4"), (4, 5, "4"), (0, 6, "0-4 + output"), (4, 6, "4 + output"), (5, 6, "output")],
)
def test_describe(first: int, end: int, text: str) -> None:
    assert describe(Stage(0, "", first, end, 0), 6) == text


def every_cut(count: int, devices: int) -> list[list[int]]:
    return [[0, *cuts, count] for cuts in combinations_with_replacement(range(count + 1), devices - 1)]


def fits(sizes: list[int], capacities: list[int], cuts: list[int]) -> bool:
    return all(sum(sizes[cuts[i] : cuts[i + 1]]) <= capacity for i, capacity in enumerate(capacities))


def test_units_are_layers_and_the_output_head() -> None:
    assert plans.units([3, 4, 5]) == [Unit("layer 0", 3), Unit("layer 1", 4), Unit("output", 5)]


@given(st.lists(st.integers(0, 3)))
def test_sizes_in_runs(sizes: list[int]) -> None:
    runs = plans.packed(sizes)
    assert plans.unpacked(runs) == sizes
    assert all(here[0] != after[0] for here, after in pairwise(runs))
