"""Every message as (message, bytes), each row encoded, and decoded whole, a byte at a time and with bytes following."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.errors import RemoteProtocolError
from drover.ggml import types
from drover.ggml.ops import Op, TensorFlag, pack_params
from drover.ggml.tensor import Tensor
from drover.rpc import codec
from drover.rpc import messages as m
from drover.rpc.connection import ClientConnection, ServerConnection
from support.feeding import feed


def tensor(**changes: object) -> Tensor:
    fields: dict[str, object] = {
        "id": 7,
        "type": types.Q8_0,
        "ne": (64, 3, 1, 1),
        "nb": (34, 68, 204, 204),
        "op": Op.MUL_MAT,
        "params": pack_params({0: 10}, {5: 0.5}),
        "flags": TensorFlag.COMPUTE,
        "src": (1, 2, 0, 0, 0, 0, 0, 0, 0, 0),
        "view_src": 3,
        "view_offs": 4,
        "buffer": 5,
        "data": 6,
        "name": "blk.0",
        "use_count": 1,
    }
    return Tensor(**(fields | changes))  # type: ignore[arg-type]


# Written out by hand from docs/protocol.md section 3.1.
T = (
    struct.pack("<QIQ", 7, 8, 5)
    + struct.pack("<4I", 64, 3, 1, 1)
    + struct.pack("<4I", 34, 68, 204, 204)
    + struct.pack("<I", 29)
    + struct.pack("<5if10i", 10, 0, 0, 0, 0, 0.5, *[0] * 10)
    + struct.pack("<i", 16)
    + struct.pack("<10Q", 1, 2, *[0] * 8)
    + struct.pack("<QQQ", 3, 4, 6)
    + b"blk.0".ljust(64, b"\0")
    + struct.pack("<i", 1)
)
GRAPH = m.GraphCompute(0, 9, memoryview(struct.pack("<Q", 7)), memoryview(T))

ROWS: list[tuple[m.Request, bytes]] = [
    (m.AllocBuffer(1, 4096), struct.pack("<IQ", 1, 4096)),
    (m.GetAlignment(2), struct.pack("<I", 2)),
    (m.GetMaxSize(2), struct.pack("<I", 2)),
    (m.BufferGetBase(3), struct.pack("<Q", 3)),
    (m.FreeBuffer(3), struct.pack("<Q", 3)),
    (m.BufferClear(3, 255), struct.pack("<QB", 3, 255)),
    (
        m.SetTensor(tensor(), 1, 2, memoryview(b"abc")),
        T + struct.pack("<BQ", 1, 2) + b"abc",
    ),
    (m.SetTensorHash(tensor(), 1, 2), T + struct.pack("<QQ", 1, 2)),
    (m.GetTensor(tensor(), 1, 2), T + struct.pack("<QQ", 1, 2)),
    (m.CopyTensor(tensor(), tensor()), T + T),
    (GRAPH, struct.pack("<IQIQI", 0, 9, 1, 7, 1) + T),
    (m.GetDeviceMemory(0), struct.pack("<I", 0)),
    (m.InitTensor(tensor()), T),
    (
        m.GetAllocSize(0, tensor(), (tensor(), *[None] * 9)),
        struct.pack("<I", 0) + T + T + bytes(9 * 296),
    ),
    (m.DeviceCount(), b""),
    (m.GraphRecompute(1, 2), struct.pack("<IQ", 1, 2)),
    (m.MemsetTensor(tensor(), 1, 2, 3), T + struct.pack("<QQB", 1, 2, 3)),
    (
        m.SetTensor2D(tensor(), 1, 2, 3, 4, memoryview(b"abcdef")),
        T + struct.pack("<4Q", 1, 2, 3, 4) + b"abcdef",
    ),
    (m.GetTensor2D(tensor(), 1, 2, 3, 4), T + struct.pack("<4Q", 1, 2, 3, 4)),
    (
        m.CommInit(0, 1, 2, 3, b"host".ljust(64, b"\0")),
        struct.pack("<4I", 0, 1, 2, 3) + b"host".ljust(64, b"\0"),
    ),
    (m.CommAllreduce(1, tensor()), struct.pack("<I", 1) + T),
    (m.CommFree(1), struct.pack("<I", 1)),
]
REPLIES: list[tuple[m.Request, m.Reply | memoryview, bytes]] = [
    (m.AllocBuffer(0, 1), m.AllocBufferReply(1, 2), struct.pack("<QQ", 1, 2)),
    (m.GetAlignment(0), m.GetAlignmentReply(64), struct.pack("<Q", 64)),
    (m.GetMaxSize(0), m.GetMaxSizeReply(1 << 40), struct.pack("<Q", 1 << 40)),
    (m.BufferGetBase(1), m.BufferGetBaseReply(1 << 44), struct.pack("<Q", 1 << 44)),
    (m.SetTensorHash(tensor(), 0, 0), m.SetTensorHashReply(1), b"\1"),
    (m.GetTensor(tensor(), 0, 3), memoryview(b"abc"), b"abc"),
    (m.CopyTensor(tensor(), tensor()), m.CopyTensorReply(0), b"\0"),
    (m.GetDeviceMemory(0), m.GetDeviceMemoryReply(1, 2), struct.pack("<QQ", 1, 2)),
    (
        m.GetAllocSize(0, tensor(), (None,) * 10),
        m.GetAllocSizeReply(5),
        struct.pack("<Q", 5),
    ),
    (m.DeviceCount(), m.DeviceCountReply(2), struct.pack("<I", 2)),
    (m.GetTensor2D(tensor(), 0, 2, 2, 8), memoryview(b"abcd"), b"abcd"),
    (m.CommInit(0, 0, 2, 0, bytes(64)), m.CommInitReply(0), b"\0"),
]
HELLO = b"\x0e" + struct.pack("<Q", 24) + bytes(24)


def plain(message: object) -> object:
    """The same message with tensors as comparable tuples."""
    if isinstance(message, Tensor):
        return tuple(getattr(message, name) for name in Tensor.__slots__)
    if isinstance(message, memoryview):
        return bytes(message)
    if isinstance(message, tuple):
        return tuple(plain(part) for part in message)
    if slots := getattr(type(message), "__slots__", None):
        return type(message).__name__, *(plain(getattr(message, name)) for name in slots)
    return message


def frame(message: m.Request, payload: bytes) -> bytes:
    return struct.pack("<BQ", m.COMMAND_OF[type(message)].id, len(payload)) + payload


def test_every_command_has_a_row() -> None:
    rows = {type(message) for message, _ in ROWS} | {m.Hello}
    assert rows == {row.request for row in m.COMMANDS.values()}
    replies = {type(reply) for _, reply, _ in REPLIES} - {memoryview} | {m.HelloReply}
    assert replies == {row.reply for row in m.COMMANDS.values() if isinstance(row.reply, type)}


@pytest.mark.parametrize(("message", "payload"), ROWS, ids=lambda value: type(value).__name__)
def test_encode_request(message: m.Request, payload: bytes) -> None:
    assert b"".join(codec.encode_request(message)) == frame(message, payload)


@pytest.mark.parametrize("step", [1 << 20, 1, 100])
@pytest.mark.parametrize(("message", "payload"), ROWS, ids=lambda value: type(value).__name__)
def test_decode_request(message: m.Request, payload: bytes, step: int) -> None:
    following = frame(m.GraphRecompute(5, 6), struct.pack("<IQ", 5, 6))
    events = feed(ServerConnection(), HELLO + frame(message, payload) + following, step)
    assert [plain(event) for event in events] == [
        plain(m.Hello()),
        plain(message),
        plain(m.GraphRecompute(5, 6)),
    ]


@pytest.mark.parametrize("step", [1 << 20, 1])
@pytest.mark.parametrize(("request_", "reply", "payload"), REPLIES, ids=lambda value: type(value).__name__)
def test_reply_both_ways(request_: m.Request, reply: m.Reply | memoryview, payload: bytes, step: int) -> None:
    server, client = ServerConnection(), ClientConnection()
    sent = b"".join(client.send(m.Hello()))
    room = memoryview(bytearray(len(reply))) if isinstance(reply, memoryview) else None
    feed(server, sent, 1 << 20)
    answers = b"".join(server.send(m.HelloReply()))
    assert answers == struct.pack("<Q", 28) + b"\x08\0\0\0" + bytes(24)
    feed(server, b"".join(client.send(request_, room)), 1 << 20)
    encoded = b"".join(server.send(reply))
    assert encoded == struct.pack("<Q", len(payload)) + payload
    assert [plain(event) for event in feed(client, answers + encoded, step)] == [
        plain(m.HelloReply()),
        plain(reply),
    ]


def test_names_are_cut_to_the_field() -> None:
    raw = codec.encode_tensor(tensor(name="x" * 200))
    assert len(raw) == 296
    assert codec.decode_tensor(raw).name == "x" * 63


def test_strides_beyond_four_gib_are_truncated_as_the_wire_demands() -> None:
    assert codec.decode_tensor(codec.encode_tensor(tensor(nb=(34, 68, 1 << 33, (1 << 33) + 8)))).nb[3] == 8


@pytest.mark.parametrize(("offset", "value"), [(8, 4), (8, 43), (8, 2**32 - 1), (52, 101), (52, 2**32 - 1)])
def test_unknown_types_and_operations_are_refused(offset: int, value: int) -> None:
    raw = bytearray(T)
    raw[offset : offset + 4] = struct.pack("<I", value)
    with pytest.raises(RemoteProtocolError, match=f"{value}, which protocol 8.0 does not have"):
        codec.decode_tensor(bytes(raw))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("<Q", 7),
        struct.pack("<QI", 7, 2) + T,
        struct.pack("<QI", 7, 2**32 - 1),
    ],
)
def test_graph_tables_that_do_not_fit(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        codec.decode_graph(struct.pack("<IQI", 0, 0, 1), memoryview(body))


@given(st.binary(max_size=400))
def test_noise_never_raises_anything_else(noise: bytes) -> None:
    with suppress(RemoteProtocolError):
        feed(ServerConnection(), HELLO + noise, 64)


@given(st.integers(0, 22), st.binary(max_size=3300))
def test_noise_in_every_payload(command: int, noise: bytes) -> None:
    with suppress(RemoteProtocolError):
        feed(ServerConnection(), HELLO + struct.pack("<BQ", command, len(noise)) + noise, 1 << 20)
