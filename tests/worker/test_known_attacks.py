"""What has brought a reference server down or got out of it what it should not (docs/protocol.md section 9).

Each costs its sender's connection, or is answered as it should be; another client is served while that connection is
still open. Those that `test_server` has already (bad types, operations, nodes, sizes, chains, pointers of the client)
are not repeated here.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from drover.ggml.ops import Op, pack_params
from drover.ggml.tensor import Tensor
from drover.ggml.types import F16, I32, I64, Q4_0, Q8_1
from drover.rpc import codec
from drover.rpc import messages as m
from drover.worker.devices.reference.device import ReferenceDevice
from support.client import Bench, Client
from support.serving import LIMIT, running, works

SIZE = 1 << 16
Build = Callable[[Bench], Sequence[m.Request]]


def moved(tensor: Tensor, data: int) -> Tensor:
    tensor.data = data
    return tensor


def numbers(tensor: Tensor, *values: int) -> m.SetTensor:
    raw = np.array(values, "<i8" if tensor.type == I64 else "<i4").tobytes()
    return m.SetTensor(tensor, 0, 0, memoryview(raw))


def set_tensor(tensor: Tensor, offset: int, size: int) -> list[m.Request]:
    return [m.SetTensor(tensor, 0, offset, memoryview(bytes(size)))]


def past_the_destination(b: Bench) -> list[m.Request]:
    a, c = b.tensor(1000), b.tensor(1000)
    return [m.CopyTensor(a, moved(c, (b.handle << 40) + SIZE - 64))]


def after_its_buffer_was_freed(b: Bench) -> list[m.Request]:
    return [b.graph(b.node(Op.SQR, b.tensor(4)), uid=3), m.FreeBuffer(b.handle), m.GraphRecompute(0, 3)]


def set_rows(b: Bench) -> list[m.Request]:
    ids, rows, dst = b.tensor(2, type_=I64), b.tensor(4, 2), b.tensor(4, 3)
    node = b.node(Op.SET_ROWS, rows, ids, dst, extents=dst.ne, data=dst.data)
    return [numbers(ids, 0, 1 << 40), b.graph(node)]


def get_rows(b: Bench) -> list[m.Request]:
    ids = b.tensor(2, type_=I32)
    return [numbers(ids, 0, -1), b.graph(b.node(Op.GET_ROWS, b.tensor(4, 3), ids, extents=(4, 2)))]


def mul_mat_id(b: Bench) -> list[m.Request]:
    ids = b.tensor(1, 2, type_=I32)
    node = b.node(Op.MUL_MAT_ID, b.tensor(4, 5, 3), b.tensor(4, 1, 2), ids, extents=(5, 1, 2))
    return [numbers(ids, 0, 3), b.graph(node)]


def add_id(b: Bench) -> list[m.Request]:
    ids = b.tensor(1, 2, type_=I32)
    return [numbers(ids, 0, 3), b.graph(b.node(Op.ADD_ID, b.tensor(4, 1, 2), b.tensor(4, 3), ids))]


def ssm_scan(b: Bench) -> list[m.Request]:
    n, d, h, t, s = 8, 4, 6, 1, 2
    ids = b.tensor(s, type_=I32)
    shapes = ((n, d, h, 2), (d, h, t, s), (h, t, s), (1, h), (n, 2, t, s), (n, 2, t, s))
    src = [*(b.tensor(*extents) for extents in shapes), ids]
    node = b.node(Op.SSM_SCAN, *src, extents=(d * h * t * s + n * d * h * s,), params=pack_params({0: 1}))
    return [numbers(ids, 0, 2), b.graph(node)]


def odd_blocks(b: Bench) -> list[m.Request]:
    weights = b.tensor(40, 4, type_=Q4_0, nb=(18, 36, 144, 144))
    return [b.graph(b.node(Op.MUL_MAT, weights, b.tensor(40, 2), extents=(4, 2)))]


def more_claimed_than_held(b: Bench) -> list[m.Request]:
    return [b.graph(b.node(Op.SUM, b.tensor(1 << 31, nb=(0, 0, 0, 0)), extents=(1,)))]


REFUSED: dict[str, tuple[Build, str]] = {
    "CVE-2024-42478": (lambda b: [m.GetTensor(b.tensor(4, data=0x7FFF_0000_0000), 0, 16)], "at offset"),
    "CVE-2024-42479": (lambda b: set_tensor(b.tensor(4, data=0x7FFF_0000_0000), 0, 16), "at offset"),
    "ggml PR 1103: copy past the destination": (past_the_destination, "4000 bytes at offset 65472"),
    "GHSA-2phh-px2f-2qmx: graph of a freed buffer": (after_its_buffer_was_freed, "graph 3 is gone"),
    "issue 25288: half a block": (odd_blocks, "not a whole number of blocks"),
    "issue 26825: row read": (get_rows, "index -1"),
    "issue 26912: row written": (set_rows, "index 1099511627776"),
    "issue 25287: expert": (mul_mat_id, "index 3"),
    "row added": (add_id, "index 3"),
    "state": (ssm_scan, "index 2"),
    "set beyond the tensor": (lambda b: set_tensor(b.tensor(4), 8, 16), "16 bytes at offset 8, of 16"),
    "get beyond the tensor": (lambda b: [m.GetTensor(b.tensor(4), 0, 17)], "17 bytes at offset 0, of 16"),
    "offset that wraps": (lambda b: [m.GetTensor(b.tensor(4), 2**64 - 8, 16)], "at offset 18446744073709551608"),
    "copy to another shape": (lambda b: [m.CopyTensor(b.tensor(4, 2), b.tensor(2, 4))], "differ in layout"),
    "copy to another type": (lambda b: [m.CopyTensor(b.tensor(4), b.tensor(4, type_=F16))], "differ in layout"),
    "memset beyond the tensor": (lambda b: [m.MemsetTensor(b.tensor(4), 0, 17, 1)], "17 bytes at offset 0, of 16"),
    "rows beyond the tensor": (lambda b: [m.GetTensor2D(b.tensor(4), 0, 4, 2, 2**63)], "of 16 bytes"),
    "rows without number": (lambda b: [m.GetTensor2D(b.tensor(4), 0, 2**63, 2**63, 2**63)], "of 16 bytes"),
    "more claimed than held": (more_claimed_than_held, "more elements than its buffer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    build, why = REFUSED[name]
    with running(ReferenceDevice(LIMIT)) as worker, Client(worker.port) as other, Client(worker.port) as client:
        bench = Bench.on(client, SIZE)
        client.raw(b"".join(part for request in build(bench) for part in codec.encode_request(request)))
        assert works(other)
        assert client.dropped()
        assert works(other)
        (entry,) = worker.wait_logged(1)
        assert (entry["event"], entry["log_level"]) == ("client dropped", "warning")
        assert why in entry["why"]
        worker.wait(lambda: worker.device.memory()[0] == LIMIT)


def test_a_huge_size_is_not_believed() -> None:
    """2^40 bytes announced: the tensor has 16, and nothing is reserved for them."""
    with running(ReferenceDevice(LIMIT)) as worker, Client(worker.port) as other, Client(worker.port) as client:
        head = b"".join(codec.encode_request(m.SetTensor(Bench.on(client).tensor(4), 0, 0)))
        client.raw(head[:1] + (305 + (1 << 40)).to_bytes(8, "little") + head[9:])
        assert client.dropped()
        assert works(other)
        assert worker.refused() == {"limit": 1}


def test_rows_of_q8_1_are_read() -> None:
    with running(ReferenceDevice(LIMIT)) as worker, Client(worker.port) as other, Client(worker.port) as client:
        bench = Bench.on(client)
        ids, weights = bench.tensor(1, type_=I32), bench.tensor(32, 2, type_=Q8_1)
        block = np.array([0.5, 0], np.float16).tobytes() + bytes(range(32))
        client.tell(m.SetTensor(weights, 0, 0, memoryview(block + block)))
        client.tell(numbers(ids, 1))
        row = bench.node(Op.GET_ROWS, weights, ids, extents=(32, 1))
        client.tell(bench.graph(row))
        assert works(other)
        assert client.get(row).tolist() == [n / 2 for n in range(32)]


def test_a_graph_outlives_a_buffer_that_it_does_not_use() -> None:
    with running(ReferenceDevice(LIMIT)) as worker, Client(worker.port) as other, Client(worker.port) as client:
        bench, unused = Bench.on(client), Bench.on(client)
        x = bench.tensor(2)
        square = bench.node(Op.SQR, x)
        client.tell(bench.graph(square, uid=5))
        client.tell(m.FreeBuffer(unused.handle))
        client.set(x, [3, 4])
        client.tell(m.GraphRecompute(0, 5))
        assert client.get(square).tolist() == [9, 16]
        assert works(other)


def test_duplicates_and_cycles_are_no_trouble() -> None:
    with running(ReferenceDevice(LIMIT)) as worker, Client(worker.port) as other, Client(worker.port) as client:
        bench = Bench.on(client)
        x = bench.tensor(2)
        first, second = bench.node(Op.SQR, x), bench.node(Op.SQR, x)
        first.src, second.src = (second.id,), (first.id,)
        client.set(second, [2, 3])
        client.tell(bench.graph(first, second, first))
        assert client.get(first).tolist() == [2.0**8, 3.0**8]
        assert works(other)
