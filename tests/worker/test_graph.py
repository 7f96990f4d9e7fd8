"""Graph messages: what is executed, what is refused and why, and how long programs are kept."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from drover.errors import LimitError, RemoteProtocolError
from drover.ggml.ops import Op, pack_params
from drover.ggml.tensor import Shape, Tensor
from drover.ggml.types import F16, Q4_0
from drover.rpc import messages as m
from drover.worker import graph as graph_module
from drover.worker.devices.device import Node
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.graph import Graph, Programs, resolve
from drover.worker.limits import MAX_GRAPHS, Limits
from drover.worker.memory import Memory, SharedDevice
from support.client import Bench, patched

SIZE = 1 << 16
OP, TYPE, FLAGS, NE, DATA, ID = 52, 8, 120, 20, 220, 0


class Lab:
    """A memory with one buffer on each of two devices."""

    def __init__(self) -> None:
        self.devices = [SharedDevice(ReferenceDevice(1 << 20)) for _ in range(2)]
        self.memory = Memory(self.devices)
        held, other = self.memory.alloc(0, SIZE), self.memory.alloc(1, SIZE)
        self.bench = Bench(held.handle, held.base)
        self.other = other

    def resolve(self, message: m.GraphCompute) -> Graph:
        return resolve(message, self.memory, self.devices[0])


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_nodes_come_in_order_with_their_operands(lab: Lab) -> None:
    a, b = lab.bench.tensor(4, 2), lab.bench.tensor(4)
    total = lab.bench.node(Op.ADD, a, b)
    scaled = lab.bench.node(Op.SCALE, total, params=pack_params(floats={0: 2.0}), name="out")
    graph = lab.resolve(lab.bench.graph(total, scaled))
    first, second = graph.nodes
    assert (first.op, second.op, second.name) == (Op.ADD, Op.SCALE, "out")
    assert [operand.offset for operand in first.src if operand] == [0, 64]
    assert first.dst is second.src[0]
    assert len(second.src) == 1
    assert first.dst.ne == (4, 2, 1, 1)
    assert first.dst.nb == (4, 16, 32, 32)
    assert second.params == pack_params(floats={0: 2.0})
    assert graph.handles == {lab.bench.handle}


def test_absent_operands_are_none_and_order_in_the_table_is_free(lab: Lab) -> None:
    x = lab.bench.tensor(4, 4)
    softmax = lab.bench.node(Op.SOFT_MAX, x, params=pack_params(floats={0: 1.0}))
    sinks = lab.bench.tensor(1)
    softmax.src = (x.id, 0, sinks.id)
    lab.bench.tensors.reverse()
    (node,) = lab.resolve(lab.bench.graph(softmax)).nodes
    assert node.src[1] is None
    assert node.src[2] is not None


def test_what_needs_no_work_is_not_looked_at(lab: Lab) -> None:
    bench = lab.bench
    nowhere = bench.tensor(4, buffer=0, data=0)
    idle = [
        bench.node(Op.ADD, nowhere, nowhere, flags=0),  # present, not to be computed
        bench.node(Op.VIEW, nowhere, buffer=0, data=0),
        bench.node(Op.RESHAPE, nowhere, data=7),
        bench.node(Op.ADD, nowhere, nowhere, extents=(4, 0)),
    ]
    real = bench.node(Op.SQR, bench.tensor(4))
    graph = lab.resolve(bench.graph(*idle, real))
    assert [node.op for node in graph.nodes] == [Op.SQR]
    assert lab.resolve(bench.graph(*idle)) == Graph([], frozenset())
    assert lab.resolve(bench.graph()) == Graph([], frozenset())
    nothing = memoryview(b"")
    assert lab.resolve(m.GraphCompute(0, 0, nothing, nothing)) == Graph([], frozenset())


def test_a_cast_names_itself(lab: Lab) -> None:
    x = lab.bench.tensor(8)
    cast = lab.bench.node(Op.CPY, x, type_=F16)
    cast.src = (x.id, cast.id)
    (node,) = lab.resolve(lab.bench.graph(cast)).nodes
    assert node.src[1] is node.dst


def test_an_operand_without_elements_may_be_anywhere(lab: Lab) -> None:
    x, empty = lab.bench.tensor(4, 2), lab.bench.tensor(4, 0, buffer=0, data=0)
    joined = lab.bench.node(Op.CONCAT, x, empty, extents=(4, 2), params=pack_params({0: 1}))
    (node,) = lab.resolve(lab.bench.graph(joined)).nodes
    assert node.src[1] is not None
    assert node.src[1].elements == 0


@pytest.mark.parametrize(
    ("strides", "read"),
    [
        ((12, 4, 36, 36), (4, 4, 36, 36)),  # transposed: a row is three neighbours, as ggml takes them
        ((4, 16, 48, 48), (4, 16, 48, 48)),
        ((0, 4, 12, 12), (0, 4, 12, 12)),  # neighbours might lie outside the buffer
    ],
)
def test_sum_takes_neighbours_for_a_row(lab: Lab, strides: Shape, read: Shape) -> None:
    x = lab.bench.tensor(3, 3, nb=strides)
    (node,) = lab.resolve(lab.bench.graph(lab.bench.node(Op.SUM, x, extents=(1,)))).nodes
    assert node.src[0] is not None
    assert node.src[0].nb == read


def add(bench: Bench) -> Tensor:
    return bench.node(Op.ADD, bench.tensor(4), bench.tensor(4), name="sum")


def change(record: int, at: int, value: int, size: int = 4) -> Callable[[Lab], m.GraphCompute]:
    return lambda lab: patched(lab.bench.graph(add(lab.bench)), record, at, value, size)


def fields(**values: Any) -> Callable[[Lab], m.GraphCompute]:
    def build(lab: Lab) -> m.GraphCompute:
        bench = lab.bench
        return bench.graph(bench.node(Op.ADD, bench.tensor(4), bench.tensor(4, **values), name="sum"))

    return build


def nodes(*ids: int) -> Callable[[Lab], m.GraphCompute]:
    def build(lab: Lab) -> m.GraphCompute:
        whole = lab.bench.graph(add(lab.bench))
        raw = b"".join(id_.to_bytes(8, "little") for id_ in ids)
        return m.GraphCompute(0, 0, memoryview(raw), whole.tensors)

    return build


def on_the_other_device(lab: Lab) -> m.GraphCompute:
    bench = lab.bench
    stranger = bench.tensor(4, buffer=lab.other.handle, data=lab.other.base)
    return bench.graph(bench.node(Op.SQR, stranger))


def mismatched_matmul(lab: Lab) -> m.GraphCompute:
    bench = lab.bench
    return bench.graph(bench.node(Op.MUL_MAT, bench.tensor(32, 4), bench.tensor(16, 4), extents=(4, 4)))


def broken_blocks(lab: Lab) -> m.GraphCompute:
    bench = lab.bench
    weights = bench.tensor(40, 4, type_=Q4_0, nb=(18, 36, 144, 144))
    return bench.graph(bench.node(Op.MUL_MAT, weights, bench.tensor(40, 2), extents=(4, 2)))


def wrong_index_type(lab: Lab) -> m.GraphCompute:
    bench = lab.bench
    return bench.graph(bench.node(Op.GET_ROWS, bench.tensor(8, 4), bench.tensor(2), extents=(8, 2)))


HOSTILE = {
    "op 101": (change(2, OP, 101), r"'sum' op 101 F32 \[4, 1, 1, 1\]: protocol 8.0 does not have its operation"),
    "op 2^32-1": (change(2, OP, 2**32 - 1), "does not have its operation"),
    "custom op": (change(2, OP, int(Op.CUSTOM)), "'sum' CUSTOM .*pointer of the client"),
    "map op": (change(2, OP, int(Op.MAP_CUSTOM1)), "pointer of the client"),
    "training op": (change(2, OP, int(Op.POOL_2D_BACK)), "POOL_2D_BACK: unsupported"),
    "type 4": (change(2, TYPE, 4), "type 4 .*does not have its type"),
    "type of an operand": (change(1, TYPE, 2**32 - 1), "'sum' ADD .* operand 't2' NONE type 4294967295 .*its type"),
    "node 0": (nodes(0), "names tensor 0x0"),
    "missing node": (nodes(3, 77), "names tensor 0x4d"),
    "missing operand": (change(2, 124, 99, 8), "'sum' ADD .* names tensor 0x63"),
    "no operands": (lambda lab: lab.bench.graph(lab.bench.node(Op.ADD)), "src0 is missing"),
    "elsewhere": (fields(buffer=0, data=0), "operand 't2' .*no buffer of this worker"),
    "address without a buffer": (fields(buffer=0), "no buffer of this worker"),
    "unknown buffer": (fields(buffer=9), "no buffer 9"),
    "another device": (on_the_other_device, "another device"),
    "beyond the buffer": (fields(data=(1 << 40) + SIZE - 12), "16 bytes at offset 65524 of buffer 1"),
    "before the buffer": (fields(data=(1 << 40) - 4), "at offset -4"),
    "wrapping address": (fields(data=2**64 - 8), "of buffer 1"),
    "odd address": (fields(data=(1 << 40) + 2), "not a multiple of 4"),
    "result beyond the buffer": (change(2, DATA, (1 << 40) + SIZE, 8), "'sum' ADD .*: 16 bytes at offset"),
    "overflowing extents": (change(0, NE, 2**128 - 1, 16), "bytes at offset 0 of buffer 1"),
    "matmul": (mismatched_matmul, "inner extents differ"),
    "blocks": (broken_blocks, "block"),
    "index type": (wrong_index_type, "GET_ROWS"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_graphs(lab: Lab, name: str) -> None:
    build, why = HOSTILE[name]
    with pytest.raises(RemoteProtocolError, match=why):
        lab.resolve(build(lab))


def test_strides_of_zero_cannot_claim_endless_work(lab: Lab) -> None:
    bench = lab.bench
    endless = bench.tensor(4, 2**20, 2**20, nb=(4, 0, 0, 0))
    with pytest.raises(RemoteProtocolError, match="more elements than its buffer"):
        lab.resolve(bench.graph(bench.node(Op.SUM, endless, extents=(1,))))


def test_a_chain_of_200000_links(lab: Lab) -> None:
    one = bytearray(lab.bench.graph(lab.bench.node(Op.SQR, lab.bench.tensor(4))).tensors[m.TENSOR_BYTES :])
    count = 200_000
    table = np.frombuffer(bytes(one) * count, np.uint8).reshape(count, m.TENSOR_BYTES).copy()
    table[:, 0:8] = np.arange(1, count + 1, dtype="<u8").view(np.uint8).reshape(count, 8)
    table[:, 124:132] = np.arange(0, count, dtype="<u8").view(np.uint8).reshape(count, 8)
    table[0, 124:132] = table[0, 0:8]
    message = m.GraphCompute(0, 0, memoryview(count.to_bytes(8, "little")), memoryview(table.tobytes()))
    assert [node.op for node in lab.resolve(message).nodes] == [Op.SQR]


def test_too_many_nodes(lab: Lab) -> None:
    with pytest.raises(LimitError, match="4 nodes and 3 tensors"):
        resolve(nodes(3, 3, 3, 3)(lab), lab.memory, lab.devices[0], Limits(nodes=3))


def test_duplicates_are_tolerated(lab: Lab) -> None:
    total = add(lab.bench)
    lab.bench.tensors.append(total)
    assert len(lab.resolve(lab.bench.graph(total, total)).nodes) == 2


def graph_on(*handles: int, count: int = 1) -> Graph:
    held: list[Node] = [object()] * count  # type: ignore[list-item]
    return Graph(held, frozenset(handles))


def test_programs_are_kept_by_uid() -> None:
    programs = Programs()
    programs.keep(5, "five", graph_on(1))
    programs.keep(6, None, graph_on())
    assert programs.find(5) == "five"
    assert programs.find(6) is None
    programs.keep(5, "again", graph_on(1))
    assert programs.find(5) == "again"
    with pytest.raises(RemoteProtocolError, match="graph 7 was never sent"):
        programs.find(7)


def test_a_freed_buffer_takes_only_its_own_programs() -> None:
    programs = Programs()
    programs.keep(1, "one", graph_on(10, 11))
    programs.keep(2, "two", graph_on(11))
    programs.forget(10)
    programs.forget(12)
    assert programs.find(2) == "two"
    with pytest.raises(RemoteProtocolError, match="graph 1 is gone: buffer 10, which it uses, was freed"):
        programs.find(1)
    programs.keep(1, "new", graph_on(11))
    assert programs.find(1) == "new"


def test_never_fewer_than_the_client_believes() -> None:
    """The client forgets all its uids when it has 1024 and needs one more, and only then."""
    programs = Programs()
    client: set[int] = set()
    for uid in range(1, 3 * MAX_GRAPHS):
        if len(client) >= MAX_GRAPHS:
            client.clear()
        client.add(uid)
        programs.keep(uid, uid, graph_on(uid % 7))
        if uid % 500 == 0:
            programs.forget(3)
        if uid % 97 == 0:
            for known in client:
                if known % 7 != 3:
                    assert programs.find(known) == known
    assert len(programs._kept) <= MAX_GRAPHS


def test_kept_nodes_are_bounded_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "MAX_KEPT_NODES", 100)
    programs = Programs()
    for uid in (1, 2, 3):
        programs.keep(uid, uid, graph_on(1, count=30))
    programs.find(1)
    programs.keep(4, 4, graph_on(1, count=40))
    assert [programs.find(uid) for uid in (1, 3, 4)] == [1, 3, 4]
    with pytest.raises(RemoteProtocolError, match="gone: 100 nodes were kept"):
        programs.find(2)
    programs.keep(5, 5, graph_on(1, count=1000))
    assert programs.find(5) == 5
