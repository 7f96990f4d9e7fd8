"""Who may say what, when, and how large it may be."""

import struct

import pytest

from drover.errors import LocalProtocolError, RemoteProtocolError
from drover.ggml.tensor import Tensor
from drover.rpc import messages as m
from drover.rpc.connection import (
    NEED_DATA,
    BodyWanted,
    ClientConnection,
    ServerConnection,
)

HELLO = b"\x0e" + struct.pack("<Q", 24) + bytes(24)
WEIGHTS = Tensor(1, (4, 1, 1, 1), (4, 16, 16, 16), data=64)


def give(connection: ServerConnection | ClientConnection, data: bytes) -> object:
    while data:
        room = connection.room()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        connection.filled(count)
        data = data[count:]
    return connection.next_event()


def greeted() -> ServerConnection:
    server = ServerConnection()
    assert isinstance(give(server, HELLO), m.Hello)
    server.send(m.HelloReply())
    return server


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x0f" + bytes(8), "DEVICE_COUNT before HELLO"),
        (b"\x0e" + bytes(8), "HELLO of 0 bytes"),
        (b"\x0e" + struct.pack("<Q", 25), "HELLO of 25 bytes"),
        (b"\x17" + bytes(8), "command 23"),
        (b"\xff" + bytes(8), "command 255"),
    ],
)
def test_bad_greetings(data: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        give(ServerConnection(), data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (HELLO, "second HELLO"),
        (struct.pack("<BQ", 0, 11), "ALLOC_BUFFER of 11 bytes; 12 to 12"),
        (struct.pack("<BQ", 6, 304), "SET_TENSOR of 304 bytes"),
        (struct.pack("<BQ", 6, 1 << 63), "SET_TENSOR of 9223372036854775808 bytes"),
        (struct.pack("<BQ", 10, 1 << 40), "GRAPH_COMPUTE of 1099511627776 bytes"),
        (struct.pack("<BQ", 15, 1), "DEVICE_COUNT of 1 bytes"),
        (
            struct.pack("<BQ", 18, 329) + bytes(328),
            "SET_TENSOR_2D announces 0 copies of 0 bytes and carries 1",
        ),
    ],
)
def test_bad_sizes_are_refused_before_anything_is_reserved(data: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        give(greeted(), data)


def test_a_body_lands_where_the_receiver_says() -> None:
    client = ClientConnection()
    client.send(m.Hello())
    frame = b"".join(client.send(m.SetTensor(WEIGHTS, 0, 0, memoryview(b"0123456789abcdef"))))
    server = greeted()
    wanted = give(server, frame[: 9 + 305 + 4])
    assert isinstance(wanted, BodyWanted)
    assert wanted.size == 16
    place = bytearray(16)
    with pytest.raises(LocalProtocolError):
        server.land(memoryview(bytearray(15)))
    server.land(memoryview(place))
    assert server.next_event() is NEED_DATA
    assert len(server.room()) == 12, "no more than the body may be received into its place"
    done = give(server, frame[9 + 305 + 4 :])
    assert isinstance(done, m.SetTensor)
    assert place == b"0123456789abcdef"
    assert server.next_event() is NEED_DATA


def test_a_graph_lands_where_the_receiver_says() -> None:
    body = struct.pack("<QI", 7, 0)
    server = greeted()
    wanted = give(server, struct.pack("<BQ", 10, 16 + len(body)) + struct.pack("<IQI", 1, 9, 1))
    assert isinstance(wanted, BodyWanted)
    assert isinstance(wanted.request, m.GraphCompute)
    assert (wanted.size, wanted.request.device, wanted.request.uid) == (len(body), 1, 9)
    server.land(memoryview(bytearray(len(body))))
    done = give(server, body)
    assert isinstance(done, m.GraphCompute)
    assert (done.uid, bytes(done.nodes), bytes(done.tensors)) == (9, struct.pack("<Q", 7), b"")


def test_replies_must_answer_the_request() -> None:
    server = greeted()
    with pytest.raises(LocalProtocolError, match="nothing was asked"):
        server.send(m.DeviceCountReply(1))
    give(server, b"\x0f" + bytes(8))
    with pytest.raises(LocalProtocolError, match="does not answer"):
        server.send(m.GetAlignmentReply(1))


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ((8, 0, 0), True),
        ((8, 0, 9), True),
        ((8, 1, 0), False),
        ((7, 0, 0), False),
        ((9, 0, 0), False),
    ],
)
def test_versions(version: tuple[int, int, int], accepted: bool) -> None:
    client = ClientConnection()
    client.send(m.Hello())
    answer = struct.pack("<Q", 28) + bytes(version) + bytes(25)
    if accepted:
        assert isinstance(give(client, answer), m.HelloReply)
    else:
        with pytest.raises(
            RemoteProtocolError,
            match=r"it speaks ggml RPC \d\.\d\.\d, we speak 8\.0\.0",
        ):
            give(client, answer)


def test_client_refuses_unasked_and_missized_answers() -> None:
    client = ClientConnection()
    with pytest.raises(LocalProtocolError, match="HELLO"):
        client.send(m.DeviceCount())
    client.send(m.Hello())
    with pytest.raises(LocalProtocolError, match="HELLO"):
        client.send(m.Hello())
    with pytest.raises(RemoteProtocolError, match="HELLO was answered with 3 bytes instead of 28"):
        give(client, struct.pack("<Q", 3) + b"\x01\0\0")
    idle = ClientConnection()
    with pytest.raises(RemoteProtocolError, match="not asked"):
        give(idle, b"x")
