"""Figures of a process for Prometheus: plain rows in, the text of /metrics out.

The only import of prometheus_client in the data plane.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

CONTENT_TYPE: str = CONTENT_TYPE_LATEST

Sample = tuple[tuple[str, ...], float]
"""Values of the labels, and the figure."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric; a counter's name gets its `_total` when it is written."""

    name: str
    help: str
    kind: Literal["counter", "gauge"]
    samples: tuple[Sample, ...]
    labels: tuple[str, ...] = ()


def single(name: str, help_: str, kind: Literal["counter", "gauge"], value: float) -> Figure:
    """A figure without labels."""
    return Figure(name, help_, kind, (((), value),))


def exposition(figures: Callable[[], Iterable[Figure]]) -> Callable[[], bytes]:
    """What answers /metrics with the figures of that moment."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(figures))
    return lambda: generate_latest(registry)


class _Figures(Collector):
    """The process's figures as the library wants them."""

    def __init__(self, figures: Callable[[], Iterable[Figure]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All of them, as of now."""
        yield from map(_family, self._figures())


def _family(figure: Figure) -> Metric:
    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    family = kind(figure.name, figure.help, labels=figure.labels)
    for labels, value in figure.samples:
        family.add_metric(labels, value)
    return family
