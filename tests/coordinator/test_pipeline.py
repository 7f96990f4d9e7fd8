"""Pipeline: inputs of a batch, one round trip a stage, graphs kept and reused, and how long each stage took."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from drover.coordinator import architectures, pipeline
from drover.coordinator.architectures.blocks import StepShape
from drover.coordinator.kv_cache import KvCache
from drover.coordinator.loading import CacheTypes, load
from drover.coordinator.model_file import ModelFile
from drover.coordinator.pipeline import Pipeline, gather
from drover.coordinator.sequence import Batch, Job, Part, Sequence
from drover.errors import WorkerError
from drover.rpc.messages import COMMAND_OF, GetTensor
from support import driving, tiny_model
from support.tiny_model import Tiny
from support.worker_thread import worker


def sequence(number: int, tokens: list[int], cached: int = 0) -> Sequence:
    return Sequence(number, Job(tuple(tokens), 10), lambda event: None, tokens=tokens, cached=cached)


def test_inputs_of_a_batch() -> None:
    cache = KvCache(512)
    cache.take(2, range(2))
    batch = Batch(
        (
            Part(sequence(1, [7, 8, 9]), 2, wants_logits=False),
            Part(sequence(2, [1, 2, 3], cached=2), 1, wants_logits=True),
        )
    )
    arrays = gather(batch, cache)
    assert {name: array.tolist() for name, array in arrays.items() if name != "mask"} == {
        "tokens": [7, 8, 3],
        "positions": [0, 1, 2],
        "cells": [2, 3, 4],
        "outputs": [2],
    }
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "tokens": "int32",
        "positions": "int32",
        "cells": "int64",
        "mask": "float16",
        "outputs": "int32",
    }
    seen = [np.flatnonzero(row == 0).tolist() for row in arrays["mask"]]
    assert seen == [[2], [2, 3], [0, 1, 4]]


def test_a_batch_without_logits_names_its_last_row() -> None:
    arrays = gather(Batch((Part(sequence(1, [7, 8, 9]), 2, wants_logits=False),)), KvCache(256))
    assert arrays["outputs"].tolist() == [1]


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Pipeline]:
    tiny_model.write(tmp_path / "m.gguf", Tiny())
    with worker() as first, worker() as second, ModelFile(tmp_path / "m.gguf") as file:
        yield build(file, [first, second])


def build(file: ModelFile, endpoints: list[str]) -> Pipeline:
    ticks = iter(range(10_000))
    model = architectures.read(file)
    devices = [device for endpoint in endpoints for device in driving.connect(endpoint)]
    stages = load(file, model, driving.spans(devices, 3, None), 512, CacheTypes(), lambda *_: None)
    return Pipeline(model, stages, StepShape(32, 512, 1), lambda: float(next(ticks)))


def step(built: Pipeline, cache: KvCache, running: Sequence, count: int, wants: bool = True) -> np.ndarray:  # type: ignore[type-arg]
    rows = built.run(Batch((Part(running, count, wants),)), cache)
    running.cached += count
    return rows


def record(built: Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What goes out from now on, by stage and command."""
    seen: list[tuple[int, str]] = []
    for number, runner in enumerate(built._runners):
        link = runner.stage.device._link
        connection = link._connection
        send = connection.send

        def recorded(request, into=None, number=number, send=send):  # type: ignore[no-untyped-def]
            seen.append((number, COMMAND_OF[type(request)].name))
            return send(request, into)

        monkeypatch.setattr(connection, "send", recorded)
    return seen


def test_one_round_trip_a_stage_and_step(built: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, running = KvCache(512), sequence(1, list(range(20)))
    step(built, cache, running, 9)
    step(built, cache, running, 1)
    seen = record(built, monkeypatch)
    assert step(built, cache, running, 1).shape == (1, 80)
    assert seen == [(i, name) for i in (0, 1) for name in ("SET_TENSOR", "GRAPH_RECOMPUTE", "GET_TENSOR")]
    built.close()


def test_a_prompt_piece_without_logits_does_not_wait_for_the_last_stage(
    built: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, running = KvCache(512), sequence(1, list(range(20)))
    seen = record(built, monkeypatch)
    assert step(built, cache, running, 9, wants=False).shape[0] == 0
    answered = [number for number, name in seen if name == COMMAND_OF[GetTensor].name]
    assert answered == [0]
    built.close()


def test_a_context_that_grows_past_a_bucket_takes_a_new_graph(built: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, running = KvCache(512), sequence(1, [3] * 300)
    for _ in range(8):
        step(built, cache, running, 31)
    seen = record(built, monkeypatch)
    names = []
    for _ in range(10):
        seen.clear()
        step(built, cache, running, 1)
        names.append(next(name for number, name in seen if name.startswith("GRAPH")))
    assert names == ["GRAPH_COMPUTE", *["GRAPH_RECOMPUTE"] * 7, "GRAPH_COMPUTE", "GRAPH_RECOMPUTE"]
    built.close()


def test_old_graphs_are_let_go(built: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "KEPT_GRAPHS", 3)
    cache, running = KvCache(512), sequence(1, [3] * 300)
    for count in (1, 2, 3, 4, 5):
        step(built, cache, running, count)
    assert [shape.tokens for shape in built._runners[0]._graphs] == [3, 4, 5]
    step(built, cache, running, 3)
    assert [shape.tokens for shape in built._runners[0]._graphs] == [4, 5, 3]
    built.close()


def test_a_larger_step_than_reserved_moves_the_compute_buffer(built: Pipeline) -> None:
    cache, running = KvCache(512), sequence(1, list(range(64)) * 3)
    expected = step(built, cache, running, 5)
    before = built._runners[0]._buffer
    step(built, cache, running, 150)
    assert built._runners[0]._buffer != before
    again = sequence(2, list(range(64)) * 3)
    np.testing.assert_array_equal(step(built, cache, again, 5), expected)
    built.close()


def test_meters(built: Pipeline) -> None:
    cache, running = KvCache(512), sequence(1, list(range(20)))
    step(built, cache, running, 9)
    step(built, cache, running, 1)
    step(built, cache, running, 1)
    for meter in built.meters:
        assert (meter.prompt_tokens, meter.prompt_seconds, meter.decode_tokens, meter.decode_seconds) == (9, 1, 2, 2)
    built.close()


def test_compute_memory_is_never_more_than_foreseen(built: Pipeline, tmp_path: Path) -> None:
    with ModelFile(tmp_path / "m.gguf") as file, worker() as endpoint:
        model = architectures.read(file)
        stages = load(
            file, model, driving.spans(driving.connect(endpoint), 3, None), 512, CacheTypes(), lambda *_: None
        )
        foreseen = pipeline.compute_bytes(model, stages[0].weights, stages[0].caches, StepShape(32, 512, 1))
        stages[0].device.close()
    assert all(runner._buffer is not None and runner._buffer.size <= foreseen for runner in built._runners)
    built.close()


def test_a_worker_that_dies_fails_the_step(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny())
    with worker() as first, ModelFile(tmp_path / "m.gguf") as file:
        with worker() as second:
            built = build(file, [first, second])
        with pytest.raises(WorkerError, match=f"worker {second} .*start it again"):
            step(built, KvCache(512), sequence(1, [1, 2, 3]), 3)
        built.close()
