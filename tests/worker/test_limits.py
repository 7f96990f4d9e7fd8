"""What one client may take at most: refused cleanly, nothing to the others, and all given back when it goes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from drover.errors import DeviceError
from drover.ggml.ops import Op
from drover.rpc import messages as m
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.limits import Limits
from drover.worker.memory import Memory, SharedDevice
from support.client import Bench, Client
from support.serving import LIMIT, Worker, running, works

MIB = 1 << 20


@dataclass
class Pair:
    """A client that goes too far, beside one that works."""

    worker: Worker
    greedy: Client
    other: Client


@contextmanager
def pair(limits: Limits) -> Iterator[Pair]:
    """Afterwards the other one still works, and the greedy one has left nothing behind."""
    with running(ReferenceDevice(LIMIT), limits=limits) as worker, Client(worker.port) as other:
        with Client(worker.port) as greedy:
            yield Pair(worker, greedy, other)
            assert works(other)
        worker.wait(lambda: len(worker.server.clients) == 1)
        assert works(other)
        worker.wait(lambda: worker.device.memory()[0] == LIMIT)


def test_memory_of_a_client() -> None:
    with pair(Limits(memory=2 * MIB)) as both:
        assert both.greedy.ask(m.GetDeviceMemory(0)) == m.GetDeviceMemoryReply(2 * MIB, LIMIT)
        first = both.greedy.ask(m.AllocBuffer(0, MIB))
        assert both.greedy.ask(m.GetDeviceMemory(0)) == m.GetDeviceMemoryReply(MIB, LIMIT)
        assert both.greedy.ask(m.AllocBuffer(0, MIB + 1)) == m.AllocBufferReply(0, 0)
        (entry,) = both.worker.wait_logged(1)
        assert (entry["event"], f"a client may hold {2 * MIB}" in entry["why"]) == ("buffer refused", True)
        assert both.other.ask(m.GetDeviceMemory(0)).free == 2 * MIB
        assert both.other.ask(m.AllocBuffer(0, 2 * MIB)).remote_size == 2 * MIB
        both.other.tell(m.FreeBuffer(1))
        assert both.worker.refused() == {"memory": 1}
        both.greedy.tell(m.FreeBuffer(first.remote_ptr))
        assert both.greedy.ask(m.AllocBuffer(0, 2 * MIB)).remote_size == 2 * MIB


def test_memory_of_a_client_counts_all_its_devices() -> None:
    memory = Memory([SharedDevice(ReferenceDevice(LIMIT)) for _ in range(2)], 100)
    memory.alloc(0, 60)
    assert memory.available(1) == (40, LIMIT)
    with pytest.raises(DeviceError, match="41 bytes asked, 60 held: a client may hold 100"):
        memory.alloc(1, 41)
    memory.alloc(1, 40)


def test_graphs_kept_for_a_client() -> None:
    """The one that ran longest ago goes; who asks for it is told why, and goes."""
    with pair(Limits(graphs=2)) as both:
        bench = Bench.on(both.greedy)
        node = bench.node(Op.SQR, bench.tensor(4))
        for uid in (1, 2):
            both.greedy.tell(bench.graph(node, uid=uid))
        both.greedy.tell(m.GraphRecompute(0, 1))
        both.greedy.tell(bench.graph(node, uid=3))
        both.greedy.tell(m.GraphRecompute(0, 1))
        both.greedy.tell(m.GraphRecompute(0, 3))
        assert both.greedy.ask(m.DeviceCount()).count == 1
        both.greedy.tell(m.GraphRecompute(0, 2))
        assert both.greedy.dropped()
        (entry,) = both.worker.wait_logged(1)
        assert entry["why"] == "graph 2 is gone: a client may have 2 graphs kept"


def too_many_nodes(bench: Bench) -> m.GraphCompute:
    node = bench.node(Op.SQR, bench.tensor(4))
    return bench.graph(node, node, node)


def too_many_tensors(bench: Bench) -> m.GraphCompute:
    for _ in range(6):
        bench.tensor(4)
    return bench.graph(bench.node(Op.SQR, bench.tensors[0]))


@pytest.mark.parametrize(
    ("limits", "build", "says"),
    [
        (Limits(nodes=2), too_many_nodes, "a graph of 3 nodes"),
        (Limits(tensors=6), too_many_tensors, "a graph of 1 nodes and 7 tensors; 262144 and 6 are possible"),
        (Limits(payload=1600), too_many_tensors, "GRAPH_COMPUTE with 2084 bytes; we take 1600 at a time"),
    ],
    ids=["nodes", "tensors", "payload"],
)
def test_a_graph(limits: Limits, build: Callable[[Bench], m.GraphCompute], says: str) -> None:
    with pair(limits) as both:
        both.greedy.tell(build(Bench.on(both.greedy)))
        assert both.greedy.dropped()
        (entry,) = both.worker.wait_logged(1)
        assert (entry["event"], entry["log_level"]) == ("client dropped", "warning")
        assert both.worker.refused() == {"limit": 1}
        assert says in entry["why"]


def test_the_data_of_a_command() -> None:
    """Said by the header alone: not a byte of it is waited for."""
    with pair(Limits(payload=1600)) as both:
        bench = Bench.on(both.greedy)
        both.greedy.set(bench.tensor(400), range(400))
        assert both.greedy.ask(m.DeviceCount()).count == 1
        large = m.SetTensor(bench.tensor(401), 0, 0, memoryview(bytes(1604)))
        both.greedy.raw(bytes(both.greedy._connection.send(large)[0]))
        assert both.greedy.dropped()
        (entry,) = both.worker.wait_logged(1)
        assert "SET_TENSOR with 1604 bytes; we take 1600 at a time" in entry["why"]
