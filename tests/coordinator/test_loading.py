"""Loading: every weight arrives, in as few buffers as fit, by hash where the worker knows it; failures are clear."""

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from drover.coordinator import architectures, loading
from drover.coordinator.architectures.blocks import Model, Span
from drover.coordinator.loading import CacheTypes, LoadedStage
from drover.coordinator.model_file import ModelFile
from drover.coordinator.remote import RemoteDevice, connect
from drover.errors import DeviceError, WorkerError
from drover.ggml.types import F16, Q8_0
from drover.worker.store import Store
from support import driving, tiny_model
from support.tiny_model import Tiny
from support.worker_thread import worker

CELLS = 256


def load(
    file: ModelFile,
    model: Model,
    devices: Sequence[RemoteDevice],
    types: CacheTypes = CacheTypes(),  # noqa: B008
) -> tuple[list[LoadedStage], dict[str, int]]:
    heard: dict[str, int] = {}
    lock = threading.Lock()

    def progress(name: str, count: int) -> None:
        with lock:
            heard[name] = heard.get(name, 0) + count

    placement = driving.spans(devices, model.hyper.layers, None)
    return loading.load(file, model, placement, CELLS, types, progress), heard


def check(file: ModelFile, stages: Sequence[LoadedStage]) -> None:
    for stage in stages:
        for name, tensor in stage.weights.items():
            into = memoryview(bytearray(tensor.nbytes))
            stage.device.get_tensor(tensor, into)
            assert into == file.data(name), name


def test_every_weight_lies_where_the_plan_says(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny(layers=4, factors=True))
    with worker() as first, worker() as second, ModelFile(tmp_path / "m.gguf") as file:
        model = architectures.read(file)
        devices = [connect(endpoint)[0] for endpoint in (first, second)]
        stages, heard = load(file, model, devices)
        check(file, stages)
        assert set(stages[0].weights) | set(stages[1].weights) == set(file.tensors)
        assert set(stages[0].weights) & set(stages[1].weights) == {"rope_freqs.weight"}
        assert [list(stage.caches) for stage in stages] == [[0, 1], [2, 3]]
        sizes = {stage.device.name: sum(t.nbytes for t in stage.weights.values()) for stage in stages}
        assert heard == sizes
        for device in devices:
            device.close()


def test_a_tied_head_is_on_the_first_and_the_last_stage(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny(layers=2, tied=True))
    with ModelFile(tmp_path / "m.gguf") as file:
        model = architectures.read(file)
    assert "token_embd.weight" in model.weights(Span(0, 1, 2))
    assert "token_embd.weight" not in model.weights(Span(1, 2, 2))
    assert "token_embd.weight" in model.weights(Span(2, 3, 2))
    assert model.weights(Span(0, 3, 2)).count("token_embd.weight") == 1


def test_tensors_are_aligned_and_apart(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny(width=40, heads=1, kv_heads=1, head_width=6))
    with worker() as endpoint, ModelFile(tmp_path / "m.gguf") as file:
        (device,) = connect(endpoint)
        (stage,), _ = load(file, architectures.read(file), [device])
        tensors = [*stage.weights.values(), *(half for pair in stage.caches.values() for half in pair)]
        assert all(tensor.data % device.alignment == 0 for tensor in tensors)
        ranges = sorted((tensor.data, tensor.data + tensor.nbytes) for tensor in tensors)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        device.close()


def test_small_buffers_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny(layers=2))
    with worker() as endpoint, ModelFile(tmp_path / "m.gguf") as file:
        model = architectures.read(file)
        (device,) = connect(endpoint)
        monkeypatch.setattr(device, "get_max_size", lambda: 40_000)
        (stage,), _ = load(file, model, [device])
        check(file, [stage])
        assert len({tensor.buffer for tensor in stage.weights.values()}) > 2
        monkeypatch.setattr(device, "get_max_size", lambda: 10_000)
        with pytest.raises(DeviceError, match=r"buffers of at most 10000 bytes; token_embd\.weight needs"):
            load(file, model, [device])
        device.close()


def test_weights_come_from_the_worker_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny())
    with worker(store=Store(tmp_path / "cache")) as endpoint, ModelFile(tmp_path / "m.gguf") as file:
        model = architectures.read(file)
        sent = []
        for _ in range(2):
            (device,) = connect(endpoint)
            send = device.set_tensor

            def counted(tensor, data, send=send, **rest):  # type: ignore[no-untyped-def]
                sent[-1] += len(data)
                send(tensor, data, **rest)

            sent.append(0)
            monkeypatch.setattr(device, "set_tensor", counted)
            (stage,), heard = load(file, model, [device])
            check(file, [stage])
            total = sum(tensor.nbytes for tensor in stage.weights.values())
            assert heard[endpoint] == total
            assert (stage.uploaded, stage.cached) == ((0, total) if len(sent) == 2 else (total, 0))
            assert stage.reserved >= total
            device.close()
    assert sent[0] > sent[1] == 0


def test_caches_begin_as_zeros_of_their_type(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny(head_width=32))
    with worker() as endpoint, ModelFile(tmp_path / "m.gguf") as file:
        (device,) = connect(endpoint)
        (stage,), _ = load(file, architectures.read(file), [device], CacheTypes(Q8_0, F16))
        k, v = stage.caches[0]
        assert (k.type, k.ne, v.type, v.ne) == (Q8_0, (64, CELLS, 1, 1), F16, (64, CELLS, 1, 1))
        for half in (k, v):
            into = memoryview(bytearray(b"\1" * half.nbytes))
            device.get_tensor(half, into)
            assert not any(into)
        device.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_worker_without_enough_memory(failing: int, tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny())
    limits = [64 << 20, 64 << 20]
    limits[failing] = 10_000
    with (
        worker(limit=limits[0]) as first,
        worker(limit=limits[1]) as second,
        ModelFile(tmp_path / "m.gguf") as file,
    ):
        devices = [connect(endpoint)[0] for endpoint in (first, second)]
        with pytest.raises(DeviceError, match=rf"worker {(first, second)[failing]} cannot reserve .* for weights"):
            load(file, architectures.read(file), devices)
        for device in devices:
            device.close()


def test_a_worker_that_dies_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model.write(tmp_path / "m.gguf", Tiny())
    with worker() as first, ModelFile(tmp_path / "m.gguf") as file:
        devices = [connect(first)[0]]
        with worker() as second:
            devices += connect(second)
        with pytest.raises(WorkerError, match=rf"worker {second} .*start it again"):
            load(file, architectures.read(file), devices)
        for device in devices:
            device.close()
