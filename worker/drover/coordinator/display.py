"""What people see of the coordinator in a terminal: loading progress, and tables of what lies where and how fast.

Only rich is used here; it is given plain numbers and changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from drover.coordinator.pipeline import Meter
from drover.sizes import format_size

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage for people: its device's name, worker and number there; sizes in bytes."""

    device: str
    worker: str
    index: int
    first: int
    """Its first layer, and the one after its last; the output head counts as a layer."""
    end: int
    layers: str
    weights: int
    cache: int
    free: int


class LoadingDisplay:
    """A bar for each device, with rate and time left, on standard error if that is a terminal."""

    def __init__(self, totals: dict[str, int]) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {
            device: self._progress.add_task(device, total=total) for device, total in totals.items()
        }

    def advance(self, device: str, count: int) -> None:
        """`count` more bytes are in place."""
        self._progress.advance(self._tasks[device], count)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()


def show_placement(rows: Sequence[StageRow], title: str) -> None:
    """Which layers lie on which device, with bytes, on standard output."""
    table = Table(title=title, title_justify="left")
    for heading in ("device", "layers"):
        table.add_column(heading, overflow="fold")
    for heading in ("weights", "KV cache", "free before"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.device, row.layers, *map(format_size, (row.weights, row.cache, row.free)))
    Console().print(table)


def show_speed(rows: Sequence[StageRow], meters: Sequence[Meter]) -> None:
    """What each stage did, on standard output; nothing if it did nothing."""
    if not any(meter.prompt_tokens + meter.decode_tokens for meter in meters):
        return
    table = Table(title="speed of each stage alone", title_justify="left")
    for heading in ("worker", "layers"):
        table.add_column(heading, overflow="fold")
    for heading in ("MiB", "prompt tokens/s", "tokens/s"):
        table.add_column(heading, justify="right")
    for row, meter in zip(rows, meters, strict=True):
        size = f"{(row.weights + row.cache) / _MIB:.1f}"
        prompt = _rate(meter.prompt_tokens, meter.prompt_seconds)
        table.add_row(row.device, row.layers, size, prompt, _rate(meter.decode_tokens, meter.decode_seconds))
    Console().print(table)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f}" if tokens and seconds > 0 else "-"
