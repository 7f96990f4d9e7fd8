"""A relay between an RPC client and its server that keeps every frame it passes on.

It has its own tiny table of which commands are answered, so that a mistake in ours cannot hide itself here.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

NAMES = (
    "ALLOC_BUFFER GET_ALIGNMENT GET_MAX_SIZE BUFFER_GET_BASE FREE_BUFFER BUFFER_CLEAR SET_TENSOR SET_TENSOR_HASH "
    "GET_TENSOR COPY_TENSOR GRAPH_COMPUTE GET_DEVICE_MEMORY INIT_TENSOR GET_ALLOC_SIZE HELLO DEVICE_COUNT "
    "GRAPH_RECOMPUTE MEMSET_TENSOR SET_TENSOR_2D GET_TENSOR_2D COMM_INIT COMM_ALLREDUCE COMM_FREE"
).split()
UNANSWERED = frozenset(
    "FREE_BUFFER BUFFER_CLEAR SET_TENSOR GRAPH_COMPUTE INIT_TENSOR GRAPH_RECOMPUTE MEMSET_TENSOR SET_TENSOR_2D "
    "COMM_ALLREDUCE COMM_FREE".split()
)
REQUEST_HEADER = 9
REPLY_HEADER = 8


@dataclass(slots=True)
class Exchange:
    """A request frame and the frame that answered it (None: a command without an answer), headers included."""

    request: bytes
    reply: bytes | None = None

    @property
    def name(self) -> str:
        """The command's name."""
        return NAMES[self.request[0]]


@dataclass(slots=True)
class Conversation:
    """Everything one connection carried, in order."""

    requests: list[bytes] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)

    def exchanges(self) -> list[Exchange]:
        """Requests paired with their replies; a reply that never came is None."""
        pending = iter(self.replies)
        paired = [Exchange(request) for request in self.requests]
        for exchange in paired:
            if exchange.name not in UNANSWERED:
                exchange.reply = next(pending, None)
        return paired


class Relay:
    """Listens on a free port of 127.0.0.1 and connects each client to `target`; a context manager.

    `watch` is told the name of every request that has been passed on.
    """

    def __init__(self, target: int, watch: Callable[[str], object] = lambda _: None) -> None:
        self.conversations: list[Conversation] = []
        self._watch = watch
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            conversation = Conversation()
            self.conversations.append(conversation)
            self._spawn(self._carry, client, server, conversation)

    def _carry(self, client: socket.socket, server: socket.socket, conversation: Conversation) -> None:
        with client, server:
            args = (server, client, REPLY_HEADER, conversation.replies, lambda _: None)
            back = threading.Thread(target=_pump, args=args, daemon=True)
            back.start()
            _pump(client, server, REQUEST_HEADER, conversation.requests, self._seen)
            back.join()

    def _seen(self, request: bytes) -> None:
        self._watch(NAMES[request[0]])

    def _spawn(self, work: object, *args: object) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()


def split_frames(stream: bytes, header: int) -> tuple[list[bytes], bytes]:
    """Whole frames of a stream, and the rest; the size stands in the last eight bytes of the header."""
    frames: list[bytes] = []
    at = 0
    while len(stream) - at >= header:
        end = at + header + int.from_bytes(stream[at + header - 8 : at + header], "little")
        if end > len(stream):
            break
        frames.append(stream[at:end])
        at = end
    return frames, stream[at:]


def _pump(
    source: socket.socket, sink: socket.socket, header: int, record: list[bytes], seen: Callable[[bytes], None]
) -> None:
    """Pass bytes on until one side closes; whole frames are kept."""
    rest = bytearray()
    with suppress(OSError):
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while piece := source.recv(1 << 20):
            sink.sendall(piece)
            rest += piece
            if len(rest) >= header and len(rest) >= header + int.from_bytes(rest[header - 8 : header], "little"):
                frames, tail = split_frames(bytes(rest), header)
                record += frames
                rest = bytearray(tail)
                for frame in frames:
                    seen(frame)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
