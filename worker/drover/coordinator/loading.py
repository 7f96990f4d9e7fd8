"""Model file and plan -> weights and KV caches on the workers: hash first, bytes only on a miss.

One thread per worker, since a connection is sequential. The tensors of a stage share one buffer where the worker's
largest buffer allows it (docs/protocol.md sections 2.2 and 4.1).
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from drover.coordinator.architectures.blocks import Model, Span
from drover.coordinator.arena import align
from drover.coordinator.model_file import ModelFile
from drover.coordinator.model_index import TensorInfo
from drover.coordinator.remote import RemoteBuffer, RemoteDevice, needs_padding
from drover.errors import DeviceError, WorkerError
from drover.ggml.tensor import Tensor, contiguous_strides, shape
from drover.ggml.types import F16, TensorType
from drover.hashing import fnv1a

Progress = Callable[[str, int], None]
"""Hears, from any thread, the name of a device and how many more bytes of weights are in place there."""


@dataclass(frozen=True, slots=True)
class CacheTypes:
    """How the KV cache is stored."""

    k: TensorType = F16
    v: TensorType = F16


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage in place: its weights by name, and K and V of each of its layers.

    Bytes: `reserved` for both on the worker; of the weights, `uploaded` were sent, `cached` it had in its cache.
    """

    device: RemoteDevice
    span: Span
    weights: dict[str, Tensor]
    caches: dict[int, tuple[Tensor, Tensor]]
    reserved: int
    uploaded: int
    cached: int


def load(
    file: ModelFile,
    model: Model,
    placement: Sequence[tuple[RemoteDevice, Span]],
    cells: int,
    types: CacheTypes,
    progress: Progress,
) -> list[LoadedStage]:
    """Fill every worker, several at a time; WorkerError or DeviceError for the first one that fails."""
    stop = threading.Event()
    by_worker: dict[str, list[int]] = {}
    for index, (device, _) in enumerate(placement):
        by_worker.setdefault(device.endpoint, []).append(index)
    stages: dict[int, LoadedStage] = {}

    def fill(indices: list[int]) -> None:
        try:
            for index in indices:
                device, span = placement[index]
                stages[index] = _load_stage(file, model, device, span, cells, types, progress, stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(by_worker), "load") as threads:
        jobs = [threads.submit(fill, indices) for indices in by_worker.values()]
    failures = [error for job in jobs if (error := job.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, _StoppedError)):
        raise error
    return [stages[index] for index in range(len(placement))]


def cache_bytes(model: Model, cells: int, types: CacheTypes) -> int:
    """Bytes of K and V of one layer."""
    dims = model.hyper.dims
    return cells * (types.k.row_bytes(dims["k"]) + types.v.row_bytes(dims["v"]))


def weight_of(info: TensorInfo) -> Tensor:
    """A tensor of a file, without a place."""
    return Tensor(id=1, ne=info.ne, nb=contiguous_strides(info.type, info.ne), type=info.type, name=info.name)


def cache_of(model: Model, layer: int, cells: int, types: CacheTypes) -> tuple[Tensor, Tensor]:
    """K and V of a layer, without a place: one row of all heads a cell."""
    dims = model.hyper.dims
    return _cache("k", layer, dims["k"], cells, types.k), _cache("v", layer, dims["v"], cells, types.v)


def reserve(device: RemoteDevice, tensors: Iterable[Tensor], purpose: str) -> list[RemoteBuffer]:
    """Give tensors a place in as few buffers as the device allows."""
    limit = device.get_max_size()
    chunks: list[list[tuple[Tensor, int]]] = [[]]
    end = 0
    for tensor in tensors:
        size = align(device.reserved_bytes(tensor), device.alignment)
        if size + device.alignment > limit:
            raise DeviceError(
                f"worker {device.name} takes buffers of at most {limit} bytes; {tensor.name} needs {size}"
            )
        if end + size + device.alignment > limit:
            chunks.append([])
            end = 0
        chunks[-1].append((tensor, end))
        end += size
    return [_allocate(device, chunk, purpose) for chunk in chunks if chunk]


class _StoppedError(WorkerError):
    """Loading ends because another worker failed."""


def _load_stage(
    file: ModelFile,
    model: Model,
    device: RemoteDevice,
    span: Span,
    cells: int,
    types: CacheTypes,
    progress: Progress,
    stop: threading.Event,
) -> LoadedStage:
    weights = {name: weight_of(file.tensors[name]) for name in model.weights(span)}
    caches = {layer: cache_of(model, layer, cells, types) for layer in span.blocks}
    buffers = reserve(device, weights.values(), "weights")
    cache_buffers = reserve(device, (half for pair in caches.values() for half in pair), "the KV cache")
    for buffer in cache_buffers:
        device.buffer_clear(buffer.handle)
    cached = 0
    for name, tensor in weights.items():
        if stop.is_set():
            raise _StoppedError("loading was stopped")
        cached += _send(device, tensor, file.data(name), progress)
    device.get_device_memory()  # answered once all of the above is in place
    uploaded = sum(tensor.nbytes for tensor in weights.values()) - cached
    reserved = sum(buffer.size for buffer in (*buffers, *cache_buffers))
    return LoadedStage(device, span, weights, caches, reserved, uploaded, cached)


def _send(device: RemoteDevice, tensor: Tensor, data: memoryview, progress: Progress) -> int:
    """Fill a tensor; the bytes that the worker had in its cache."""
    if needs_padding(tensor):
        device.init_tensor(tensor)
    if device.set_tensor_hash(tensor, fnv1a(data)):
        progress(device.name, len(data))
        return len(data)
    device.set_tensor(tensor, data, cache=True, sent=lambda count: progress(device.name, count))
    return 0


def _allocate(device: RemoteDevice, chunk: list[tuple[Tensor, int]], purpose: str) -> RemoteBuffer:
    last, offset = chunk[-1]
    size = offset + align(device.reserved_bytes(last), device.alignment)
    buffer = device.allocate(size + device.alignment, purpose)
    start = align(buffer.base, device.alignment)
    for tensor, offset in chunk:
        tensor.buffer, tensor.data = buffer.handle, start + offset
    return buffer


def _cache(half: str, layer: int, row: int, cells: int, type_: TensorType) -> Tensor:
    ne = shape(row, cells)
    return Tensor(id=1, ne=ne, nb=contiguous_strides(type_, ne), type=type_, name=f"cache_{half}_l{layer}")
