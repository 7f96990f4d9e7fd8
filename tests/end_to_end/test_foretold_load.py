"""What a model's header foretells before the download is what the load finds: the same layers, the same bytes."""

import json
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from drover import plan, reports
from drover.coordinator.load_command import run
from drover.coordinator.settings import Config
from drover.fetch.measuring import measure
from drover_operator import forecast, target
from drover_operator.forecast import Forecast
from drover_operator.layout import Layout, Share
from drover_operator.observed import Job
from support import drover
from support.file_server import serving
from support.operator_world import DEFAULTS, body
from support.worker_thread import worker

pytestmark = pytest.mark.timeout(300)

CONTEXT = 64


@pytest.fixture(scope="module")
def said() -> str:
    """The report of the header Job."""
    with serving() as files:
        files.content["/m.gguf"] = drover.MODEL.read_bytes()
        return reports.encode(measure(f"{files.url}/m.gguf", Config(drover.MODEL, context=CONTEXT)))


def foretold(said: str, layout: Layout) -> Forecast:
    wanted = target.read(body(context=CONTEXT), DEFAULTS)
    asks = forecast.of(wanted, None, None, {}, None).asks
    return forecast.of(wanted, Job("uid", asks, "succeeded", report=json.loads(said)), layout, {}, None)


def layout_of(endpoints: Sequence[str], memory: Sequence[int], proportions: Sequence[float]) -> Layout:
    rows = zip(endpoints, memory, proportions, strict=True)
    return Layout(tuple(Share(f"w-{i}", "cpu", *row) for i, row in enumerate(rows)), ())


def config(layout: Layout) -> Config:
    split = tuple(float(word) for word in layout.proportions.split(","))
    return Config(drover.MODEL, rpc=tuple(layout.endpoints), tensor_split=split, context=CONTEXT)


@pytest.mark.parametrize("spare", [0, 1 << 30])
@pytest.mark.parametrize("proportions", [(1, 1), (3, 1), (1, 5)])
def test_layers_and_bytes(said: str, spare: int, proportions: tuple[float, float]) -> None:
    """With no memory to spare the first worker has room for two layers and no more, whatever its share."""
    header = json.loads(said)
    units = plan.unpacked(header["units"])
    margin = 1 << 16  # buffers are aligned
    memory = [sum(units[:2]) + header["reserve"] + margin + spare, sum(units) + header["reserve"] + margin]
    with ExitStack() as stack:
        layout = layout_of([stack.enter_context(worker(limit=size)) for size in memory], memory, proportions)
        found = foretold(said, layout)
        report, status = run(config(layout), found.expect)
    assert (status, report.reason) == (0, "Verified"), report.message
    assert tuple((stage.layers, stage.bytes) for stage in report.stages) == found.rows
    if not spare and proportions != (1, 5):
        assert found.rows[0][0] == "0-1"


def test_what_is_missing(said: str) -> None:
    memory = [1 << 20, 2 << 20]
    with ExitStack() as stack:
        layout = layout_of([stack.enter_context(worker(limit=size)) for size in memory], memory, (1, 2))
        found = foretold(said, layout)
        report, status = run(config(layout))
    assert (status, report.reason) == (1, "DoesNotFit")
    words = "are left over; one more device with "
    assert words in found.shortage
    assert report.message.partition(" of its ")[2] == found.shortage.partition(" of its ")[2]
