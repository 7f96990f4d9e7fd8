"""A worker over real sockets: many clients at a time, and whatever one of them does, the others do not notice."""

import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from drover.errors import DroverError
from drover.ggml.ops import Op
from drover.ggml.types import I32
from drover.rpc import codec
from drover.rpc import messages as m
from drover.worker import server as server_module
from drover.worker.devices.device import Program
from drover.worker.devices.reference.device import ReferenceDevice, ReferenceProgram
from drover.worker.memory import SharedDevice
from drover.worker.server import Server, bind
from support.client import Bench, Client, patched
from support.serving import LIMIT, Worker, running, works


@pytest.fixture
def worker() -> Iterator[Worker]:
    with running(ReferenceDevice(LIMIT)) as made:
        yield made


def test_one_client_from_hello_to_the_end(worker: Worker) -> None:
    with Client(worker.port) as client:
        assert client.ask(m.DeviceCount()) == m.DeviceCountReply(1)
        assert works(client)
    (entry,) = worker.wait_logged(1)
    assert (entry["event"], entry["log_level"], entry["requests"]) == ("client left", "info", 9)


def test_the_bytes_of_a_greeting(worker: Worker) -> None:
    with Client(worker.port, greet=False) as client:
        client.raw(b"\x0e" + struct.pack("<Q", 24) + bytes(24))
        assert client.socket.recv(100) == struct.pack("<Q", 28) + bytes([8, 0, 0, 0]) + bytes(24)


def test_a_byte_at_a_time(worker: Worker) -> None:
    with Client(worker.port) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"\x0f" + bytes(8) + b"\x01" + struct.pack("<QI", 4, 0):
            client.raw(bytes([byte]))
        assert client.socket.recv(12, socket.MSG_WAITALL) == struct.pack("<QI", 4, 1)
        assert client.socket.recv(16, socket.MSG_WAITALL) == struct.pack("<QQ", 8, 64)


def test_pipelined_requests_are_answered_in_order(worker: Worker) -> None:
    with Client(worker.port) as client:
        bench = Bench.on(client)
        tensor = bench.tensor(1000)
        frames = b""
        for i in range(50):
            data = np.full(1000, i, np.float32).data
            for request in (m.SetTensor(tensor, 0, 0, data.cast("B")), m.GetTensor(tensor, 0, 4)):
                frames += b"".join(codec.encode_request(request))
        client.raw(frames)
        for i in range(50):
            assert client.socket.recv(12, socket.MSG_WAITALL) == struct.pack("<Qf", 4, i)


def test_a_large_tensor_there_and_back(worker: Worker) -> None:
    with Client(worker.port) as client:
        bench = Bench.on(client, 9 << 20)
        tensor = bench.tensor((9 << 20) // 4)
        numbers = np.arange(tensor.ne[0], dtype=np.float32)
        client.set(tensor, numbers)
        assert (client.get(tensor) == numbers).all()


def test_many_clients_at_once(worker: Worker) -> None:
    right: list[bool] = []

    def work() -> None:
        with Client(worker.port) as client:
            right.extend(works(client) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 160


def test_handles_belong_to_their_connection(worker: Worker) -> None:
    with Client(worker.port) as owner, Client(worker.port) as thief:
        bench = Bench.on(owner)
        thief.tell(m.FreeBuffer(bench.handle))
        assert thief.dropped()
        assert works(owner)


HELLO = b"\x0e" + struct.pack("<Q", 24) + bytes(24)
SET = b"".join(codec.encode_request(m.SetTensor(Bench(1, 1 << 40).tensor(1000), 0, 0, memoryview(bytes(4000)))))


@pytest.mark.parametrize(
    "half",
    [b"", HELLO[:1], HELLO[:20], HELLO + b"\x06", HELLO + SET[:8], HELLO + SET[:200]],
    ids=["silent", "one byte", "half a hello", "one byte more", "half a header", "half a tensor record"],
)
def test_half_a_request_costs_only_its_sender(worker: Worker, half: bytes) -> None:
    with Client(worker.port, greet=False) as stuck, Client(worker.port) as client:
        stuck.raw(half)
        if half.startswith(HELLO):
            stuck.socket.recv(36, socket.MSG_WAITALL)
        assert works(client)
        stuck.close()
        worker.wait(lambda: len(worker.logs) == 1)
        (entry,) = worker.logs
        assert entry["log_level"] == ("warning" if half.startswith(HELLO) else "debug")
        if half:
            assert (entry["event"], entry["why"]) == ("client dropped", "it left in the middle of a request")
        assert works(client)


def test_half_a_body_costs_only_its_sender(worker: Worker) -> None:
    with Client(worker.port) as stuck, Client(worker.port) as client:
        tensor = Bench.on(stuck).tensor(1000)
        head, body = codec.encode_request(m.SetTensor(tensor, 0, 0, memoryview(bytes(4000))))
        stuck.raw(bytes(head) + bytes(body[:1999]))
        assert works(client)
        stuck.close()
        assert worker.wait_logged(1)[0]["command"] == "SET_TENSOR"
        worker.wait(lambda: worker.device.memory()[0] == LIMIT)


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_announced_graphs_take_memory_as_they_arrive(worker: Worker) -> None:
    announced = struct.pack("<BQIQI", 10, 16 + m.MAX_GRAPH_BYTES, 0, 0, 1)
    with ExitStack() as stack:
        before = resident()
        for _ in range(8):
            stack.enter_context(Client(worker.port)).raw(announced)
        worker.wait(lambda: sum(row.received > 24 + 9 for row in worker.server.present()) == 8)
        other = stack.enter_context(Client(worker.port))
        assert works(other)
        assert resident() - before < m.MAX_GRAPH_BYTES


STRANGE = {
    "no hello": (b"\x0f" + bytes(8), "DEVICE_COUNT before HELLO"),
    "hello of 25 bytes": (b"\x0e" + struct.pack("<Q", 25) + bytes(25), "HELLO of 25 bytes"),
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "command 71 does not exist"),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "command 80 does not exist"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(506), "COMM_FREE before HELLO"),
    "ssh": (b"SSH-2.0-scanner\r\n", "command 83 does not exist"),
    "zeros": (bytes(64), "ALLOC_BUFFER before HELLO"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_client_is_worth_a_debug_line(worker: Worker, name: str) -> None:
    """Port scans, and browsers that were given the wrong port."""
    data, why = STRANGE[name]
    with Client(worker.port) as other:
        with Client(worker.port, greet=False) as stranger:
            stranger.raw(data)
            assert stranger.dropped()
        worker.wait(lambda: len(worker.logs) == 1)
        (entry,) = worker.logs
        assert (entry["event"], entry["log_level"]) == ("client dropped", "debug")
        assert re.search(why, entry["why"])
        assert works(other)


RAW = {
    "second hello": (HELLO + HELLO, "second HELLO"),
    "command 23": (HELLO + b"\x17" + bytes(8), "command 23 does not exist"),
    "command 255": (HELLO + b"\xff" + b"\xff" * 8, "command 255 does not exist"),
    "short": (HELLO + struct.pack("<BQ", 0, 11) + bytes(11), "ALLOC_BUFFER of 11 bytes"),
    "long": (HELLO + struct.pack("<BQ", 0, 13) + bytes(13), "ALLOC_BUFFER of 13 bytes"),
    "size 2^63": (HELLO + struct.pack("<BQ", 6, 2**63), "SET_TENSOR of 9223372036854775808 bytes"),
    "size 2^64-1": (HELLO + struct.pack("<BQ", 10, 2**64 - 1), "GRAPH_COMPUTE of 18446744073709551615 bytes"),
    "graph beyond its frame": (HELLO + struct.pack("<BQIQII", 10, 20, 0, 0, 2**32 - 1, 0), "4294967295 nodes"),
    "type 4": (HELLO + struct.pack("<BQQI", 12, 296, 1, 4) + bytes(284), "type 4"),
    "op 101 outside a graph": (HELLO + struct.pack("<BQ", 12, 296) + bytes(52) + b"\x65" + bytes(243), "operation 101"),
    "unknown buffer": (HELLO + struct.pack("<BQQ", 4, 8, 77), "no buffer 77"),
    "device 1": (HELLO + struct.pack("<BQI", 1, 4, 1), "device 1 of 1"),
    "recompute": (HELLO + struct.pack("<BQIQ", 16, 12, 0, 5), "graph 5 was never sent"),
    "body without a buffer": (HELLO + SET, "no buffer 1"),
}


@pytest.mark.parametrize("name", RAW)
def test_malformed_requests_cost_their_connection_and_one_line(worker: Worker, name: str) -> None:
    data, why = RAW[name]
    with Client(worker.port) as other:
        with Client(worker.port, greet=False) as client:
            client.raw(data)
            if data.startswith(HELLO):
                client.socket.recv(36, socket.MSG_WAITALL)
            assert client.dropped()
            assert works(other)
        (entry,) = worker.wait_logged(1)
        assert entry["event"] == "client dropped"
        assert why in entry["why"]


def ids(bench: Bench, *numbers: int) -> m.GraphCompute:
    node = bench.node(Op.SQR, bench.tensor(4))
    raw = b"".join(number.to_bytes(8, "little") for number in numbers)
    return m.GraphCompute(0, 0, memoryview(raw), bench.graph(node).tensors)


def chain(bench: Bench) -> m.GraphCompute:
    """200 000 tensors, each naming the one before: what overflows a recursive reader's stack."""
    count = 200_000
    one = bench.graph(bench.node(Op.SQR, bench.tensor(4))).tensors[-m.TENSOR_BYTES :]
    table = np.frombuffer(bytes(one) * count, np.uint8).reshape(count, m.TENSOR_BYTES).copy()
    table[:, :8] = np.arange(1, count + 1, dtype="<u8").view(np.uint8).reshape(count, 8)
    table[:, 124:132] = np.arange(0, count, dtype="<u8").view(np.uint8).reshape(count, 8)
    table[0, 124:132] = table[-1, :8]
    nodes = [count, 2**63]
    raw = np.array(nodes, "<u8").data.cast("B")
    return m.GraphCompute(0, 0, raw, table.reshape(-1).data)


def row_beyond(bench: Bench) -> m.GraphCompute:
    rows = bench.tensor(1, type_=I32, name="row numbers")
    rows.data = bench.tensors[0].data  # holds 1e9 as an integer, see `HOSTILE` below
    return bench.graph(bench.node(Op.GET_ROWS, bench.tensor(4, 3), rows, extents=(4, 1)))


HOSTILE: dict[str, Callable[[Bench], m.GraphCompute]] = {
    "op 101": lambda b: patched(b.graph(b.node(Op.SQR, b.tensor(4))), 2, 52, 101),
    "op 2^32-1": lambda b: patched(b.graph(b.node(Op.SQR, b.tensor(4))), 2, 52, 2**32 - 1),
    "type 31": lambda b: patched(b.graph(b.node(Op.SQR, b.tensor(4))), 2, 8, 31),
    "add without operands": lambda b: b.graph(b.node(Op.ADD)),
    "node 0": lambda b: ids(b, 0),
    "missing node": lambda b: ids(b, 2**64 - 1),
    "custom": lambda b: b.graph(b.node(Op.CUSTOM)),
    "map custom": lambda b: b.graph(b.node(Op.MAP_CUSTOM3, b.tensor(4))),
    "training": lambda b: b.graph(b.node(Op.OPT_STEP_SGD, b.tensor(4))),
    "overflowing extents": lambda b: patched(b.graph(b.node(Op.SQR, b.tensor(4))), 2, 20, 2**128 - 1, 16),
    "overflowing strides": lambda b: patched(b.graph(b.node(Op.SQR, b.tensor(4, 2))), 2, 36, 2**128 - 1, 16),
    "chain": chain,
    "row out of range": row_beyond,
    "matmul": lambda b: b.graph(b.node(Op.MUL_MAT, b.tensor(64, 4), b.tensor(8, 4), extents=(4, 4))),
    "address": lambda b: b.graph(b.node(Op.SQR, b.tensor(4, data=2**64 - 8))),
    "no buffer": lambda b: b.graph(b.node(Op.SQR, b.tensor(4, buffer=0, data=0x7FFF_0000_0000))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_graphs_cost_their_connection_and_one_line(worker: Worker, name: str) -> None:
    with Client(worker.port) as other, Client(worker.port) as client:
        bench = Bench.on(client)
        client.set(bench.tensor(1), [1_000_000_000], np.int32)
        client.tell(HOSTILE[name](bench))
        assert client.dropped()
        (entry,) = worker.wait_logged(1)
        assert (entry["event"], entry["command"]) == ("client dropped", "GRAPH_COMPUTE")
        assert works(other)
        worker.wait(lambda: worker.device.memory()[0] == LIMIT)


def test_memory_of_a_client_that_died_is_back_at_once(worker: Worker) -> None:
    clients = [Client(worker.port) for _ in range(3)]
    for client in clients:
        Bench.on(client, LIMIT // 4)
    assert worker.device.memory()[0] == LIMIT // 4
    clients[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    for client in clients:
        client.close()
    worker.wait(lambda: worker.device.memory()[0] == LIMIT)
    assert [entry["log_level"] for entry in worker.wait_logged(3)] == ["info"] * 3


def test_a_knock_is_not_worth_a_line(worker: Worker) -> None:
    for reset in (False, True):
        with socket.create_connection(("127.0.0.1", worker.port)) as probe:
            if reset:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with Client(worker.port) as client:
        assert works(client)
    worker.wait_logged(1)
    worker.wait(lambda: len(worker.logs) >= 3)
    assert [entry["requests"] for entry in worker.said()] == [8]


class Broken(ReferenceDevice):
    """A device with a bug."""

    error: Exception

    def run(self, program: Program) -> None:
        """Fail as no device should."""
        assert isinstance(program, ReferenceProgram)
        if program.nodes[0].op == Op.SQR:
            raise self.error


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), ZeroDivisionError("division by zero")])
def test_errors_of_our_own_cost_one_connection(error: Exception) -> None:
    device = Broken(LIMIT)
    device.error = error
    with running(device) as worker, Client(worker.port) as other, Client(worker.port) as client:
        bench = Bench.on(client)
        client.tell(bench.graph(bench.node(Op.SQR, bench.tensor(4))))
        assert client.dropped()
        (entry,) = worker.wait_logged(1)
        assert entry["log_level"] == "error"
        assert type(error).__name__ in entry["why"]
        assert worker.refused() == {"internal": 1}
        assert other.ask(m.DeviceCount()) == m.DeviceCountReply(1)
        worker.wait(lambda: device.memory()[0] == LIMIT)


def test_more_clients_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ReferenceDevice(LIMIT), max_clients=2) as worker, ExitStack() as stack:
        first, second = (stack.enter_context(Client(worker.port)) for _ in range(2))
        with Client(worker.port, greet=False) as third:
            assert third.dropped()
        assert worker.wait_logged(1)[0]["event"] == "client refused"
        assert worker.refused() == {"clients": 1}
        first.close()
        worker.wait_logged(2)
        worker.wait(lambda: len(worker.server.clients) == 1)
        with Client(worker.port) as fourth:
            assert works(fourth)
            assert works(second)


def test_idle_clients_are_dropped_if_asked() -> None:
    with running(ReferenceDevice(LIMIT), idle_timeout=0.2) as worker, Client(worker.port) as client:
        assert client.dropped()
        assert worker.wait_logged(1)[0]["why"] == "it said nothing for 0.2 s"


def test_idle_clients_are_kept() -> None:
    """How long a client takes between requests is its own affair."""
    with running(ReferenceDevice(LIMIT), frame_timeout=0.1) as worker, Client(worker.port) as client:
        for _ in range(2):
            time.sleep(0.3)
            assert works(client)


@pytest.mark.parametrize("part", [1, 9, 200, 305, 320], ids=["command", "head", "record", "no data", "some data"])
def test_half_a_frame_is_waited_for_as_long_as_told(part: int) -> None:
    with running(ReferenceDevice(LIMIT), frame_timeout=0.2) as worker, Client(worker.port) as other:
        with Client(worker.port) as stuck:
            data = memoryview(bytes(400))
            frame = b"".join(codec.encode_request(m.SetTensor(Bench.on(stuck).tensor(100), 0, 0, data)))
            stuck.raw(frame[: part + 9])
            started = time.monotonic()
            assert stuck.dropped()
            assert time.monotonic() - started < 5
        (entry,) = worker.wait_logged(1)
        assert (entry["event"], entry["log_level"]) == ("client dropped", "warning")
        assert entry["why"] == "no byte came in the middle of a request for 0.2 s"
        assert worker.refused() == {"timeout": 1}
        assert works(other)
        worker.wait(lambda: worker.device.memory()[0] == LIMIT)


def test_a_slow_frame_is_waited_for() -> None:
    with running(ReferenceDevice(LIMIT), frame_timeout=0.5) as worker, Client(worker.port) as client:
        for byte in b"\x0f" + bytes(8):
            time.sleep(0.1)
            client.raw(bytes([byte]))
        assert client.socket.recv(12, socket.MSG_WAITALL) == struct.pack("<QI", 4, 1)


def test_an_answer_that_nobody_takes() -> None:
    with running(ReferenceDevice(1 << 26), frame_timeout=0.3) as worker, Client(worker.port) as stuck:
        tensor = Bench.on(stuck, 1 << 25).tensor(1 << 23)
        stuck.raw(b"".join(codec.encode_request(m.GetTensor(tensor, 0, tensor.nbytes))))
        (entry,) = worker.wait_logged(1)
        assert (entry["command"], entry["why"]) == ("GET_TENSOR", "it took no byte of an answer for 0.3 s")
        worker.wait(lambda: worker.device.memory()[0] == 1 << 26)


def test_peers_that_are_gone_are_found_in_less_than_a_minute(worker: Worker) -> None:
    with Client(worker.port) as client:
        assert client.ask(m.DeviceCount()).count == 1
        (served,) = worker.server.clients.values()
        link = served._link
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, probes, unanswered = (
            link.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
        assert idle + every * probes < 60
        assert unanswered < 60_000


def test_a_client_that_never_greets_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HELLO_SECONDS", 0.2)
    with running(ReferenceDevice(LIMIT)) as worker, Client(worker.port, greet=False) as client:
        assert client.dropped()


def test_stop_ends_every_client() -> None:
    with ExitStack() as stack:
        with running(ReferenceDevice(LIMIT)) as worker:
            client = stack.enter_context(Client(worker.port))
            stack.enter_context(Client(worker.port, greet=False)).raw(HELLO[:5])
            Bench.on(client)
            worker.wait(lambda: len(worker.server.clients) == 2)
        assert {entry["event"] for entry in worker.said()} == {"client sent away"}
        assert worker.device.memory()[0] == LIMIT
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", worker.port))


class SlowDevice(ReferenceDevice):
    """A graph takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(LIMIT)
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def run(self, program: Program) -> None:
        self.begun.set()
        assert self.go_on.wait(20)
        super().run(program)


def test_a_running_graph_is_finished_and_answered_before_the_end() -> None:
    device = SlowDevice()
    with ExitStack() as stack:
        with running(device) as worker:
            client, idle = (stack.enter_context(Client(worker.port)) for _ in range(2))
            bench = Bench.on(client)
            a, b = bench.tensor(3), bench.tensor(3)
            total = bench.node(Op.ADD, a, b)
            client.set(a, [1, 2, 3])
            client.set(b, [10, 20, 30])
            client.raw(b"".join(codec.encode_request(bench.graph(total))))
            client.raw(b"".join(codec.encode_request(m.GetTensor(total, 0, total.nbytes))))
            assert device.begun.wait(10)
            worker.server.stop()
            assert idle.dropped()
            worker.wait(lambda: len(worker.server.present()) == 1)
            (row,) = worker.server.present()
            assert row.doing == "GRAPH_COMPUTE"
            device.go_on.set()
            answer = client.socket.recv(8 + 12, socket.MSG_WAITALL)
            assert np.frombuffer(answer[8:], np.float32).tolist() == [11, 22, 33]
            assert client.dropped()
        assert {entry["event"] for entry in worker.said()} == {"client sent away"}


def test_a_graph_that_outlasts_the_grace_is_cut_off() -> None:
    device = SlowDevice()
    server = Server([SharedDevice(device)], grace=0.2)
    listener = bind("127.0.0.1", 0)
    server.open(listener)
    thread = threading.Thread(target=server.serve, args=(listener,))
    with capture_logs() as logs:
        thread.start()
        with Client(listener.getsockname()[1]) as client:
            bench = Bench.on(client)
            client.tell(bench.graph(bench.node(Op.ADD, bench.tensor(3), bench.tensor(3))))
            assert device.begun.wait(10)
            started = time.monotonic()
            server.stop()
            thread.join()
            assert time.monotonic() - started < 5
            assert [entry["event"] for entry in logs] == ["client cut off"]
            assert client.dropped()
            device.go_on.set()
            for left in list(server.clients):
                left.join(10)


class Recording(ReferenceDevice):
    """Remembers whose graphs it ran, by the size of the result; each takes a while."""

    def __init__(self) -> None:
        super().__init__(LIMIT)
        self.ran: list[int] = []

    def run(self, program: Program) -> None:
        """Take a note and some time."""
        assert isinstance(program, ReferenceProgram)
        self.ran.append(program.nodes[0].dst.ne[0])
        time.sleep(0.01)


def test_graphs_of_two_busy_clients_alternate() -> None:
    device = Recording()
    with running(device) as worker, Client(worker.port) as first, Client(worker.port) as second:
        frames = []
        for client, size in ((first, 1), (second, 2)):
            bench = Bench.on(client)
            node = bench.node(Op.SQR, bench.tensor(size))
            head = b"".join(codec.encode_request(bench.graph(node, uid=7)))
            again = b"".join(codec.encode_request(m.GraphRecompute(0, 7)))
            frames.append(head + again * 29)
        first.raw(frames[0])
        worker.wait(lambda: len(device.ran) >= 5)
        second.raw(frames[1])
        worker.wait(lambda: len(device.ran) == 60)
    start = device.ran.index(2)
    both = device.ran[start : start + 2 * (30 - start)]
    assert start < 25
    assert all(one != other for one, other in pairwise(both)), device.ran


def test_stop_from_a_signal_handler() -> None:
    server = Server([])
    listener = bind("127.0.0.1", 0)
    server.open(listener)
    previous = signal.signal(signal.SIGUSR1, lambda *_: server.stop())
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        server.serve(listener)
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_an_address_that_cannot_be_had() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DroverError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            bind("127.0.0.1", port)
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(DroverError, match=f"cannot listen on {host}:5: "):
            bind(host, 5)


def test_who_opens_the_port_first_has_it() -> None:
    server = Server([])
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        server.open(first)
        with pytest.raises(DroverError, match="Address already in use"):
            server.open(second)
    server.close()
