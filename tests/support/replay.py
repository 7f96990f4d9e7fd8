"""Recorded requests sent to another worker, its handles and addresses in place of the recorded ones."""

import socket
from dataclasses import fields, replace
from typing import Any

from drover.ggml.tensor import Tensor
from drover.rpc import codec
from drover.rpc.connection import ServerConnection
from drover.rpc.messages import (
    COMMAND_OF,
    TENSOR_BYTES,
    AllocBufferReply,
    BufferGetBase,
    BufferGetBaseReply,
    GraphCompute,
    Request,
)
from support.feeding import feed
from support.proxy_record import REPLY_HEADER


def requests_of(data: bytes, piece: int) -> list[Request]:
    """What our server end makes of a stream that arrives in pieces of at most `piece` bytes."""
    return feed(ServerConnection(), data, piece)


def joined(buffers: codec.Buffers) -> bytes:
    return b"".join(bytes(part) for part in buffers)


class Replay:
    """Sends recorded requests to another worker: its handles and addresses take the place of the recorded ones."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._stream = link.makefile("rb")
        self._handles: dict[int, int] = {0: 0}
        self._moves: dict[int, int] = {0: 0}
        """Recorded handle -> how far its addresses have moved."""

    def exchange(self, request: Request, recorded: bytes | None) -> bytes | None:
        """Send one request; its reply frame, if there is to be one."""
        self._link.sendall(joined(codec.encode_request(self._translate(request))))
        if recorded is None:
            return None
        reply = self._reply()
        self._learn(request, recorded, reply)
        return reply

    def ask(self, request: Request) -> bytes:
        """Send a request that was not recorded; the payload of its reply."""
        self._link.sendall(joined(codec.encode_request(self._translate(request))))
        return self._reply()[REPLY_HEADER:]

    def _reply(self) -> bytes:
        header = self._stream.read(REPLY_HEADER)
        return header + self._stream.read(int.from_bytes(header, "little"))

    def _learn(self, request: Request, recorded: bytes, reply: bytes) -> None:
        command = COMMAND_OF[type(request)]
        if command.reply not in {AllocBufferReply, BufferGetBaseReply}:
            return
        theirs, ours = (codec.decode_reply(command, frame[REPLY_HEADER:]) for frame in (recorded, reply))
        if isinstance(theirs, AllocBufferReply) and isinstance(ours, AllocBufferReply):
            assert ours.remote_ptr
            assert ours.remote_size >= theirs.remote_size
            self._handles[theirs.remote_ptr] = ours.remote_ptr
        elif isinstance(theirs, BufferGetBaseReply) and isinstance(ours, BufferGetBaseReply):
            assert isinstance(request, BufferGetBase)
            self._moves[request.remote_ptr] = ours.base - theirs.base

    def _translate(self, request: Request) -> Request:
        if isinstance(request, GraphCompute):
            table = request.tensors
            records = (table[at : at + TENSOR_BYTES] for at in range(0, len(table), TENSOR_BYTES))
            moved = b"".join(codec.encode_tensor(self._move(codec.decode_tensor(record))) for record in records)
            return replace(request, tensors=memoryview(moved))
        changes: dict[str, Any] = {}
        for field in fields(request):
            value = getattr(request, field.name)
            if isinstance(value, Tensor):
                changes[field.name] = self._move(value)
            elif isinstance(value, tuple):
                changes[field.name] = tuple(source and self._move(source) for source in value)
            elif field.name == "remote_ptr":
                changes[field.name] = self._handles[value]
        return replace(request, **changes)

    def _move(self, tensor: Tensor) -> Tensor:
        data = tensor.data + self._moves[tensor.buffer] if tensor.buffer else 0
        return replace(tensor, buffer=self._handles[tensor.buffer], data=data)
