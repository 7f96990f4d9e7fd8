"""Whatever bytes arrive, in whatever pieces: messages, or the protocol's error, and no memory on anybody's word.

Noise is in `test_codec` and `test_versions`; here are whole sessions with damaged frames in them, as `make fuzz` sends
them to a worker.
"""

import struct
import tracemalloc
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.errors import RemoteProtocolError
from drover.ggml.tensor import Tensor
from drover.rpc import codec
from drover.rpc import messages as m
from drover.rpc.connection import BodyWanted, ServerConnection
from drover.rpc.version_names import NAMES
from drover.rpc.versions import VERSIONS
from support.feeding import Piece, feed, heard
from support.fuzz_sessions import FRAMES, Sessions
from support.fuzz_wire import layout

T = codec.encode_tensor(Tensor(1, (4, 1, 1, 1), (4, 16, 16, 16), data=64))
HELLO = struct.pack("<BQ", 14, 24) + bytes(24)
SPARE = 64 << 10
"""Bytes that reading a head takes, whatever it says."""
MOST = 1 << 20
RECORD_MARKS = ((8, 4), (52, 4), (228, 64))
"""Type, operation, name: not every number is one of the protocol, and a name ends at its first NUL."""


@cache
def sessions(name: str) -> Sessions:
    return Sessions(20_000, VERSIONS[name])


def told(name: str, stream: bytes, piece: Piece) -> tuple[list[bytes], str]:
    """The messages in a stream as they would be sent today, and the error that ends it."""
    events: list[bytes] = []
    connection = ServerConnection(VERSIONS[name], max_payload=MOST)
    try:
        events.extend(b"".join(codec.encode_request(event)) for event in heard(connection, stream, piece))
    except RemoteProtocolError as error:
        return events, str(error)
    return events, ""


@pytest.mark.parametrize("name", NAMES)
@given(number=st.integers(0, 1 << 20))
def test_damage_is_the_protocols_error_or_none(name: str, number: int) -> None:
    session = sessions(name).session(number)
    events, why = told(name, b"".join(session.frames), lambda: 1 << 20)
    assert not (session.right and why)
    assert len(events) >= FRAMES * session.right


@settings(max_examples=20)
@pytest.mark.parametrize("name", ["8.0", "5.1", "2.0"])
@given(number=st.integers(0, 1 << 20))
def test_pieces_do_not_matter(name: str, number: int) -> None:
    stream = b"".join(sessions(name).session(number).frames)
    rng = Random(number)
    assert told(name, stream, lambda: rng.choice((1, 3, 8, 9, 300, 5000))) == told(name, stream, lambda: 1 << 20)


@given(number=st.sampled_from(sorted(m.COMMANDS)), data=st.data())
def test_what_decodes_encodes_to_the_same_bytes(number: int, data: st.DataObject) -> None:
    found, command = layout(number, VERSIONS["8.0"]), m.COMMANDS[number]
    assert found is not None
    if command.body is m.Body.GRAPH:
        nodes, records = data.draw(st.lists(st.binary(min_size=8, max_size=8))), data.draw(st.integers(0, 3))
        table = bytearray(data.draw(st.binary(min_size=296 * records, max_size=296 * records)))
        head = data.draw(st.binary(min_size=12, max_size=12))
        payload = head + struct.pack("<I", len(nodes)) + b"".join(nodes) + struct.pack("<I", records) + table
    else:
        raw = bytearray(data.draw(st.binary(min_size=found.size, max_size=found.size)))
        for at in found.records:
            for start, size in RECORD_MARKS:
                raw[at + start : at + start + size] = bytes(size)
        body = data.draw(st.binary(min_size=1, max_size=20)) if command.body is m.Body.DATA else b""
        if command.request is m.SetTensor2D:
            struct.pack_into("<QQ", raw, 304, len(body), 1)
        payload = bytes(raw) + body
    frame = struct.pack("<BQ", number, len(payload)) + payload
    stream = frame if command.request is m.Hello else HELLO + frame
    event = feed(ServerConnection(), stream, 1 << 20)[-1]
    assert b"".join(codec.encode_request(event)) == frame


@given(st.integers(0, 255), st.integers(0, (1 << 64) - 1) | st.integers(0, 1 << 28), st.integers(0, 1 << 28))
def test_no_memory_is_taken_on_the_word_of_a_peer(number: int, size: int, limit: int) -> None:
    """Of what follows a head the connection takes none at all: who checks the head says where it goes."""
    connection = ServerConnection(max_payload=limit)
    feed(connection, HELLO, 100)
    connection.send(m.HelloReply())
    data = struct.pack("<BQ", number, size) + T + bytes(4000)
    tracemalloc.start()
    try:
        room = connection.room()
        room[: len(data)] = data
        connection.filled(len(data))
        event = connection.next_event()
    except RemoteProtocolError:
        event = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < SPARE
    if isinstance(event, BodyWanted):
        command = m.COMMANDS[number]
        assert event.size == size - codec.head_size(command) <= min(limit, command.limit)
