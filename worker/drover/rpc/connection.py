"""The two ends of a connection as state machines without I/O: hello comes first, and every reply has its request.

Use: write received bytes into `room()`, call `filled(n)`, then `next_event()` until it says NEED_DATA; pass what `send`
returns to `sendmsg`. A RemoteProtocolError ends the connection: nothing may be read from it afterwards.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from drover.errors import LimitError, LocalProtocolError, RemoteProtocolError, VersionError
from drover.rpc import codec
from drover.rpc.framing import Inbox
from drover.rpc.messages import (
    CAPS_BYTES,
    COMMAND_OF,
    MAX_DATA_BYTES,
    RAW,
    VERSION,
    Body,
    Command,
    Done,
    GetTensor,
    GetTensor2D,
    GraphComputeReply,
    Hello,
    HelloReply,
    Reply,
    Request,
)
from drover.rpc.version_names import BRIEF
from drover.rpc.versions import CURRENT, Version

_ACKNOWLEDGEMENTS: dict[object, Reply] = {Done: Done(), GraphComputeReply: GraphComputeReply()}
"""What older versions want of commands that are not answered today."""


class _Signal(Enum):
    NEED_DATA = "more bytes must arrive first"


NEED_DATA: Final = _Signal.NEED_DATA
NeedData = Literal[_Signal.NEED_DATA]


@dataclass(frozen=True, slots=True)
class BodyWanted:
    """The head of a request is here: check it, then `land` memory of exactly `size` bytes for what follows."""

    request: Request
    size: int


class _Endpoint:
    """What both ends have: an inbox."""

    def __init__(self) -> None:
        self._inbox = Inbox()

    def room(self) -> memoryview:
        """Where the next received bytes must be written; never empty."""
        return self._inbox.room()

    def filled(self, count: int) -> None:
        """`count` bytes were written into the last `room`."""
        self._inbox.filled(count)


class ServerConnection(_Endpoint):
    """The worker's end: requests come in, replies go out, in the version that HELLO settles."""

    def __init__(
        self, version: Version = CURRENT, also: Version | None = None, max_payload: int = MAX_DATA_BYTES
    ) -> None:
        """`also` is a version that greets otherwise than `version` does; the client's HELLO tells which it speaks.

        No request may carry more than `max_payload` bytes.
        """
        super().__init__()
        self.version = version
        self._also = also
        self._max_payload = max_payload
        self.frame_size = 0
        """Bytes of the frame that is being received or answered, its header included."""
        self._greeted = False
        self._command: Command | None = None
        self._body_size = 0
        self._head = b""
        self._request: Request | None = None
        self._body: memoryview | None = None
        self._unanswered: tuple[Command, Request] | None = None

    def next_event(self) -> Request | BodyWanted | NeedData:
        """The next complete request, a request whose body must be given a place, or NEED_DATA."""
        if self._body is not None:
            return self._finish_body()
        if self._command is None and not self._begin():
            return NEED_DATA
        command = self._command
        assert command is not None
        head = self._inbox.take(codec.head_size(command))
        if head is None:
            return NEED_DATA
        if command.body is Body.GRAPH:
            self._head = head
            return BodyWanted(codec.decode_graph_head(head, self._body_size, self.version), self._body_size)
        request = codec.decode_request(command, head, self._body_size, self.version)
        if command.body is Body.DATA:
            self._request = request
            return BodyWanted(request, self._body_size)
        return self._complete(command, request)

    def land(self, target: memoryview) -> None:
        """Answer to BodyWanted: the body goes into `target`."""
        if len(target) != self._body_size:
            raise LocalProtocolError(f"{len(target)} bytes of room for a body of {self._body_size}")
        self._body = target
        self._inbox.land(target)

    def send(self, reply: Reply | memoryview | None) -> codec.Buffers:
        """The frame that answers the last request, as its version wants it; None is for commands without an answer."""
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is None:
            if reply is not None:
                raise LocalProtocolError("nothing was asked")
            return []
        command, request = unanswered
        if isinstance(request, Hello):
            reply = self.version.greeting
        elif reply is None:
            reply = _ACKNOWLEDGEMENTS.get(command.reply)
        if isinstance(request, GetTensor | GetTensor2D):
            if not isinstance(reply, memoryview) or len(reply) != request.reply_size:
                raise LocalProtocolError(f"{type(request).__name__} wants {request.reply_size} raw bytes")
        elif reply is None or isinstance(reply, memoryview) or type(reply) is not command.reply:
            raise LocalProtocolError(f"{type(reply).__name__} does not answer {type(request).__name__}")
        return codec.encode_reply(reply)

    @property
    def doing(self) -> str:
        """The command being received or answered, for log lines."""
        return self._command.name if self._command else "nothing" if self._greeted else "HELLO"

    @property
    def idle(self) -> bool:
        """Whether no part of a request is here."""
        return self._command is None and self._inbox.pending == 0

    def _begin(self) -> bool:
        raw = self._inbox.take(codec.REQUEST_HEADER.size)
        if raw is None:
            return False
        number, size = codec.REQUEST_HEADER.unpack(raw)
        also = self._also
        if not self._greeted and also and number == also.hello.id and size == codec.head_size(also.hello):
            self.version = also
        command = self.version.commands.get(number)
        if command is None:
            raise RemoteProtocolError(f"command {number} does not exist in protocol {self.version}")
        if (command.request is Hello) is self._greeted:
            raise RemoteProtocolError("second HELLO" if self._greeted else f"{command.name} before HELLO")
        head = codec.head_size(command)
        if not head <= size <= head + command.limit:
            raise self._missized(command, size)
        if size - head > self._max_payload:
            raise LimitError(f"{command.name} with {size - head} bytes; we take {self._max_payload} at a time")
        self._command, self._body_size = command, size - head
        self.frame_size = codec.REQUEST_HEADER.size + size
        return True

    def _missized(self, command: Command, size: int) -> RemoteProtocolError:
        head = codec.head_size(command)
        if command.request is not Hello:
            possible = f"{head} to {head + command.limit} are possible"
            return RemoteProtocolError(f"{command.name} of {size} bytes; {possible}")
        if size == 0:
            return VersionError(
                f"HELLO of 0 bytes: it speaks a version before 4.0, we {self.version}; "
                f"`--also {BRIEF[0]}` (or {', '.join(BRIEF[1:])}) serves it too"
            )
        if size == CAPS_BYTES:
            said = f"HELLO of {size} bytes: it speaks 4.0 or newer, we {self.version}"
            return VersionError(f"{said}; `--protocol` says what we speak")
        return RemoteProtocolError(f"HELLO of {size} bytes; {head} are possible")

    def _finish_body(self) -> Request | NeedData:
        if not self._inbox.landed():
            return NEED_DATA
        body, self._body = self._body, None
        command = self._command
        assert body is not None
        assert command is not None
        if self._request is None:
            return self._complete(command, codec.decode_graph(self._head, body, self.version))
        request, self._request = self._request, None
        return self._complete(command, codec.with_data(request, body))

    def _complete(self, command: Command, request: Request) -> Request:
        self._command = None
        self._greeted = True
        self._unanswered = None if command.reply is None else (command, request)
        return request


class ClientConnection(_Endpoint):
    """The coordinator's end: requests go out, replies come in, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self._greeted = False
        self._expected: deque[tuple[Command, memoryview | None]] = deque()
        self._landing: memoryview | None = None

    def send(self, request: Request, into: memoryview | None = None) -> codec.Buffers:
        """The frame of a request; `into` is where a raw reply must land."""
        command = COMMAND_OF[type(request)]
        if isinstance(request, Hello) is self._greeted:
            raise LocalProtocolError("HELLO comes first, and once")
        self._greeted = True
        if isinstance(request, GetTensor | GetTensor2D) and (into is None or len(into) != request.reply_size):
            raise LocalProtocolError(f"{command.name} needs room for exactly {request.reply_size} bytes")
        if command.reply is not None:
            self._expected.append((command, into))
        return codec.encode_request(request)

    def next_event(self) -> Reply | memoryview | NeedData:
        """The next reply (raw ones as the memory they landed in), or NEED_DATA."""
        if self._landing is not None:
            return self._finish_raw()
        if not self._expected:
            if self._inbox.pending:
                raise RemoteProtocolError("the server answered something that was not asked")
            return NEED_DATA
        command, into = self._expected[0]
        size = len(into) if command.reply is RAW and into is not None else codec.reply_size(command)
        raw = self._inbox.take(codec.REPLY_HEADER.size)
        if raw is None:
            return NEED_DATA
        if (announced := codec.REPLY_HEADER.unpack(raw)[0]) != size:
            raise RemoteProtocolError(f"{command.name} was answered with {announced} bytes instead of {size}")
        self._landing = into if command.reply is RAW and into is not None else memoryview(bytearray(size))
        self._inbox.land(self._landing)
        return self._finish_raw()

    @property
    def waiting(self) -> int:
        """Requests that have not been answered yet."""
        return len(self._expected)

    def _finish_raw(self) -> Reply | memoryview | NeedData:
        if not self._inbox.landed():
            return NEED_DATA
        landed, self._landing = self._landing, None
        assert landed is not None
        command, _ = self._expected.popleft()
        if command.reply is RAW:
            return landed
        reply = codec.decode_reply(command, landed)
        if isinstance(reply, HelloReply):
            _check_version(reply)
        return reply


def _check_version(reply: HelloReply) -> None:
    """A client accepts its own major version up to its own minor one (docs/protocol.md section 1.3)."""
    theirs = (reply.major, reply.minor, reply.patch)
    if reply.major != VERSION[0] or reply.minor > VERSION[1]:
        raise RemoteProtocolError(f"it speaks ggml RPC {_version(theirs)}, we speak {_version(VERSION)}")


def _version(numbers: tuple[int, int, int]) -> str:
    return ".".join(map(str, numbers))
