"""A coordinator's engine assembled in the test itself, over whatever workers are given: tokens in, tokens out."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from drover.coordinator import architectures
from drover.coordinator.architectures.blocks import Span, StepShape
from drover.coordinator.engine import Engine
from drover.coordinator.kv_cache import KvCache
from drover.coordinator.loading import CacheTypes, load
from drover.coordinator.model_file import ModelFile
from drover.coordinator.pipeline import Pipeline
from drover.coordinator.remote import RemoteDevice, connect
from drover.coordinator.scheduler import Scheduler
from drover.coordinator.sequence import Event, FinishEvent, Job, Sampling, TokenEvent

GREEDY = Sampling(temperature=0)
CELLS = 512


@dataclass(slots=True)
class Heard:
    """What a job published."""

    events: list[Event] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)

    def publish(self, event: Event) -> None:
        """Keep an event."""
        self.events.append(event)
        if isinstance(event, FinishEvent):
            self.finished.set()

    @property
    def tokens(self) -> list[int]:
        """The generated tokens so far."""
        return [event.token for event in self.events if isinstance(event, TokenEvent)]

    def wait(self) -> FinishEvent:
        """The end of the job."""
        assert self.finished.wait(60), "the job does not end"
        assert isinstance(self.events[-1], FinishEvent)
        return self.events[-1]


@contextmanager
def engine(
    path: Path,
    endpoints: Sequence[str],
    *,
    cuts: Sequence[int] | None = None,
    batch_size: int = 512,
    slots: int = 1,
    types: CacheTypes = CacheTypes(),  # noqa: B008  it is frozen
) -> Iterator[Engine]:
    """An engine with the model cut before the units `cuts` (evenly by default)."""
    devices = [device for endpoint in endpoints for device in connect(endpoint)]
    with ModelFile(path) as file:
        model = architectures.read(file)
        placement = spans(devices, model.hyper.layers, cuts)
        stages = load(file, model, placement, CELLS, types, lambda *_: None)
        pipeline = Pipeline(model, stages, StepShape(batch_size, CELLS, slots), time.perf_counter)
        built = Engine(
            pipeline,
            Scheduler(batch_size, slots),
            KvCache(CELLS),
            context=CELLS // slots,
            vocabulary=model.hyper.vocabulary,
            rng=np.random.default_rng(0),
            clock=time.perf_counter,
        )
        built.start()
        try:
            yield built
        finally:
            built.stop()


def spans(devices: Sequence[RemoteDevice], layers: int, cuts: Sequence[int] | None) -> list[tuple[RemoteDevice, Span]]:
    """A run of units for each device."""
    inner = [round(i * (layers + 1) / len(devices)) for i in range(1, len(devices))] if cuts is None else cuts
    edges = [0, *inner, layers + 1]
    return [(device, Span(edges[i], edges[i + 1], layers)) for i, device in enumerate(devices)]


def generate(built: Engine, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """The next tokens after a prompt."""
    heard = Heard()
    built.submit(Job(tuple(prompt), count, sampling), heard.publish)
    end = heard.wait()
    assert end.error is None, end.error
    return heard.tokens
