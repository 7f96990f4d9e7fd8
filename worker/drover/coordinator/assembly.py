"""Where the parts meet: Config -> a running coordinator. Nothing else in this package knows all of them.

What was opened is closed in reverse order when the context ends, whatever happens.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import structlog

from drover import plan
from drover.coordinator import fingerprint, local_devices
from drover.coordinator.architectures.blocks import Model, Span
from drover.coordinator.chat import ChatTemplate
from drover.coordinator.display import LoadingDisplay, StageRow
from drover.coordinator.engine import Engine
from drover.coordinator.kv_cache import KvCache
from drover.coordinator.lifecycle import Lifecycle
from drover.coordinator.loading import LoadedStage, load
from drover.coordinator.model_file import ModelFile
from drover.coordinator.needs import Needs
from drover.coordinator.pipeline import Pipeline
from drover.coordinator.remote import RemoteDevice, connect
from drover.coordinator.running import Running
from drover.coordinator.scheduler import Scheduler
from drover.coordinator.settings import Config
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import ModelError, WorkerError

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
        needs = Needs(file, config)
        tokenizer = _tokenizer(file, needs.model)
        chat = ChatTemplate.from_model(file, tokenizer)
        devices = _devices(config, stack)
        rooms = [plan.Room(device.name, *device.get_device_memory()) for device in devices]
        layout = needs.split(rooms)
        started = time.perf_counter()
        placement = [(devices[stage.device_index], needs.span(stage)) for stage in layout.stages]
        try:
            stages = _load(file, needs, placement, lifecycle)
        finally:  # a file that changed explains whatever else is wrong
            file.check_unchanged()
        seconds = time.perf_counter() - started
        rows = [_row(needs, stage, devices[stage.device_index], rooms[stage.device_index]) for stage in layout.stages]
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
        needs = Needs(file, config)
        return plan.table(needs.split(rooms), needs.units, rooms)


def _row(needs: Needs, stage: plan.Stage, device: RemoteDevice, room: plan.Room) -> StageRow:
    """A planned stage for people."""
    span = needs.span(stage)
    return StageRow(
        device=stage.device_name,
        worker=device.endpoint,
        index=device.index,
        first=stage.first,
        end=stage.end,
        layers=plan.describe(stage, len(needs.units)),
        weights=needs.weight_bytes(span),
        cache=needs.cache_bytes(span),
        free=room.free,
    )


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


def _load(
    file: ModelFile, needs: Needs, placement: Sequence[tuple[RemoteDevice, Span]], lifecycle: Lifecycle
) -> list[LoadedStage]:
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

        stages = load(file, needs.model, placement, needs.cells, needs.types, progress)
    seconds = round(time.perf_counter() - started, 3)
    uploaded, cached = (sum(getattr(stage, word) for stage in stages) for word in ("uploaded", "cached"))
    log.info("loaded", model=str(file.path), uploaded=uploaded, cached=cached, seconds=seconds)
    return stages
