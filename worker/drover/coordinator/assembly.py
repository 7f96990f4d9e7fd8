"""Where the parts meet: Config -> a running coordinator. Nothing else in this package knows all of them.

What was opened is closed in reverse order when the context ends, whatever happens.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import structlog

from drover import plan
from drover.coordinator import architectures, fingerprint, local_devices
from drover.coordinator.architectures.blocks import Model, Span, StepShape
from drover.coordinator.chat import ChatTemplate
from drover.coordinator.display import LoadingDisplay, StageRow
from drover.coordinator.engine import Engine
from drover.coordinator.kv_cache import KvCache, round_up
from drover.coordinator.lifecycle import Lifecycle
from drover.coordinator.loading import CacheTypes, LoadedStage, cache_bytes, cache_of, load, weight_of
from drover.coordinator.model_file import ModelFile
from drover.coordinator.pipeline import Pipeline, compute_bytes
from drover.coordinator.remote import RemoteDevice, connect
from drover.coordinator.running import Running
from drover.coordinator.scheduler import Scheduler
from drover.coordinator.settings import CACHE_TYPES, DEFAULT_CONTEXT, Config
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import ModelError, RequestError, WorkerError
from drover.ggml.types import BY_NAME
from drover.reports import ModelFacts

PROGRESS_SECONDS = 10.0
ENGINE_SECONDS = 2.0
"""How long a step that nobody waits for may delay the end."""

log = structlog.get_logger()


@contextmanager
def assemble(config: Config, lifecycle: Lifecycle) -> Iterator[Running]:
    """Open the model, reach the workers, load them and start the engine; ends all of it with the context."""
    with ExitStack() as stack:
        file = stack.enter_context(ModelFile(config.model))
        if config.fingerprint is not None:
            fingerprint.check(file, config.fingerprint)
        needs = _Needs(file, config)
        tokenizer = _tokenizer(file, needs.model)
        chat = ChatTemplate.from_model(file, tokenizer)
        devices = _devices(config, stack)
        rooms = [plan.Room(device.name, *device.get_device_memory()) for device in devices]
        layout = needs.split(rooms)
        started = time.perf_counter()
        placement = [(devices[stage.device_index], needs.span(stage)) for stage in layout.stages]
        try:
            stages = _load(needs, placement, lifecycle)
        finally:  # a file that changed explains whatever else is wrong
            file.check_unchanged()
        seconds = time.perf_counter() - started
        rows = [needs.row(stage, devices[stage.device_index], rooms[stage.device_index]) for stage in layout.stages]
        pipeline = Pipeline(needs.model, stages, needs.largest, time.perf_counter)
        engine = Engine(
            pipeline,
            Scheduler(config.batch_size, config.parallel),
            KvCache(needs.cells),
            context=needs.context,
            vocabulary=needs.model.hyper.vocabulary,
            rng=np.random.default_rng(),
            clock=time.perf_counter,
        )
        engine.start()
        stack.callback(engine.stop, ENGINE_SECONDS)
        meters = pipeline.meters
        yield Running(engine, tokenizer, chat, file, needs.facts, devices, rows, stages, meters, seconds, needs.model)


def preview(config: Config, rooms: Sequence[plan.Room]) -> str:
    """The plan for devices of these sizes, as a table; nothing is reached. PlanError if the model does not fit."""
    with ModelFile(config.model) as file:
        needs = _Needs(file, config)
        return plan.table(needs.split(rooms), needs.units, rooms)


class _Needs:
    """What a model as configured takes on its devices."""

    def __init__(self, file: ModelFile, config: Config) -> None:
        self.file = file
        self.model = architectures.read(file)
        self.types = _cache_types(config, self.model)
        self.context = _context(config, self.model)
        self.cells = round_up(self.context) * config.parallel
        self.largest = StepShape(config.batch_size, self.cells, min(config.parallel, config.batch_size))
        self.units = self._units()
        self._shares = config.tensor_split

    def split(self, rooms: Sequence[plan.Room]) -> plan.Plan:
        """Layers over devices; PlanError if they do not fit."""
        return plan.split(self.units, rooms, self._shares, self._reserve())

    def span(self, stage: plan.Stage) -> Span:
        """The units of a planned stage."""
        return Span(stage.first, stage.end, self.model.hyper.layers)

    def weight_bytes(self, span: Span) -> int:
        """Bytes of the weights of a stage."""
        return sum(self.file.tensors[name].nbytes for name in self.model.weights(span))

    def row(self, stage: plan.Stage, device: RemoteDevice, room: plan.Room) -> StageRow:
        """A planned stage for people."""
        span = self.span(stage)
        cache = cache_bytes(self.model, self.cells, self.types) * len(span.blocks)
        return StageRow(
            device=stage.device_name,
            worker=device.endpoint,
            index=device.index,
            first=stage.first,
            end=stage.end,
            layers=plan.describe(stage, len(self.units)),
            weights=self.weight_bytes(span),
            cache=cache,
            free=room.free,
        )

    @property
    def facts(self) -> ModelFacts:
        """The model in a report."""
        total = sum(tensor.nbytes for tensor in self.file.tensors.values())
        return ModelFacts(self.file.architecture, self.model.hyper.layers, total)

    def _units(self) -> list[plan.Unit]:
        """Each layer's weights and KV cache, then the head; what goes with the first layer counts there."""
        layers = self.model.hyper.layers
        cache = cache_bytes(self.model, self.cells, self.types)
        tensors = self.file.tensors
        sizes = [sum(tensors[name].nbytes for name in unit) for unit in self.model.units]
        sizes = [size + cache if index < layers else size for index, size in enumerate(sizes)]
        sizes[0] += sum(tensors[name].nbytes for name in (*self.model.entry, *self.model.shared))
        names = [*(f"layer {index}" for index in range(layers)), "output"]
        return [plan.Unit(name, size) for name, size in zip(names, sizes, strict=True)]

    def _reserve(self) -> int:
        """Compute memory to set aside on every device."""
        span = Span(0, len(self.units), self.model.hyper.layers)
        weights = {name: weight_of(self.file.tensors[name]) for name in self.model.weights(span)}
        caches = {layer: cache_of(self.model, layer, self.cells, self.types) for layer in span.blocks}
        halves = [half for pair in caches.values() for half in pair]
        for number, tensor in enumerate([*weights.values(), *halves], 1):
            tensor.buffer, tensor.data = 1, number  # any place of its own will do
        return compute_bytes(self.model, weights, caches, self.largest)


def _devices(config: Config, stack: ExitStack) -> list[RemoteDevice]:
    repeated = {endpoint for endpoint in config.rpc if config.rpc.count(endpoint) > 1}
    if repeated:
        raise WorkerError(f"--rpc names {', '.join(sorted(repeated))} twice; one connection uses all its devices")
    devices = []
    for endpoint in config.rpc:
        reached = connect(endpoint)
        stack.callback(reached[0].close)
        devices += reached
    local = config.local or (() if config.rpc else ("cpu",))
    if local:
        devices += stack.enter_context(local_devices.opened(local, config.threads, config.verbose))
    return devices


def _tokenizer(file: ModelFile, model: Model) -> Tokenizer:
    tokenizer = Tokenizer.from_model(file)
    if tokenizer.size > model.hyper.vocabulary:
        raise ModelError(
            f"{file.path}: its vocabulary has {tokenizer.size} tokens, its embedding {model.hyper.vocabulary} rows"
        )
    return tokenizer


def _context(config: Config, model: Model) -> int:
    if config.context is None:
        return min(model.hyper.context, DEFAULT_CONTEXT)
    if config.context > model.hyper.context:
        log.warning("context is longer than the model was made for", asked=config.context, model=model.hyper.context)
    return config.context


def _cache_types(config: Config, model: Model) -> CacheTypes:
    for name in (config.cache_type_k, config.cache_type_v):
        if name.lower() not in CACHE_TYPES:
            raise RequestError(f"KV cache type {name!r} is unknown; choose one of {', '.join(CACHE_TYPES)}")
    types = CacheTypes(BY_NAME[config.cache_type_k.upper()], BY_NAME[config.cache_type_v.upper()])
    for type_, width in ((types.k, model.hyper.key_width), (types.v, model.hyper.value_width)):
        if width % type_.block_size:
            raise RequestError(
                f"a KV cache of type {type_.name} stores {type_.block_size} elements at a time, and the heads of this "
                f"model have {width}; use --cache-type-k f16 --cache-type-v f16"
            )
    return types


def _load(needs: _Needs, placement: Sequence[tuple[RemoteDevice, Span]], lifecycle: Lifecycle) -> list[LoadedStage]:
    totals = {device.name: needs.weight_bytes(span) for device, span in placement}
    started = time.perf_counter()
    lifecycle.begin_loading(totals)
    with LoadingDisplay(totals) as display:
        told = started

        def progress(device: str, count: int) -> None:
            nonlocal told
            display.advance(device, count)
            lifecycle.advance(device, count)
            if time.perf_counter() - told >= PROGRESS_SECONDS:
                told = time.perf_counter()
                done, total = (sum(column) for column in zip(*lifecycle.progress.values(), strict=True))
                log.info("loading", bytes=done, total=total, seconds=round(told - started))

        stages = load(needs.file, needs.model, placement, needs.cells, needs.types, progress)
    seconds = round(time.perf_counter() - started, 3)
    uploaded, cached = (sum(getattr(stage, word) for stage in stages) for word in ("uploaded", "cached"))
    log.info("loaded", model=os.fspath(needs.file.path), uploaded=uploaded, cached=cached, seconds=seconds)
    return stages
