"""RemoteDevice: commands against a real worker, and a clear WorkerError for everything a peer can do wrong."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from drover.coordinator import link as link_module
from drover.coordinator.graph import Graph
from drover.coordinator.remote import RemoteDevice, connect
from drover.errors import DeviceError, WorkerError
from drover.ggml.ops import Op
from drover.ggml.tensor import Tensor, contiguous_strides, shape
from drover.ggml.types import F32, Q8_0, TensorType
from drover.hashing import fnv1a
from drover.rpc import codec
from drover.rpc.messages import COMMANDS
from drover.worker.store import Store
from support.worker_thread import worker


@pytest.fixture
def device() -> Iterator[RemoteDevice]:
    with worker() as endpoint:
        (device,) = connect(endpoint)
        yield device
        device.close()


def placed(device: RemoteDevice, *extents: int, type_: TensorType = F32) -> Tensor:
    ne = shape(*extents)
    tensor = Tensor(id=1, ne=ne, nb=contiguous_strides(type_, ne), type=type_, name="t")
    buffer = device.allocate(tensor.nbytes, "a test")
    tensor.buffer, tensor.data = buffer.handle, buffer.base
    return tensor


def read(device: RemoteDevice, tensor: Tensor, size: int, offset: int = 0) -> bytes:
    into = memoryview(bytearray(size))
    device.get_tensor(tensor, into, offset)
    return bytes(into)


def test_every_command_is_a_method() -> None:
    assert [command.name for command in COMMANDS.values() if not hasattr(RemoteDevice, command.method)] == []


def test_memory(device: RemoteDevice) -> None:
    free, total = device.get_device_memory()
    assert free == total == 64 << 20
    buffer = device.allocate(1 << 20, "a test")
    assert device.get_device_memory()[0] == free - (1 << 20)
    device.free_buffer(buffer.handle)
    assert device.get_device_memory()[0] == free
    assert device.alignment == device.get_alignment() > 0
    assert device.get_max_size() > 1 << 20


def test_too_little_memory_says_for_what_and_how_much(device: RemoteDevice) -> None:
    with pytest.raises(DeviceError, match=r"127\.0\.0\.1.*cannot reserve 1\.0 GiB for weights \(64\.0 MiB free\)"):
        device.allocate(1 << 30, "weights")
    assert device.get_device_memory()[0] == 64 << 20


def test_tensor_data(device: RemoteDevice) -> None:
    tensor = placed(device, 8)
    device.set_tensor(tensor, memoryview(bytes(range(32))))
    device.set_tensor(tensor, memoryview(b"ab"), offset=3)
    assert read(device, tensor, 6) == b"\0\1\2ab\5"
    assert read(device, tensor, 2, offset=30) == b"\x1e\x1f"
    device.memset_tensor(tensor, 0, 4, 9)
    assert read(device, tensor, 5) == b"\x09\x09\x09\x09b"
    device.set_tensor_2d(tensor, memoryview(b"xyXY"), size=2, copies=2, stride=16)
    assert read(device, tensor, 2, offset=16) == b"XY"
    rows = memoryview(bytearray(4))
    device.get_tensor_2d(tensor, rows, size=2, copies=2, stride=16)
    assert bytes(rows) == b"xyXY"
    other = placed(device, 8)
    assert device.copy_tensor(tensor, other)
    assert read(device, other, 32) == read(device, tensor, 32)
    device.buffer_clear(tensor.buffer, 1)
    assert read(device, tensor, 32) == b"\1" * 32
    device.init_tensor(tensor)
    assert not device.comm_init(0, 2, "127.0.0.1", 1)


def test_progress_of_large_data_adds_up(device: RemoteDevice) -> None:
    tensor = placed(device, 3 << 20)
    heard: list[int] = []
    device.set_tensor(tensor, memoryview(bytearray(tensor.nbytes)), sent=heard.append)
    assert len(heard) > 2
    assert sum(heard) == tensor.nbytes


def test_weights_known_by_hash(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with worker(store=Store(tmp_path)) as endpoint:
        (device,) = connect(endpoint)
        data = bytes(range(256)) * 4
        first, second = placed(device, 256), placed(device, 256)
        assert not device.set_tensor_hash(first, fnv1a(data))
        device.set_tensor(first, memoryview(data), cache=True)
        assert device.set_tensor_hash(second, fnv1a(data))
        assert read(device, second, 1024) == data
        device.close()


def graph_of(device: RemoteDevice, x: Tensor, y: Tensor, uid: int):  # type: ignore[no-untyped-def]
    g = Graph()
    out = g.cpy(g.scale(g.leaf(x), 2.0), g.leaf(y))
    scaled = g.tensor(out.src[0])
    scaled.buffer, scaled.data = x.buffer, x.data
    out.buffer, out.data = y.buffer, y.data
    return codec.encode_graph(device.index, uid, [node.id for node in g.nodes], g.tensors)


def test_a_graph_is_sent_once_and_then_named(device: RemoteDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    link = device._link
    transmit = link._transmit
    monkeypatch.setattr(
        link, "_transmit", lambda buffers, heard: (sent.append(buffers[0][0]), transmit(buffers, heard))
    )
    x, y = placed(device, 1), placed(device, 1)
    message = graph_of(device, x, y, 5)
    device.set_tensor(x, memoryview(b"\0\0\x80\x3f"))
    for _ in range(3):
        device.compute(message)
    assert read(device, y, 4) == b"\0\0\0\x41"
    assert [number for number in sent if number in (10, 16)] == [10, 16, 16]
    device.free_buffer(placed(device, 1).buffer)
    device.compute(message)
    assert sent[-1] == 10


def test_stored_graphs_are_forgotten_as_the_server_forgets_them(device: RemoteDevice) -> None:
    x, y = placed(device, 1), placed(device, 1)
    for uid in range(1, 1030):
        device.compute(graph_of(device, x, y, uid))
    assert device._link.stored_graphs(0) == set(range(1025, 1030))
    device.get_device_memory()


@pytest.mark.parametrize(
    ("tensor", "asks"),
    [
        (Tensor(id=1, ne=(512, 1, 1, 1), nb=(34, 544, 544, 544), type=Q8_0), False),
        (Tensor(id=1, ne=(32, 1, 1, 1), nb=(34, 34, 34, 34), type=Q8_0), True),
        (Tensor(id=1, ne=(32, 1, 1, 1), nb=(34, 34, 34, 34), type=Q8_0, view_src=3), False),
        (Tensor(id=1, ne=(3, 1, 1, 1), nb=(4, 12, 12, 12)), False),
        (Tensor(id=1, ne=(3, 1, 1, 1), nb=(4, 12, 12, 12), op=Op.MUL_MAT), True),
        (Tensor(id=1, ne=(3, 1, 1, 1), nb=(4, 12, 12, 12), op=Op.ADD), False),
    ],
)
def test_room_is_asked_only_where_it_may_differ_and_once(
    tensor: Tensor, asks: bool, device: RemoteDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(device, "get_alloc_size", lambda *rest: asked.append(rest) or 9999)
    sizes = {device.reserved_bytes(tensor), device.reserved_bytes(tensor)}
    assert sizes == ({9999} if asks else {tensor.nbytes})
    assert len(asked) == int(asks)


def test_several_devices_share_a_connection() -> None:
    with worker(devices=2) as endpoint:
        devices = connect(endpoint)
        assert [device.name for device in devices] == [endpoint, f"{endpoint}#1"]
        for device in devices:
            device.allocate(1 << 20, "a test")
        assert [device.get_device_memory()[0] for device in devices] == [63 << 20] * 2
        devices[1].close()
        with pytest.raises(WorkerError, match="closed by this coordinator"):
            devices[0].get_device_memory()


@contextmanager
def peer(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does one thing to each client."""

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                behave(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def answers(*replies: bytes) -> Callable[[socket.socket], None]:
    def behave(client: socket.socket) -> None:
        for reply in replies:
            client.recv(65536)
            client.sendall(reply)
        time.sleep(0.05)

    return behave


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(8, "little") + payload


HELLO = frame(bytes([8, 0, 0, 0]) + bytes(24))

BAD_PEERS = {
    "another version": (answers(frame(bytes([7, 0, 0, 0]) + bytes(24))), r"speaks ggml RPC 7\.0\.0, we speak 8\.0\.0"),
    "a newer minor version": (answers(frame(bytes([8, 1, 0, 0]) + bytes(24))), r"speaks ggml RPC 8\.1\.0"),
    "a web server": (answers(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "cannot be used: HELLO was answered with"),
    "an old server": (lambda client: client.close(), "hung up at HELLO"),
    "silence": (lambda client: time.sleep(0.4), r"did not answer HELLO within 0\.2 s.*busy with another client"),
    "no devices": (answers(HELLO, frame(bytes(4))), "has no device"),
    "hangs up after HELLO": (answers(HELLO), "hung up|cannot be used|went away"),
}


@pytest.mark.parametrize(("behave", "message"), BAD_PEERS.values(), ids=BAD_PEERS)
def test_bad_peers(behave: Callable[[socket.socket], None], message: str) -> None:
    with peer(behave) as endpoint, pytest.raises(WorkerError, match=message) as caught:
        connect(endpoint, timeout=0.2)
    assert endpoint in str(caught.value)


def test_a_newer_patch_is_fine() -> None:
    good = frame(bytes([8, 0, 9, 0]) + bytes(24))
    with peer(answers(good, frame((1).to_bytes(4, "little")))) as endpoint:
        connect(endpoint)[0].close()


ADDRESSES = {
    "10.0.0.5:99": ("10.0.0.5", 99),
    "worker-0.workers": ("worker-0.workers", link_module.DEFAULT_PORT),
    "[::1]:5000": ("::1", 5000),
    "[::1]": ("::1", link_module.DEFAULT_PORT),
}


@pytest.mark.parametrize(("text", "expected"), ADDRESSES.items())
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert link_module.address(text) == expected


@pytest.mark.parametrize("text", ["", ":5", "host:", "host:0", "host:65536", "host:x", "host:-1"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(WorkerError, match="write host:port"):
        link_module.address(text)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(
        WorkerError, match=rf"worker {endpoint} cannot be reached \(Connection refused\).*drover worker"
    ):
        connect(endpoint)


def test_no_such_host() -> None:
    with pytest.raises(WorkerError, match="no such host"):
        connect("no-such-host.invalid:50052")


def test_a_worker_that_goes_away_fails_every_later_call() -> None:
    with worker() as endpoint:
        (device,) = connect(endpoint)
        tensor = placed(device, 8)
    for _ in range(2):
        with pytest.raises(WorkerError, match=f"worker {endpoint} .*start it again"):
            read(device, tensor, 32)
    with pytest.raises(WorkerError, match="start it again"):
        device.set_tensor(tensor, memoryview(bytes(32)))


def test_close_wakes_a_thread_that_waits() -> None:
    devices = []
    with peer(answers(HELLO, frame((1).to_bytes(4, "little")), b"")) as endpoint:
        devices += connect(endpoint)
        timer = threading.Timer(0.1, devices[0].close)
        timer.start()
        with pytest.raises(WorkerError, match="closed"):
            devices[0].get_device_memory()
        timer.join()


def test_a_worker_that_went_away_is_noticed_without_asking() -> None:
    with worker() as endpoint:
        (device,) = connect(endpoint)
        assert device.lost is None
        device.get_device_memory()
        assert device.lost is None
        sent, received = device.traffic
        assert min(sent, received) > 0
    why = device.lost
    assert why is not None
    assert f"worker {endpoint} closed the connection" in why
    with pytest.raises(WorkerError, match="closed the connection"):
        device.get_device_memory()
    assert device.lost == why
