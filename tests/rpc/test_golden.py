"""Frames recorded from llama.cpp's own client and worker: our codec reproduces them, our worker answers them alike.

`python -m support.record_golden` records them anew.
"""

import gzip
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drover.rpc import codec
from drover.rpc.connection import NEED_DATA, ClientConnection
from drover.rpc.messages import (
    COMMAND_OF,
    COMMANDS,
    RAW,
    TENSOR_BYTES,
    GetTensor,
    GetTensor2D,
    GraphCompute,
    Request,
)
from support.proxy_record import REPLY_HEADER, UNANSWERED, split_frames
from support.replay import Replay, joined, requests_of

GOLDEN = Path(__file__).with_name("golden")
HELLO = (GOLDEN / "HELLO.request").read_bytes()
CONVERSATIONS = ("by_hand", "llama_completion")
LOGITS_NMSE = 5e-4
"""What llama.cpp's own tests allow of a quantized matrix product; results of the hand-written one are exact."""
FIGURES = frozenset({"ALLOC_BUFFER", "BUFFER_GET_BASE", "GET_DEVICE_MEMORY", "GET_ALIGNMENT", "GET_MAX_SIZE"})
"""Answers that say something about the machine or the device, and may differ."""


def frame(name: str, kind: str) -> bytes:
    return (GOLDEN / f"{name}.{kind}").read_bytes()


def stream(conversation: str, kind: str) -> bytes:
    return gzip.decompress((GOLDEN / f"{conversation}.{kind}.gz").read_bytes())


def test_every_command_is_recorded() -> None:
    names = {row.name for row in COMMANDS.values()}
    assert {path.stem for path in GOLDEN.glob("*.request")} == names
    assert {path.stem for path in GOLDEN.glob("*.reply")} == names - UNANSWERED
    assert {row.name for row in COMMANDS.values() if row.reply is None} == UNANSWERED


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", [row.name for row in COMMANDS.values()])
def test_request_survives_decoding_and_encoding(name: str, piece: int) -> None:
    recorded = frame(name, "request")
    before = b"" if name == "HELLO" else HELLO
    *_, request = requests_of(before + recorded, piece)
    assert COMMANDS[recorded[0]].name == name
    assert type(request) is COMMANDS[recorded[0]].request
    assert joined(codec.encode_request(request)) == recorded


@pytest.mark.parametrize("name", [row.name for row in COMMANDS.values() if row.reply is not None])
def test_reply_survives_decoding_and_encoding(name: str) -> None:
    recorded, command = frame(name, "reply"), COMMANDS[frame(name, "request")[0]]
    payload = memoryview(recorded)[REPLY_HEADER:]
    reply = payload if command.reply is RAW else codec.decode_reply(command, payload)
    assert joined(codec.encode_reply(reply)) == recorded


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_tensor_records_of_graphs_survive(conversation: str) -> None:
    tables = [
        request.tensors
        for request in requests_of(stream(conversation, "requests"), 1 << 20)
        if isinstance(request, GraphCompute)
    ]
    records = [bytes(t[at : at + TENSOR_BYTES]) for t in tables for at in range(0, len(t), TENSOR_BYTES)]
    assert records
    assert [codec.encode_tensor(codec.decode_tensor(record)) for record in records] == records


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_whole_conversation_survives(conversation: str) -> None:
    """Both of our ends read the recorded streams to their last byte and write the same ones."""
    sent, answered = stream(conversation, "requests"), stream(conversation, "replies")
    requests = list(requests_of(sent, 1000))
    assert b"".join(joined(codec.encode_request(request)) for request in requests) == sent
    client = ClientConnection()
    for request in requests:
        client.send(request, room_for(request))
    replies = list(replies_of(client, answered))
    assert b"".join(joined(codec.encode_reply(reply)) for reply in replies) == answered


def room_for(request: Request) -> memoryview | None:
    if isinstance(request, GetTensor | GetTensor2D):
        return memoryview(bytearray(request.reply_size))
    return None


def replies_of(client: ClientConnection, data: bytes) -> Iterator[Any]:
    sent = 0
    while client.waiting or sent < len(data):
        event = client.next_event()
        if event is not NEED_DATA:
            yield event
            continue
        room = client.room()
        count = min(len(room), len(data) - sent)
        assert count, "the recorded replies end too early"
        room[:count] = data[sent : sent + count]
        client.filled(count)
        sent += count


@pytest.mark.timeout(300)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_our_worker_answers_alike(conversation: str, drover_workers: list[int]) -> None:
    requests = list(requests_of(stream(conversation, "requests"), 1 << 20))
    recorded, rest = split_frames(stream(conversation, "replies"), REPLY_HEADER)
    assert not rest
    with socket.create_connection(("127.0.0.1", drover_workers[0]), timeout=60) as link:
        replay = Replay(link)
        expected = iter(recorded)
        for number, request in enumerate(requests):
            name = COMMAND_OF[type(request)].name
            answer = None if name in UNANSWERED else next(expected)
            got = replay.exchange(request, answer)
            check_answer(conversation, f"{name} (request {number})", name, got, answer)
        assert next(expected, None) is None


def check_answer(conversation: str, where: str, name: str, got: bytes | None, recorded: bytes | None) -> None:
    if got is None or recorded is None:
        assert got is recorded
        return
    assert got[:REPLY_HEADER] == recorded[:REPLY_HEADER], where
    if name in FIGURES:
        return
    if name == "GET_TENSOR" and conversation == "llama_completion":
        ours, theirs = (np.frombuffer(reply[REPLY_HEADER:], np.float32) for reply in (got, recorded))
        assert np.sum((ours - theirs) ** 2) <= LOGITS_NMSE * np.sum(theirs**2), where
        return
    assert got == recorded, where
