"""What a header tells before the model is there; what comes of it in whole cycles is in test_reconcile."""

import json
from typing import Any

import pytest

from drover import plan
from drover.plan import Room
from drover_operator import forecast, layout, target
from drover_operator.forecast import Forecast
from drover_operator.layout import Layout
from drover_operator.observed import Job
from support.operator_world import DEFAULTS, HEADER, body

GIB = 1 << 30
ASKS = forecast.of(target.read(body(), DEFAULTS), None, None, {}, None).asks


def cluster(**spec: Any) -> target.Target:
    return target.read(body(**spec), DEFAULTS)


def seated(wanted: target.Target, *totals: list[int]) -> Layout:
    places = layout.seats(wanted.spec, "herd", "farm")
    offers = {seat.worker: offered for seat, offered in zip(places, totals, strict=True)}
    return layout.of(wanted.spec, places, offers, dict.fromkeys(offers, "uid"))


def job(report: Any = HEADER, of: str = ASKS, state: Any = "succeeded") -> Job:
    return Job("uid", of, state, report=report)


def remembered(**changes: Any) -> dict[str, Any]:
    kept = {name: HEADER[name] for name in ("bytes", "architecture", "layers", "units", "reserve", "message")}
    return {"header": {"of": ASKS} | kept | changes}


@pytest.mark.parametrize(
    "spec",
    [
        {"context": 2048},
        {"parallel": 2},
        {"cacheTypes": {"k": "q8_0"}},
        {"cacheTypes": {"v": "q8_0"}},
        {"model": {"source": "hf://org/repo/n.gguf", "storage": {"size": "2Gi"}}},
        {"model": {"source": "hf://org/repo/m.gguf", "sha256": "0" * 64, "storage": {"size": "2Gi"}}},
        {"image": "drover-worker:2"},
        {"serving": {"image": "drover-worker:2"}},
    ],
)
def test_a_header_is_about_all_that_its_numbers_depend_on(spec: dict[str, Any]) -> None:
    found = forecast.of(cluster(**spec), job(), None, remembered(), None)
    assert found.asks not in ("", ASKS)
    assert (found.header, found.fits) == (None, False)


@pytest.mark.parametrize(
    "spec",
    [
        {"suspend": True},
        {"workers": [{"name": "other", "replicas": 7}]},
        {"model": {"source": "hf://org/repo/m.gguf", "storage": {"size": "9Gi"}, "secretRef": {"name": "s"}}},
    ],
)
def test_and_about_nothing_else(spec: dict[str, Any]) -> None:
    found = forecast.of(cluster(**spec), None, None, remembered(), None)
    assert found.asks == ASKS
    assert found.fits


def test_a_model_on_a_claim_has_none() -> None:
    wanted = cluster(model={"source": "pvc://models/m.gguf"})
    assert forecast.of(wanted, job(of=""), seated(wanted, [GIB], [GIB]), {"header": {"of": ""}}, 7) == Forecast()


@pytest.mark.parametrize(
    ("asked", "before", "known"),
    [
        (job(), {}, True),
        (None, remembered(), True),
        (job(state="running"), {}, False),
        (job(state="running"), remembered(), True),
        (job(state="failed", report={"ok": False}), {}, False),
        (job(of="older"), {}, False),
        (job(report=None), {}, False),
        (None, {}, False),
        (None, remembered(of="older"), False),
    ],
)
def test_where_a_header_is_known_from(asked: Job | None, before: dict[str, Any], known: bool) -> None:
    found = forecast.of(cluster(), asked, None, before, None)
    assert (found.header is not None) is known
    if found.header:
        assert (found.header.of, found.header.bytes, found.header.units) == (ASKS, GIB, ((20, 5), (10, 3), (20, 1)))


@pytest.mark.parametrize("size", [None, "1", 1.5, True, -1, 1 << 63])
def test_a_report_without_a_size_is_none(size: Any) -> None:
    assert forecast.of(cluster(), job(HEADER | {"bytes": size}), None, {}, None).header is None


@pytest.mark.parametrize(
    "odd",
    [
        {"units": None},
        {"units": []},
        {"units": [[10, 1]]},
        {"units": [[10, 1 << 40]]},
        {"units": [[10, 0], [10, 3]]},
        {"units": [[-1, 3]]},
        {"units": [[1.5, 3]]},
        {"units": [[10, 3, 1]]},
        {"units": [10, 3]},
        {"units": "many"},
        {"reserve": None},
        {"reserve": True},
    ],
)
def test_units_that_make_no_sense_are_no_forecast_and_no_obstacle(odd: dict[str, Any]) -> None:
    wanted = cluster()
    found = forecast.of(wanted, job(HEADER | odd), seated(wanted, [1], [1]), {}, None)
    assert (found.header is not None, found.fits, found.rows, found.shortage) == (True, True, (), "")


@pytest.mark.parametrize(
    ("size", "missing"), [("1GiB", ""), ("1023MiB", "1.0 MiB are missing"), ("1MiB", "1023.0 MiB")]
)
def test_a_volume_that_is_too_small(size: str, missing: str) -> None:
    wanted = cluster(model={"source": "hf://org/repo/m.gguf", "storage": {"size": size}})
    found = forecast.of(wanted, None, None, remembered(), None)
    assert found.fits is not bool(missing)
    assert missing in found.volume_shortage
    assert forecast.of(wanted, None, None, remembered(), GIB).volume_shortage == "", "it is there already"


@pytest.mark.parametrize(
    ("workers", "split", "totals"),
    [
        ([{"name": "w", "replicas": 2}], {}, ([GIB], [GIB])),
        ([{"name": "w", "replicas": 2}], {}, ([10 * GIB], [GIB])),
        ([{"name": "w", "replicas": 2}], {}, ([70], [130])),
        ([{"name": "w", "replicas": 2}], {"proportions": [1, 0.0001234567]}, ([GIB], [GIB])),
        ([{"name": "w", "replicas": 2}], {"proportions": [0, 1]}, ([GIB], [GIB])),
        ([{"name": "g", "device": "cuda", "devicesPerWorker": 2}], {}, ([GIB, 2 * GIB],)),
    ],
)
def test_layers_lie_where_the_load_will_lay_them(workers: Any, split: Any, totals: tuple[list[int], ...]) -> None:
    wanted = cluster(workers=workers, split=split)
    places = seated(wanted, *totals)
    found = forecast.of(wanted, job(), places, {}, None)
    rooms = [Room("", share.total, share.total) for share in places.shares]
    units = plan.units([20] * 5 + [10] * 3 + [20])
    loaded = plan.split(units, rooms, [float(word) for word in places.proportions.split(",")], 4)
    assert [row for row in found.rows if row[0]] == [(plan.describe(stage, 9), stage.bytes) for stage in loaded.stages]
    assert sum(size for _, size in found.rows) == 150


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        (([GIB], [GIB]), {"w-0": [0, 4], "w-1": [5, 7]}),
        (([200 * GIB], [GIB]), {"w-0": [0, 7]}),
        (([150], [24]), {"w-0": [0, 7], "w-1": [7, 7]}),
    ],
)
def test_what_the_load_is_to_find(totals: tuple[list[int], ...], expected: dict[str, list[int]]) -> None:
    """The output head counts with the last layer, as `drover load` counts it."""
    wanted = cluster()
    split = {"proportions": [1, 0.9]} if totals[0] == [150] else {}
    found = forecast.of(wanted, job(), seated(cluster(split=split), *totals), {}, None)
    wide = {f"herd-{name}.herd-w.farm.svc:50052": layers for name, layers in expected.items()}
    assert json.loads(found.expect) == wide


def test_devices_of_one_worker_are_expected_together() -> None:
    wanted = cluster(workers=[{"name": "g", "device": "cuda", "devicesPerWorker": 2}, {"name": "w"}])
    found = forecast.of(wanted, job(), seated(wanted, [GIB, GIB], [GIB]), {}, None)
    assert [layers for layers, _ in found.rows] == ["0-2", "3-5", "6-7 + output"]
    assert list(json.loads(found.expect).values()) == [[0, 5], [6, 7]]


def test_what_the_workers_lack_is_said() -> None:
    wanted = cluster(workers=[{"name": "g", "device": "cuda", "devicesPerWorker": 2}])
    found = forecast.of(wanted, job(), seated(wanted, [60, 60]), {}, None)
    assert (found.fits, found.rows, found.expect) == (False, (), "")
    assert "it needs 150 B (herd-g-0 cuda:0 60 B, herd-g-0 cuda:1 60 B free, 4 B of each kept" in found.shortage
    assert "5 of its 9 layers, 70 B, are left over" in found.shortage


@pytest.mark.parametrize(("downloaded", "known"), [(GIB, True), (0, True), (GIB - 1, False)])
def test_a_header_of_a_file_that_was_replaced_since_tells_nothing(downloaded: int, known: bool) -> None:
    wanted = cluster()
    found = forecast.of(wanted, None, seated(wanted, [GIB], [GIB]), remembered(), downloaded)
    assert (found.header is not None, bool(found.expect)) == (known, known)
