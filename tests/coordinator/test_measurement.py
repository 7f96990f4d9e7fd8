"""Measurement: what is timed on a worker, and that nothing of it stays there."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover.coordinator import architectures, measurement
from drover.coordinator.architectures.blocks import Model
from drover.coordinator.loading import CacheTypes, LoadedStage, load
from drover.coordinator.model_file import ModelFile
from drover.errors import DeviceError
from drover.ggml.types import F32
from support import driving, tiny_model
from support.tiny_model import Tiny
from support.worker_thread import worker

CELLS = 256


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[tuple[Model, list[LoadedStage]]]:
    tiny_model.write(tmp_path / "m.gguf", Tiny(tied=True))
    with worker() as first, worker() as second, ModelFile(tmp_path / "m.gguf") as file:
        model = architectures.read(file)
        devices = [device for endpoint in (first, second) for device in driving.connect(endpoint)]
        try:
            yield model, load(file, model, driving.spans(devices, 3, None), CELLS, CacheTypes(), lambda *_: None)
        finally:
            for device in devices:
                device.close()


def test_every_stage_has_work_and_a_pace(loaded: tuple[Model, list[LoadedStage]]) -> None:
    model, stages = loaded
    found = measurement.measure(model, stages, CELLS, time.perf_counter)
    tensors = [{name: tensor.nbytes for name, tensor in stage.weights.items()} for stage in stages]
    table = 80 * 64 * 4
    assert found[0][0].weights == {F32: sum(tensors[0].values()) - table + 64 * 4}
    assert found[1][0].weights == {F32: sum(tensors[1].values())}
    assert [work.cache for work, _ in found] == [len(stage.caches) * CELLS * 2 * 32 * 2 for stage in stages]
    assert found[0][0].fetched == 64 * 4
    assert found[1][0].fetched == 80 * 4
    for _, pace in found:
        assert pace.weights[F32] > 0
        assert pace.cache > 0
        assert pace.exchange > 0
        assert pace.operation >= 0


def test_the_weights_and_the_memory_of_the_workers_stay_as_they_were(loaded: tuple[Model, list[LoadedStage]]) -> None:
    model, stages = loaded
    free = [stage.device.get_device_memory() for stage in stages]
    held = [contents(stage) for stage in stages]
    for _ in range(2):
        measurement.measure(model, stages, CELLS, time.perf_counter)
    assert [stage.device.get_device_memory() for stage in stages] == free
    assert [contents(stage) for stage in stages] == held


def contents(stage: LoadedStage) -> list[bytes]:
    found = []
    for tensor in [*stage.weights.values(), *(half for pair in stage.caches.values() for half in pair)]:
        data = bytearray(tensor.nbytes)
        stage.device.get_tensor(tensor, memoryview(data))
        found.append(bytes(data))
    return found


def test_a_device_without_room_is_not_measured(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny())
    with worker() as endpoint, ModelFile(tmp_path / "m.gguf") as file:
        model = architectures.read(file)
        (device,) = driving.connect(endpoint)
        stages = load(file, model, driving.spans([device], 3, None), CELLS, CacheTypes(), lambda *_: None)
        device.allocate(device.get_device_memory()[0] - 1024, "all that is left")
        with pytest.raises(DeviceError, match=r"cannot reserve .* for measuring"):
            measurement.measure(model, stages, CELLS, time.perf_counter)
        device.close()
