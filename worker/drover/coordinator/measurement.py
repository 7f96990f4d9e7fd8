"""What a stage's device and its connection can do, measured over the protocol, for `prediction`.

All of it runs as a step does: graphs that the worker keeps, computed again by their uid. They use the weights that lie
there and one buffer of their own, which is given back.
"""

import statistics
from collections.abc import Callable, Iterable
from itertools import count

import numpy as np

from drover.coordinator import arena
from drover.coordinator.architectures.blocks import Model, StepShape
from drover.coordinator.arena import Placement
from drover.coordinator.graph import Graph
from drover.coordinator.loading import LoadedStage
from drover.coordinator.prediction import Pace, Work, attentions, matrices, work_of
from drover.coordinator.remote import RemoteBuffer, RemoteDevice
from drover.ggml.tensor import Tensor, contiguous_strides, shape
from drover.ggml.types import F32, I8
from drover.rpc import codec
from drover.rpc.messages import GraphCompute

FIRST_UID = 1 << 32
"""Far from those of the pipeline, whose graphs lie on the same connection."""
MOST_RUNS = 32
RUN_SECONDS = 0.01
"""A graph is computed as often as fits before it is waited for: a short one is less than a round trip varies by."""
REPEATS = 7
ENOUGH_SECONDS = 0.5
"""No repetition is begun after so long: a large stage is measured by fewer."""
OPERATIONS = 32
WIDTH = 1024

Clock = Callable[[], float]
Built = tuple[Graph, Tensor]


def measure(model: Model, stages: Iterable[LoadedStage], cells: int, clock: Clock) -> list[tuple[Work, Pace]]:
    """For each stage what one token asks of it and what it can do; DeviceError if a device has no room for a graph."""
    found = []
    for stage in stages:
        step = Graph()
        output = model.build(step, model, stage.span, StepShape(1, cells, 1), stage.weights, stage.caches)
        work = work_of(step, output)
        found.append((work, _pace(stage.device, step, work, clock)))
    return found


def _pace(device: RemoteDevice, step: Graph, work: Work, clock: Clock) -> Pace:
    weights = matrices(step)
    built = [_operations(1), _operations(1 + OPERATIONS), _attentions(step), *map(_products, weights.values())]
    placed = [arena.place(*graph, device.alignment, device.reserved_bytes) for graph in built]
    room = max(work.sent, work.fetched, *(placement.size for placement in placed))
    buffer = device.allocate(room + device.alignment, "measuring")
    try:
        bench = _Bench(device, buffer, clock)
        one, many, attention, *products = map(bench.seconds, built, placed)
        sizes = (sum(matrix.nbytes for matrix in found) for found in weights.values())
        return Pace(
            weights={
                type_: max(0.0, taken - one) / size for type_, taken, size in zip(weights, products, sizes, strict=True)
            },
            cache=max(0.0, attention - one) / work.cache if work.cache else 0.0,
            operation=max(0.0, many - one) / OPERATIONS,
            exchange=bench.exchange(built[0], placed[0], work),
        )
    finally:
        device.free_buffer(buffer.handle)


def _operations(number: int) -> Built:
    """A chain of small operations, each on the result of the one before."""
    graph = Graph()
    given = graph.input("given", F32, WIDTH)
    x = given
    for index in range(number):
        x = graph.add(x, given) if index % 2 else graph.rms_norm(x, 1e-5)
    return graph, x


def _products(weights: Iterable[Tensor]) -> Built:
    """Every one of these matrices times one column."""
    graph = Graph()
    for weight in weights:
        product = graph.mul_mat(graph.leaf(weight), graph.input(f"column {weight.ne[0]}", F32, weight.ne[0]))
    return graph, product


def _attentions(step: Graph) -> Built:
    """Every attention of a step over its cells of the KV cache, with queries of our own; one small operation first."""
    graph, last = _operations(1)
    for node in attentions(step):
        q, k, v, mask = (step.tensor(source) for source in node.src)
        keys, values = (_view(graph, step, half) for half in (k, v))
        query, seen = graph.input("query", F32, *q.ne), graph.input("mask", mask.type, *mask.ne)
        last = graph.flash_attn_ext(query, keys, values, seen, 1.0)
    return graph, last


def _view(graph: Graph, step: Graph, half: Tensor) -> Tensor:
    root = graph.leaf(step.tensor(half.view_src or half.id))
    return graph.view(root, half.ne, half.nb, half.view_offs)


class _Bench:
    """Graphs on one buffer of a device, timed."""

    def __init__(self, device: RemoteDevice, buffer: RemoteBuffer, clock: Clock) -> None:
        self._device = device
        self._buffer = buffer
        self._base = arena.align(buffer.base, device.alignment)
        self._clock = clock
        self._uids = count(FIRST_UID)
        self._round_trip = self._median(self._ask)

    def seconds(self, built: Built, placement: Placement) -> float:
        """How long the worker takes to compute a graph."""
        message = self._message(built, placement)

        def run(times: int) -> float:
            started = self._clock()
            for _ in range(times):
                self._device.compute(message)
            self._wait()
            return max(0.0, self._clock() - started - self._round_trip) / times

        run(1)
        times = min(MOST_RUNS, 1 + int(RUN_SECONDS / max(run(1), 1e-9)))
        return self._median(lambda: run(times))

    def exchange(self, built: Built, placement: Placement, work: Work) -> float:
        """How long a step takes that sends and fetches what `work` does, and computes a small graph."""
        message = self._message(built, placement)
        sent, fetched = memoryview(bytes(work.sent)), memoryview(bytearray(work.fetched))

        def run() -> float:
            started = self._clock()
            self._device.set_tensor(self._block(work.sent), sent)
            self._device.compute(message)
            self._device.get_tensor(self._block(work.fetched), fetched)
            return self._clock() - started

        run()
        return self._median(run)

    def _ask(self) -> float:
        """A round trip."""
        started = self._clock()
        self._wait()
        return self._clock() - started

    def _wait(self) -> None:
        """Until all that was sent is done: no other answer promises that of computing."""
        self._device.get_tensor(self._block(1), memoryview(bytearray(1)))

    def _message(self, built: Built, placement: Placement) -> GraphCompute:
        """The graph with addresses, encoded; its inputs are ones."""
        graph, _ = built
        arena.bind(graph, placement, self._buffer.handle, self._base)
        graph.count_uses()
        ones = np.ones(placement.input_bytes // F32.type_size, np.float32)
        self._device.set_tensor(self._block(placement.input_bytes), ones.data.cast("B"))
        nodes = [tensor.id for tensor in graph.nodes]
        return codec.encode_graph(self._device.index, next(self._uids), nodes, graph.tensors)

    def _block(self, size: int) -> Tensor:
        ne = shape(size)
        return Tensor(id=1, ne=ne, nb=contiguous_strides(I8, ne), type=I8, buffer=self._buffer.handle, data=self._base)

    def _median(self, take: Callable[[], float]) -> float:
        """The middle one of several times taken."""
        begun, times = self._clock(), [take()]
        while len(times) < REPEATS and self._clock() - begun < ENOUGH_SECONDS:
            times.append(take())
        return statistics.median(times)
