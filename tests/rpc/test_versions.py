"""Requests of every older version as (bytes, today's message), and the bytes of its replies.

Bytes are written out by hand from docs/protocol.md sections 2, 3 and 10; what a version says, those before it say too
until another row tells otherwise.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.errors import LocalProtocolError, RemoteProtocolError
from drover.ggml import types
from drover.ggml.ops import Op, TensorFlag, Unary, pack_params
from drover.ggml.tensor import Tensor
from drover.rpc import codec
from drover.rpc import messages as m
from drover.rpc.connection import ServerConnection
from drover.rpc.version_names import BRIEF, NAMES
from drover.rpc.versions import CURRENT, HASHED_BYTES, VERSIONS, Version, pair
from support.feeding import feed

HELLO = {True: struct.pack("<BQ", 14, 0), False: struct.pack("<BQ", 14, 24) + bytes(24)}


def record(op: int, flags: int = 16, params: bytes = pack_params({0: 10})) -> bytes:
    """A tensor as every version lays it out, with something in its last four bytes."""
    return (
        struct.pack("<QIQ", 7, 8, 5)
        + struct.pack("<4I", 64, 3, 1, 1)
        + struct.pack("<4I", 34, 68, 204, 204)
        + struct.pack("<I", op)
        + params
        + struct.pack("<i", flags)
        + struct.pack("<10Q", 1, 2, *[0] * 8)
        + struct.pack("<QQQ", 3, 4, 6)
        + b"blk.0".ljust(64, b"\0")
        + struct.pack("<i", 1)
    )


def tensor(op: Op, **changes: object) -> Tensor:
    """What `record` says."""
    made = Tensor(
        id=7,
        type=types.Q8_0,
        ne=(64, 3, 1, 1),
        nb=(34, 68, 204, 204),
        op=op,
        params=pack_params({0: 10}),
        flags=TensorFlag.COMPUTE,
        src=(1, 2, *[0] * 8),
        view_src=3,
        view_offs=4,
        buffer=5,
        data=6,
        name="blk.0",
        use_count=1,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


ADD = record(2)
T = tensor(Op.ADD)
GRAPH = struct.pack("<IQI", 1, 7, 1) + ADD
TABLE = (memoryview(struct.pack("<Q", 7)), memoryview(ADD))
SINCE_7 = (
    (0, struct.pack("<IQ", 1, 4096), m.AllocBuffer(1, 4096)),
    (1, struct.pack("<I", 1), m.GetAlignment(1)),
    (2, struct.pack("<I", 1), m.GetMaxSize(1)),
    (3, struct.pack("<Q", 3), m.BufferGetBase(3)),
    (4, struct.pack("<Q", 3), m.FreeBuffer(3)),
    (5, struct.pack("<QB", 3, 255), m.BufferClear(3, 255)),
    (6, ADD + struct.pack("<BQ", 1, 2) + b"abc", m.SetTensor(T, 1, 2, memoryview(b"abc"))),
    (7, ADD + struct.pack("<QQ", 1, 2), m.SetTensorHash(T, 1, 2)),
    (8, ADD + struct.pack("<QQ", 1, 2), m.GetTensor(T, 1, 2)),
    (9, ADD + ADD, m.CopyTensor(T, T)),
    (10, struct.pack("<I", 2) + GRAPH, m.GraphCompute(2, 1, *TABLE)),
    (11, struct.pack("<I", 1), m.GetDeviceMemory(1)),
    (12, ADD, m.InitTensor(T)),
    (13, struct.pack("<I", 1) + ADD + ADD + bytes(9 * 296), m.GetAllocSize(1, T, (T, *[None] * 9))),
    (15, b"", m.DeviceCount()),
    (16, struct.pack("<I", 2), m.GraphRecompute(2, 1)),
    (17, ADD + struct.pack("<QQB", 1, 2, 3), m.MemsetTensor(T, 1, 2, 3)),
)
BEFORE_7 = ((6, ADD + struct.pack("<Q", 2) + b"abc", m.SetTensor(T, 0, 2, memoryview(b"abc"))),)
IN_2_0 = (
    (0, struct.pack("<Q", 4096), m.AllocBuffer(0, 4096)),
    (1, b"", m.GetAlignment(0)),
    (2, b"", m.GetMaxSize(0)),
    (10, GRAPH, m.GraphCompute(0, 0, *TABLE)),
    (11, b"", m.GetDeviceMemory(0)),
    (13, ADD, m.GetAllocSize(0, T, ())),
)
"""Other layouts of the commands with these numbers."""
EMPTY_REPLIES = {4, 5, 12, 17}


def requests(name: str) -> Iterator[tuple[int, bytes, m.Request]]:
    """Every request that a client of a version can send."""
    number = VERSIONS[name].number
    changed = (*(BEFORE_7 if number < (7,) else ()), *(IN_2_0 if number < (3,) else ()))
    numbers = {row[0] for row in changed}
    gone = (17,) if number < (5,) else ()
    gone = (*gone, 15, 16) if number < (3,) else gone
    yield from (row for row in SINCE_7 if row[0] not in numbers and row[0] not in gone)
    yield from changed


ROWS = [
    pytest.param(name, command, payload, message, id=f"{name}-{type(message).__name__}-{len(payload)}")
    for name in NAMES[1:]
    for command, payload, message in requests(name)
]


def plain(message: object) -> object:
    """The same message with tensors as comparable tuples."""
    if isinstance(message, memoryview):
        return bytes(message)
    if isinstance(message, tuple):
        return tuple(plain(part) for part in message)
    if slots := getattr(type(message), "__slots__", None):
        return type(message).__name__, *(plain(getattr(message, name)) for name in slots)
    return message


def greeted(name: str, also: str | None = None) -> ServerConnection:
    connection = ServerConnection(*pair(name, also))
    spoken = VERSIONS[also or name]
    assert feed(connection, HELLO[spoken.greets_briefly], 100) == [m.Hello()]
    connection.send(m.HelloReply())
    return connection


def frame(command: int, payload: bytes) -> bytes:
    return struct.pack("<BQ", command, len(payload)) + payload


def test_every_command_of_every_version_has_a_row() -> None:
    for name in NAMES[1:]:
        assert {row[0] for row in requests(name)} | {14} == set(VERSIONS[name].commands)


@pytest.mark.parametrize("step", [1 << 20, 1])
@pytest.mark.parametrize(("name", "command", "payload", "message"), ROWS)
def test_requests(name: str, command: int, payload: bytes, message: m.Request, step: int) -> None:
    following = frame(3, struct.pack("<Q", 9))
    events = feed(greeted(name), frame(command, payload) + following, step)
    expected = message
    if VERSIONS[name].number < (3,) and isinstance(message, m.GraphCompute):
        expected = replace(message, tensors=memoryview(record(2, flags=16)))
    assert [plain(event) for event in events] == [plain(expected), plain(m.BufferGetBase(9))]


@pytest.mark.parametrize("name", NAMES)
def test_greetings(name: str) -> None:
    """28 bytes with room for capabilities since 4.0, three before."""
    version = VERSIONS[name]
    connection = ServerConnection(version)
    feed(connection, HELLO[name in BRIEF], 1)
    numbers = bytes(version.number)
    expected = struct.pack("<Q", 3) + numbers if name in BRIEF else struct.pack("<Q", 28) + numbers + bytes(25)
    assert b"".join(connection.send(m.HelloReply())) == expected


@pytest.mark.parametrize("name", NAMES[1:])
def test_replies_to_what_is_not_answered_today(name: str) -> None:
    number = VERSIONS[name].number
    for command, payload, message in requests(name):
        connection = greeted(name)
        feed(connection, frame(command, payload), 1 << 20)
        if m.COMMAND_OF[type(message)].reply is not None:
            with pytest.raises(LocalProtocolError):
                connection.send(None)
            continue
        if command in EMPTY_REPLIES and number < (6,):
            expected = struct.pack("<Q", 0)
        elif command == 10 and number < (3, 5):
            expected = struct.pack("<QB", 1, 0)
        else:
            expected = b""
        assert b"".join(connection.send(None)) == expected


@pytest.mark.parametrize(("size", "flag"), [(HASHED_BYTES, 0), (HASHED_BYTES + 1, 1)])
def test_large_tensors_are_to_be_cached_where_nothing_says_so(size: int, flag: int) -> None:
    for name in NAMES[2:]:
        command = VERSIONS[name].commands[6]
        request = codec.decode_request(command, ADD + bytes(8), size, VERSIONS[name])
        assert isinstance(request, m.SetTensor)
        assert request.cache_flag == flag


def test_hello_tells_two_generations_apart() -> None:
    for also in BRIEF:
        connection = greeted("7.0", also)
        assert connection.version is VERSIONS[also]
        with pytest.raises(RemoteProtocolError, match=f"command 17 does not exist in protocol {VERSIONS[also]}"):
            feed(connection, frame(17, bytes(313)), 1000)
    connection = ServerConnection(*pair("7.0", "3.6"))
    feed(connection, HELLO[False], 100)
    assert connection.version is VERSIONS["7.0"]


def test_an_empty_request_before_hello_is_no_hello() -> None:
    connection = ServerConnection(*pair("8.0", "3.6"))
    with pytest.raises(RemoteProtocolError, match="DEVICE_COUNT before HELLO"):
        feed(connection, frame(15, b""), 100)


NUMBERS = {
    "2.0": {"ADD_ID": 3, "MEAN": 16, "MUL_MAT": 28, "ROPE": 47, "IM2COL": 51, "SSM_SCAN": 70, "UNARY": 78, "GLU": 87},
    "3.6": {"CUMSUM": 16, "MUL_MAT": 29, "CONV_2D": 55, "SSM_SCAN": 76, "GATED_DELTA_NET": 85, "UNARY": 86, "GLU": 95},
    "4.0.0": {"CONV_2D": 55, "GATED_DELTA_NET": 85, "UNARY": 86, "GLU": 95},
    "4.0.1": {"COL2IM_1D": 55, "CONV_2D": 56, "UNARY": 87, "GLU": 96},
    "4.0.2": {"LIGHTNING_INDEXER": 87, "UNARY": 88, "GLU": 97},
    "4.0": {"DSV4_HC_POST": 90, "UNARY": 91, "GLU": 100},
    "5.0": {"UNARY": 91, "GLU": 100},
}
"""Read off the headers of the releases that spoke these versions."""


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_operations(name: str) -> None:
    operations = VERSIONS[name].operations
    assert {op: number for number, op in operations.items() if op.name in NUMBERS[name]} == {
        Op[op]: number for op, number in NUMBERS[name].items()
    }
    assert sorted(operations) == list(range(len(operations)))
    assert max(NUMBERS[name].values()) == len(operations) - 1


@pytest.mark.parametrize("name", NUMBERS)
def test_operations_are_renumbered_wherever_a_tensor_stands(name: str) -> None:
    number = NUMBERS[name]["UNARY"]
    silu = record(number, params=pack_params({0: Unary.SILU}))
    (one,) = feed(greeted(name), frame(12, silu), 1000)
    assert isinstance(one, m.InitTensor)
    assert one.tensor.op is Op.UNARY
    body = memoryview(bytearray(struct.pack("<QI", 7, 2) + silu + record(2)))
    head = (b"" if name == "2.0" else struct.pack("<I", 0)) + struct.pack("<I", 1)
    graph = codec.decode_graph(head, body, VERSIONS[name])
    assert [codec.decode_tensor(graph.tensors[at : at + 296]).op for at in (0, 296)] == [Op.UNARY, Op.ADD]


@pytest.mark.parametrize("name", NUMBERS)
def test_operations_that_a_version_lacks(name: str) -> None:
    beyond = len(VERSIONS[name].operations)
    with pytest.raises(RemoteProtocolError, match=f"'blk.0' has operation {beyond}, which protocol"):
        feed(greeted(name), frame(12, record(beyond)), 1000)


@pytest.mark.parametrize(
    ("name", "op", "before", "after"),
    [
        ("2.0", Op.UNARY, 14, Unary.GELU_ERF),
        ("2.0", Op.UNARY, 13, Unary.EXP),
        ("3.6", Op.UNARY, 14, Unary.EXPM1),
        ("2.0", Op.SSM_SCAN, 0, 1),
        ("3.6", Op.GATED_DELTA_NET, 0, 1),
        ("4.0", Op.GATED_DELTA_NET, 4, 4),
        ("5.0", Op.SSM_SCAN, 0, 0),
        ("4.0", Op.ADD, 0, 0),
    ],
)
def test_parameters_that_meant_something_else(name: str, op: Op, before: int, after: int) -> None:
    version = VERSIONS[name]
    number = next(number for number, known in version.operations.items() if known is op)
    (request,) = feed(greeted(name), frame(12, record(number, params=pack_params({0: before, 1: 9}))), 1000)
    assert isinstance(request, m.InitTensor)
    assert request.tensor.params == pack_params({0: after, 1: 9})


def test_every_node_runs_where_nodes_were_not_marked() -> None:
    marked: list[int] = []
    for name in ("2.0", "3.6"):
        (request,) = feed(greeted(name), frame(12, record(2, flags=1)), 1000)
        assert isinstance(request, m.InitTensor)
        marked.append(request.tensor.flags)
    assert marked == [TensorFlag.INPUT | TensorFlag.COMPUTE, TensorFlag.INPUT]


@given(st.sampled_from(NAMES), st.integers(0, 22), st.binary(max_size=3300))
def test_noise_in_every_payload(name: str, command: int, noise: bytes) -> None:
    with suppress(RemoteProtocolError):
        feed(greeted(name), frame(command, noise), 1 << 20)


def test_today_is_no_translation() -> None:
    """Records of the version that is spoken by default are passed on as they came."""
    assert CURRENT.same_records
    same: Sequence[Version] = [version for version in VERSIONS.values() if version.same_records]
    assert [str(version) for version in same] == ["8.0.0", "7.0.0", "6.0.0", "5.1.0", "5.0.0"]
