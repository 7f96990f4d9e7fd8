"""One batch through every stage: build or reuse its graph, send inputs, compute, fetch what the next stage needs.

One round trip a stage and step: everything but the final read is pipelined, and a prompt piece that wants no logits is
not waited for on the last stage. A graph is built once per shape and repeated by its uid.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from drover.coordinator import arena
from drover.coordinator.architectures.blocks import Caches, Model, Span, StepShape, Weights
from drover.coordinator.graph import Graph
from drover.coordinator.kv_cache import KvCache
from drover.coordinator.loading import LoadedStage
from drover.coordinator.remote import RemoteBuffer
from drover.coordinator.sequence import Batch
from drover.ggml.tensor import Tensor, contiguous_strides, shape
from drover.ggml.types import F32, I8
from drover.rpc import codec
from drover.rpc.messages import GraphCompute

KEPT_GRAPHS = 64

_ANY_ALIGNMENT = 256

Arrays = Mapping[str, NDArray[np.generic]]
Rows = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class Meter:
    """What a stage has done: seconds from sending its inputs to having its answer, and tokens, by phase."""

    prompt_seconds: float = 0.0
    prompt_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    def add(self, seconds: float, tokens: int, decoding: bool) -> None:
        """Count one step."""
        if decoding:
            self.decode_seconds += seconds
            self.decode_tokens += tokens
        else:
            self.prompt_seconds += seconds
            self.prompt_tokens += tokens


class Pipeline:
    """The stages of a model, in order; compute memory for the largest step is reserved at once."""

    def __init__(
        self, model: Model, stages: Sequence[LoadedStage], largest: StepShape, clock: Callable[[], float]
    ) -> None:
        uids = count(1)
        self._runners = [_StageRunner(model, stage, uids) for stage in stages]
        self._clock = clock
        self.meters = [Meter() for _ in stages]
        for runner in self._runners:
            runner.prepare(largest)

    def run(self, batch: Batch, cache: KvCache) -> Rows:
        """Logits [parts that want them, vocabulary], in the order of the parts; WorkerError if a worker is gone."""
        arrays = gather(batch, cache)
        outputs = sum(part.wants_logits for part in batch.parts)
        shape_ = StepShape(batch.size, arrays["mask"].shape[1], len(arrays["outputs"]))
        rows = np.empty((0, 0), np.float32)
        for runner, meter in zip(self._runners, self.meters, strict=True):
            started = self._clock()
            prepared = runner.start(shape_, arrays)
            if runner is not self._runners[-1] or outputs:
                rows = runner.fetch(prepared)
                arrays["hidden"] = rows
            meter.add(self._clock() - started, batch.size, decoding=batch.size == len(batch.parts))
        return rows[:outputs]

    def close(self) -> None:
        """End the connections to all workers; a step in progress fails."""
        for runner in self._runners:
            runner.stage.device.close()


def gather(batch: Batch, cache: KvCache) -> dict[str, NDArray[np.generic]]:
    """The inputs of a batch; its tokens get cells. If no part wants logits, the last row stands in for them."""
    cells = [cache.take(part.sequence.id, part.positions) for part in batch.parts]
    attended = cache.attended
    masks = [cache.mask(part.sequence.id, part.positions, attended) for part in batch.parts]
    ends = np.cumsum([part.count for part in batch.parts])
    wanted = [int(end) - 1 for part, end in zip(batch.parts, ends, strict=True) if part.wants_logits]
    return {
        "tokens": np.array([token for part in batch.parts for token in part.tokens], np.int32),
        "positions": np.array([position for part in batch.parts for position in part.positions], np.int32),
        "cells": np.concatenate(cells),
        "mask": np.concatenate(masks),
        "outputs": np.array(wanted or [batch.size - 1], np.int32),
    }


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A graph with addresses, encoded; `block` is the worker's memory for all inputs."""

    message: GraphCompute
    inputs: dict[str, Tensor]
    offsets: dict[str, int]
    block: Tensor
    output: Tensor

    def pack(self, arrays: Arrays, packed: Bytes) -> memoryview:
        """The bytes of the inputs as the graph wants them, laid out at the start of `packed`."""
        for name, tensor in self.inputs.items():
            raw = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
            assert len(raw) == tensor.nbytes, name
            packed[self.offsets[name] : self.offsets[name] + len(raw)] = raw
        return packed.data[: self.block.nbytes]


class _StageRunner:
    """One stage, its compute buffer, and the graphs made for it, the most recently used last."""

    def __init__(self, model: Model, stage: LoadedStage, uids: Iterator[int]) -> None:
        self.stage = stage
        self._model = model
        self._uids = uids
        self._buffer: RemoteBuffer | None = None
        self._graphs: OrderedDict[StepShape, _Prepared] = OrderedDict()
        self._packed: Bytes = np.zeros(0, np.uint8)

    def start(self, shape_: StepShape, arrays: Arrays) -> _Prepared:
        """Send the inputs and have the graph computed, without waiting."""
        prepared = self.prepare(shape_)
        if len(self._packed) < prepared.block.nbytes:
            self._packed = np.zeros(prepared.block.nbytes, np.uint8)
        self.stage.device.set_tensor(prepared.block, prepared.pack(arrays, self._packed))
        self.stage.device.compute(prepared.message)
        return prepared

    def fetch(self, prepared: _Prepared) -> Rows:
        """Wait for the result: [rows, width or vocabulary]."""
        rows = np.empty((prepared.output.ne[1], prepared.output.ne[0]), np.float32)
        self.stage.device.get_tensor(prepared.output, rows.data.cast("B"))
        return rows

    def prepare(self, shape_: StepShape) -> _Prepared:
        """The graph for a shape, made if it is not among those kept."""
        if shape_ not in self._graphs:
            prepared = self._make(shape_)
            if len(self._graphs) >= KEPT_GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[shape_] = prepared
        self._graphs.move_to_end(shape_)
        return self._graphs[shape_]

    def _make(self, shape_: StepShape) -> _Prepared:
        stage, device = self.stage, self.stage.device
        graph = Graph()
        output = self._model.build(graph, self._model, stage.span, shape_, stage.weights, stage.caches)
        graph.count_uses()
        placed = arena.place(graph, output, device.alignment, device.reserved_bytes)
        buffer = self._room(placed.size + device.alignment)
        base = arena.align(buffer.base, device.alignment)
        arena.bind(graph, placed, buffer.handle, base)
        ne = shape(placed.input_bytes)
        block = Tensor(
            id=1, ne=ne, nb=contiguous_strides(I8, ne), type=I8, buffer=buffer.handle, data=base, name="inputs"
        )
        nodes = [tensor.id for tensor in graph.nodes]
        return _Prepared(
            message=codec.encode_graph(device.index, next(self._uids), nodes, graph.tensors),
            inputs=graph.inputs,
            offsets={name: placed.offsets[tensor.id] for name, tensor in graph.inputs.items()},
            block=block,
            output=output,
        )

    def _room(self, size: int) -> RemoteBuffer:
        """The compute buffer; a larger one makes graphs on the old one useless."""
        if self._buffer is None or self._buffer.size < size:
            if self._buffer is not None:
                self._graphs.clear()
                self.stage.device.free_buffer(self._buffer.handle)
                self._buffer = None
            self._buffer = self.stage.device.allocate(size, "computing")
        return self._buffer


def compute_bytes(model: Model, weights: Weights, caches: Caches, largest: StepShape) -> int:
    """Compute memory that no stage of the model exceeds: that of the whole model as one stage, and its input."""
    graph = Graph()
    span = Span(0, model.hyper.layers + 1, model.hyper.layers)
    output = model.build(graph, model, span, largest, weights, caches)
    hidden = largest.tokens * model.hyper.width * F32.type_size
    return arena.place(graph, output, _ANY_ALIGNMENT).size + hidden
