"""The proof that a loaded model lies as planned and computes: bytes read back, one known prompt through every stage.

It looks from outside: what the workers hold is asked of the workers, and compared with the plan and the file.
"""

from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue

import structlog

from drover.coordinator import measurement, prediction
from drover.coordinator.display import StageRow
from drover.coordinator.kv_cache import round_up
from drover.coordinator.loading import LoadedStage
from drover.coordinator.model_file import ModelFile
from drover.coordinator.running import Running
from drover.coordinator.sequence import Event, FinishEvent, Job, Sampling
from drover.errors import DeviceError, RequestError, ResultError, WorkerError
from drover.reports import LoadReport, StageReport
from drover.sizes import format_size

PROMPT = (
    "Several machines lend their memory to one model. Each of them holds a run of layers, and every token passes "
    "through all of them in turn, so that none can be left out without the text showing it. The first machine said:"
)
PROMPT_TOKENS = 64
ANSWER_TOKENS = 32
WARM_UP_TOKENS = 2
READ_BACK = 64
"""Bytes of every weight that are asked back, from its end."""

log = structlog.get_logger()

Layers = tuple[int, int]
"""First and last layer, both included; the output head counts with the last."""


def prove(running: Running, expected: Mapping[str, Layers] | None, clock: Callable[[], float]) -> LoadReport:
    """Check, predict, compute. A fault of the split is in the report; WorkerError and ResultError are raised."""
    before = {(row.worker, row.index): row.free for row in running.rows}
    faults = [*_plan_faults(running, expected), *_held_faults(running)]
    prompt, count = _known_prompt(running)
    predicted = _predicted(running, len(prompt) + count, clock)
    _generate(running, prompt, min(WARM_UP_TOKENS, count))  # programs are compiled, before the clock counts
    end, text = _generate(running, prompt, count)
    measured = _rate(end.completion_tokens - 1, end.decode_seconds)
    faults += _idle_faults(running)
    after = {
        (row.worker, row.index): stage.device.get_device_memory()[0]
        for row, stage in zip(running.rows, running.stages, strict=True)
    }
    return LoadReport(
        ok=not faults,
        reason="SplitMismatch" if faults else "Verified",
        message="; ".join(faults) or _summary(running) + _compared(measured, predicted),
        model=running.model,
        stages=tuple(
            _stage(row, stage, before[row.worker, row.index], after[row.worker, row.index])
            for row, stage in zip(running.rows, running.stages, strict=True)
        ),
        bytes_uploaded=sum(stage.uploaded for stage in running.stages),
        bytes_cached=sum(stage.cached for stage in running.stages),
        load_seconds=round(running.load_seconds, 3),
        prompt_tokens_per_second=_rate(end.prompt_tokens, end.prompt_seconds),
        tokens_per_second=measured,
        predicted_tokens_per_second=predicted,
        text=text,
    )


def _plan_faults(running: Running, expected: Mapping[str, Layers] | None) -> Iterator[str]:
    """Workers without a stage, and stages that are not where they were expected."""
    placed: dict[str, list[StageRow]] = {}
    for row in running.rows:
        placed.setdefault(row.worker, []).append(row)
    for worker in dict.fromkeys(device.endpoint for device in running.devices):
        if worker not in placed:
            yield f"worker {worker} holds nothing of the model"
    if expected is None:
        return
    found = {worker: _layers(rows, running.model.layers) for worker, rows in placed.items()}
    for worker in dict.fromkeys([*expected, *found]):
        wanted, got = expected.get(worker), found.get(worker)
        if wanted != got:
            yield f"worker {worker} holds {_said(got)}, and was to hold {_said(wanted)}"


def _layers(rows: list[StageRow], count: int) -> Layers:
    return min(rows[0].first, count - 1), min(rows[-1].end, count) - 1


def _said(layers: Layers | None) -> str:
    return "no layer" if layers is None else f"layers {layers[0]} to {layers[1]}"


def _held_faults(running: Running) -> Iterator[str]:
    """Stages with fewer bytes than planned, or with others than the file's."""
    for row, stage in zip(running.rows, running.stages, strict=True):
        weights = sum(tensor.nbytes for tensor in stage.weights.values())
        caches = sum(half.nbytes for pair in stage.caches.values() for half in pair)
        planned = row.weights + row.cache
        if (weights, caches) != (row.weights, row.cache) or stage.reserved < planned:
            yield (
                f"worker {row.device} has {format_size(weights + caches)} in {format_size(stage.reserved)} of buffers "
                f"for layers {row.layers}, planned were {format_size(planned)}"
            )
        wrong = [name for name in stage.weights if not _intact(running.file, stage, name)]
        if wrong:
            yield f"worker {row.device} gives back other bytes than it was sent for {len(wrong)} weights: {wrong[0]}"


def _intact(file: ModelFile, stage: LoadedStage, name: str) -> bool:
    data = file.data(name)
    start = max(0, len(data) - READ_BACK)
    returned = memoryview(bytearray(len(data) - start))
    stage.device.get_tensor(stage.weights[name], returned, start)
    return returned == data[start:]


def _known_prompt(running: Running) -> tuple[list[int], int]:
    """Its tokens, and how many are to follow: as much of either as the context has room for."""
    context = running.engine.context
    prompt = running.tokenizer.encode(PROMPT)[: max(1, min(PROMPT_TOKENS, context // 2))]
    return prompt, min(ANSWER_TOKENS, context - len(prompt))


def _predicted(running: Running, tokens: int, clock: Callable[[], float]) -> float | None:
    """Tokens a second that the workers ought to reach; None if a device has no memory left to be measured in."""
    try:
        found = measurement.measure(running.decoder, running.stages, round_up(tokens), clock)
    except DeviceError as error:
        log.warning("speed is not predicted", why=str(error))
        return None
    rate = prediction.tokens_per_second(found)
    return None if rate is None else round(rate, 2)


def _generate(running: Running, prompt: list[int], count: int) -> tuple[FinishEvent, str]:
    """Exactly `count` greedy tokens, whatever they are; the text stops where the model would have ended it."""
    events: SimpleQueue[Event] = SimpleQueue()
    running.engine.submit(Job(tuple(prompt), count, Sampling(temperature=0)), events.put)
    decoder, parts, ended = running.tokenizer.stream(), [], False
    while not isinstance(event := events.get(), FinishEvent):
        ended = ended or event.token in running.tokenizer.end_of_generation
        if not ended:
            parts.append(decoder.push(event.token))
    if event.error is not None:
        raise ResultError(event.error) if running.engine.failure is None else WorkerError(event.error)
    return event, "".join(parts) + decoder.flush()


def _idle_faults(running: Running) -> Iterator[str]:
    for row, meter in zip(running.rows, running.meters, strict=True):
        if not meter.prompt_tokens or not meter.decode_tokens:
            yield f"worker {row.device} computed nothing of the known prompt"


def _stage(row: StageRow, stage: LoadedStage, before: int, after: int) -> StageReport:
    sent, received = stage.device.traffic
    return StageReport(
        worker=row.worker,
        device=row.index,
        layers=row.layers,
        bytes=row.weights + row.cache,
        memory_before=before,
        memory_after=after,
        wire_sent=sent,
        wire_received=received,
    )


def _summary(running: Running) -> str:
    total = sum(row.weights + row.cache for row in running.rows)
    count = len(running.rows)
    return (
        f"{running.model.layers} layers, {format_size(total)}, on {count} device{'s' if count > 1 else ''} as planned"
    )


def _compared(measured: float | None, predicted: float | None) -> str:
    if measured is None or predicted is None:
        return ""
    return f"; {measured:g} tokens/s, {predicted:g} predicted"


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if tokens > 0 and seconds > 0 else None


def check_expected(data: object) -> dict[str, Layers]:
    """A plan as JSON has it, {worker: [first, last]}; RequestError if it is none."""
    if isinstance(data, dict) and all(_is_pair(pair) for pair in data.values()):
        return {str(worker): (pair[0], pair[1]) for worker, pair in data.items()}
    raise RequestError('--expect: write {"host:port": [first layer, last layer], …}')


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
