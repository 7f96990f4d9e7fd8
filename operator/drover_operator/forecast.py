"""What the head of a model's file tells before the model is downloaded: does it fit on its volume, and on the workers?

Pure. Layers are laid out by `drover.plan.split`, as the load will, from what the header Job found and what the workers
offer; so the plan is known before there is a model, and what is loaded can be compared with it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drover import plan
from drover.errors import PlanError, ShortageError
from drover.plan import Plan, Room
from drover.sizes import format_size
from drover_operator import names
from drover_operator.layout import Layout, Share
from drover_operator.observed import Job
from drover_operator.target import Target

MOST_UNITS = 512
"""A report that says more of them is none of ours: no model has half as many layers."""

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Header:
    """What the header Job found: bytes of the model's files, of its units in runs, and of compute memory.

    `of` is the hash of all that this depends on; `units` are empty if they could not be said.
    """

    of: str
    bytes: int
    architecture: str = ""
    layers: int = 0
    units: Runs = ()
    reserve: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known of a model that is to be downloaded, and of its plan; `asks` is the hash of what is to be known."""

    asks: str = ""
    header: Header | None = None
    volume_shortage: str = ""
    """Why the model has no room on its volume."""
    shortage: str = ""
    """Why its layers have no room on the workers."""
    rows: tuple[tuple[str, int], ...] = ()
    """Which layers are to lie on each device of the layout, and their bytes."""
    expect: str = ""
    """First and last layer of every worker, as `drover load --expect` takes it."""

    @property
    def fits(self) -> bool:
        """Whether the header is known, and nothing in it speaks against the download."""
        return self.header is not None and not self.volume_shortage and not self.shortage


def of(
    target: Target, job: Job | None, layout: Layout | None, before: Mapping[str, Any], downloaded: int | None
) -> Forecast:
    """The forecast by the header Job, or as the status `before` remembers what it said.

    `downloaded` are the bytes of the model that is there already, 0 if they are not known: a header of other bytes is
    of a file that was replaced at its source, and tells nothing.
    """
    asks = _asks(target)
    header = _header(job, asks, before)
    if header is None or (downloaded and downloaded != header.bytes):
        return Forecast(asks)
    made = Forecast(asks, header, "" if downloaded is not None else _volume_shortage(target, header))
    return made if layout is None or not header.units else _planned(made, header, layout)


def _asks(target: Target) -> str:
    """Hash of what the numbers of a header depend on; "" for a model that is not downloaded."""
    spec, model = target.spec, target.spec.model
    if model.scheme == "pvc":
        return ""
    settings = [spec.context, spec.parallel, spec.cache_types.k, spec.cache_types.v]
    return names.digest([model.source, model.sha256, *settings, target.serving_image])


def _header(job: Job | None, asks: str, before: Mapping[str, Any]) -> Header | None:
    if job and asks and job.of == asks and job.state == "succeeded" and job.report:
        return _read(asks, job.report)
    known = before.get("header") or {}
    return _read(asks, known) if asks and known.get("of") == asks else None


def _volume_shortage(target: Target, header: Header) -> str:
    size = target.spec.model.storage.size
    if not size or header.bytes <= size:
        return ""
    return (
        f"the model has {format_size(header.bytes)}, and its volume (spec.model.storage.size) {format_size(size)}: "
        f"{format_size(header.bytes - size)} are missing; ask for a larger one, or take a smaller quantization"
    )


def _planned(made: Forecast, header: Header, layout: Layout) -> Forecast:
    """The same, and where the layers go."""
    units = plan.units(plan.unpacked(header.units))
    rooms = [Room(_name(share), share.total, share.total) for share in layout.shares]
    proportions = [float(word) for word in layout.proportions.split(",")]
    try:
        found = plan.split(units, rooms, proportions, header.reserve)
    except ShortageError as error:
        return replace(made, shortage=str(error))
    except PlanError:
        return made
    rows = [("", 0)] * len(rooms)
    for stage in found.stages:
        rows[stage.device_index] = (plan.describe(stage, len(units)), stage.bytes)
    return replace(made, rows=tuple(rows), expect=_expect(found, layout, len(units) - 1))


def _expect(found: Plan, layout: Layout, layers: int) -> str:
    """The output head counts with the last layer."""
    spans: dict[str, list[int]] = {}
    for stage in found.stages:
        endpoint = layout.shares[stage.device_index].endpoint
        first, last = min(stage.first, layers - 1), min(stage.end, layers) - 1
        spans[endpoint] = [spans.get(endpoint, [first])[0], last]
    return json.dumps(spans, separators=(",", ":"))


def _name(share: Share) -> str:
    return f"{share.worker} {share.device}" if ":" in share.device else share.worker


def _read(of: str, report: Mapping[str, Any]) -> Header | None:
    """A header from what a Job left or the status keeps; both may be anything."""
    size = _amount(report.get("bytes"))
    if size is None:
        return None
    units, reserve = _runs(report.get("units")), _amount(report.get("reserve"))
    return Header(
        of,
        size,
        architecture=str(report.get("architecture") or ""),
        layers=_amount(report.get("layers")) or 0,
        units=units if reserve is not None else (),
        reserve=reserve or 0,
        message=str(report.get("message") or ""),
    )


def _runs(value: Any) -> Runs:
    """Runs of units, at least a layer and the output head; () for anything else."""
    if not isinstance(value, list) or not all(isinstance(run, list) and len(run) == 2 for run in value):
        return ()
    runs = tuple((size, count) for size, count in value if _amount(size) is not None and _amount(count))
    return runs if len(runs) == len(value) and 2 <= sum(count for _, count in runs) <= MOST_UNITS else ()


def _amount(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None
