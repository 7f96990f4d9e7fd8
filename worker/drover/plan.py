"""Which run of layers lives on which device: layers over devices in proportion to their memory.

Pure: no I/O, no clock, no numpy. The operator, the coordinator and `drover plan` call the same `split`.
A model is n layers and its output head, n + 1 units, cut into one contiguous run per device, in device order. Unit i
goes to the first device whose cumulative share exceeds i / (n + 1), as stock llama.cpp does, so that a stock client
given the same proportions splits the same way. Only where that would overfill a device do the cuts move, and then as
little as possible.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from drover.errors import PlanError, ShortageError
from drover.sizes import format_size

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """A device's memory in bytes: what is free now, and all it offers."""

    name: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Unit:
    """What cannot be cut: a layer (weights and its share of the KV cache), or the output head; `bytes` on a device."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Units `first` to `end` (exclusive) on one device, `bytes` in all."""

    device_index: int
    device_name: str
    first: int
    end: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages in device order; together they hold every unit once. A device without a stage holds nothing."""

    stages: tuple[Stage, ...]


def split(
    units: Sequence[Unit], rooms: Sequence[Room], proportions: Sequence[float] | None = None, reserve: int = 0
) -> Plan:
    """Lay units over devices in proportion to free memory, or to `proportions`, one per device; 0 keeps one empty.

    `reserve` bytes stay free on every device that holds something (compute buffers). Raises PlanError if proportions
    are senseless or if no contiguous split fits; then it says how much is left over and what would take it.
    """
    if not rooms:
        raise PlanError("no device to put layers on: give at least one worker, or a local device")
    shares = [float(room.free) for room in rooms] if proportions is None else _checked(proportions, rooms)
    capacities = [max(0, room.free - reserve) if share > 0 else 0 for room, share in zip(rooms, shares, strict=True)]
    ends = _fitting(_proportional(len(units), shares), [unit.bytes for unit in units], capacities)
    if ends is None:
        raise ShortageError(_shortage(units, rooms, capacities, reserve))
    offsets = [0, *accumulate(unit.bytes for unit in units)]
    stages = [
        Stage(index, room.name, first, end, offsets[end] - offsets[first])
        for index, (room, first, end) in enumerate(zip(rooms, [0, *ends], ends, strict=False))
        if end > first
    ]
    return Plan(tuple(stages))


def units(sizes: Sequence[int]) -> list[Unit]:
    """The layers of a model and its output head, by their bytes."""
    names = [*(f"layer {index}" for index in range(len(sizes) - 1)), "output"]
    return [Unit(name, size) for name, size in zip(names, sizes, strict=True)]


def packed(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Sizes in a row as (size, how often): most layers of a model are as large as the one before."""
    return [(size, sum(1 for _ in run)) for size, run in groupby(sizes)]


def unpacked(runs: Iterable[tuple[int, int]]) -> list[int]:
    """The sizes that `packed` was given."""
    return [size for size, count in runs for _ in range(count)]


def table(plan: Plan, units: Sequence[Unit], rooms: Sequence[Room]) -> str:
    """The plan as text: one row a device with its layers, MiB and how full its free memory gets; then the sum."""
    stages = {stage.device_index: stage for stage in plan.stages}
    rows = [("device", "layers", "MiB", "free MiB", "full")]
    for index, room in enumerate(rooms):
        stage = stages.get(index)
        used = stage.bytes if stage else 0
        rows.append(
            (
                room.name,
                describe(stage, len(units)) if stage else "-",
                f"{used / MIB:.1f}",
                f"{room.free / MIB:.1f}",
                f"{100 * used / room.free:.0f}%" if room.free else "-",
            )
        )
    needed, free = sum(unit.bytes for unit in units), sum(room.free for room in rooms)
    full = f"{100 * needed / free:.0f}%" if free else "-"
    rows.append(("total", "", f"{needed / MIB:.1f}", f"{free / MIB:.1f}", full))
    return _aligned(rows)


def describe(stage: Stage, unit_count: int) -> str:
    """A stage's units for people: "0-15", or "16-31 + output" where the last unit, the output head, is among them."""
    layers_end = min(stage.end, unit_count - 1)
    parts = []
    if layers_end > stage.first:
        last = layers_end - 1
        parts.append(str(last) if last == stage.first else f"{stage.first}-{last}")
    if stage.end == unit_count:
        parts.append("output")
    return " + ".join(parts)


def _checked(proportions: Sequence[float], rooms: Sequence[Room]) -> list[float]:
    if len(proportions) != len(rooms):
        names = ", ".join(room.name for room in rooms)
        raise PlanError(f"{len(proportions)} proportions for {len(rooms)} devices ({names}): give one for each")
    if any(not math.isfinite(share) or share < 0 for share in proportions) or sum(proportions) <= 0:
        given = ", ".join(f"{share:g}" for share in proportions)
        raise PlanError(f"proportions {given}: each must be a number from 0 up, and one above 0")
    return [float(share) for share in proportions]


def _proportional(count: int, shares: Sequence[float]) -> list[int]:
    """For each device the end of its run if memory did not matter."""
    total = sum(shares)
    if total <= 0:
        return [count] * len(shares)
    bounds = [bound / total for bound in accumulate(shares)]
    ends = [next((i for i in range(count) if i / count >= bound), count) for bound in bounds]
    ends[-1] = count
    return ends


def _fitting(targets: Sequence[int], sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """The ends nearest to `targets` (least sum of shifts, in units) that overfill no device; None if there are none.

    Dynamic programming over devices: `best[e]` is the least shift with the first e units on the devices so far.
    """
    count = len(sizes)
    offsets = [0, *accumulate(sizes)]
    best: list[float] = [0.0] + [math.inf] * count
    choices: list[list[int]] = []
    for target, capacity in zip(targets, capacities, strict=True):
        reached, chosen, low = [], [], 0
        for end in range(count + 1):
            while offsets[end] - offsets[low] > capacity:
                low += 1
            start = min(range(low, end + 1), key=best.__getitem__)
            chosen.append(start)
            reached.append(best[start] + abs(end - target))
        best = reached
        choices.append(chosen)
    if math.isinf(best[count]):
        return None
    ends = [count]
    for chosen in reversed(choices[1:]):
        ends.append(chosen[ends[-1]])
    return ends[::-1]


def _shortage(units: Sequence[Unit], rooms: Sequence[Room], capacities: Sequence[int], reserve: int) -> str:
    """What is left over when every device in turn takes all it can, and what would take it."""
    left = [unit.bytes for unit in units]
    for capacity in capacities:
        taken = 0
        while left and taken + left[0] <= capacity:
            taken += left.pop(0)
    offers = ", ".join(f"{room.name} {format_size(room.free)}" for room in rooms)
    kept = f", {format_size(reserve)} of each kept for compute" if reserve else ""
    return (
        f"the model does not fit: it needs {format_size(sum(unit.bytes for unit in units))} ({offers} free{kept}), and "
        f"{len(left)} of its {len(units)} layers, {format_size(sum(left))}, are left over; one more device with "
        f"{format_size(sum(left) + reserve)} free, a shorter context or a smaller quantization would do"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first two read from the left, numbers from the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if position < 2 else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
