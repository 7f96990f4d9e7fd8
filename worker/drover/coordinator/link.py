"""One connection to one worker: requests out, answers in, and what goes wrong in words.

The only user of sockets that reach workers.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from drover.errors import IncompatibleWorkerError, RemoteProtocolError, WorkerError
from drover.rpc import messages
from drover.rpc.codec import Buffers
from drover.rpc.connection import NEED_DATA, ClientConnection

DEFAULT_PORT = 50052

_SMALL_FRAME = 64 << 10
_PIECE = 4 << 20
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000))

_Answer = TypeVar("_Answer", bound=messages.Reply)
Sent = Callable[[int], None]


def address(endpoint: str) -> tuple[str, int]:
    """Host and port of `host:port`, `host` or `[v6]:port`."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_PORT)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise WorkerError(f"{endpoint!r} is not the address of a worker; write host:port, e.g. 10.0.0.5:{DEFAULT_PORT}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Link:
    """One connection to one worker: a blocking socket, and what the worker is known to remember of us."""

    def __init__(self, endpoint: str, timeout: float, name: str) -> None:
        self.endpoint = endpoint
        self.name = name
        self.sent = 0
        self.received = 0
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connection = ClientConnection()
        self._graphs: dict[int, set[int]] = {}
        self._greeted = False
        self._failure: str | None = None
        self._socket = self._open()

    def greeted(self) -> None:
        """The worker is what we need: from now on a computation may take any time."""
        self._greeted = True
        self._socket.settimeout(None)

    def stored_graphs(self, device: int) -> set[int]:
        """Uids that the worker keeps for a device; the caller adds to it."""
        return self._graphs.setdefault(device, set())

    def forget_graphs(self) -> None:
        """No uid is known to the worker any more."""
        for uids in self._graphs.values():
            uids.clear()

    def send(self, request: messages.Request, sent: Sent | None = None) -> None:
        """Hand a request without an answer to the kernel."""
        with self._lock:
            self._attempt(lambda: self._transmit(self._connection.send(request), sent))

    def ask(self, request: messages.Request, expected: type[_Answer]) -> _Answer:
        """Send a request and wait for its answer."""
        reply = self._exchange(request, None)
        assert isinstance(reply, expected)
        return reply

    def fetch(self, request: messages.Request, into: memoryview) -> None:
        """Send a request whose answer is raw bytes, and wait until they are in `into`."""
        self._exchange(request, into)

    def lost(self) -> str | None:
        """Why the connection is gone, as far as can be told without waiting; None while it is there or in use."""
        if self._failure is None and self._lock.acquire(blocking=False):
            try:
                if not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    self._fail(EOFError())
            except BlockingIOError:
                pass
            except OSError as error:
                self._fail(error)
            finally:
                self._lock.release()
        return self._failure

    def close(self) -> None:
        """End the connection; a call waiting in another thread fails."""
        if self._failure is None:
            self._failure = f"the connection to worker {self.endpoint} was closed by this coordinator"
        with suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exchange(self, request: messages.Request, into: memoryview | None) -> messages.Reply | memoryview:
        with self._lock:
            self._attempt(lambda: self._transmit(self._connection.send(request, into), None))
            reply: messages.Reply | memoryview = self._attempt(self._receive)
            return reply

    def _open(self) -> socket.socket:
        host, port = address(self.endpoint)
        try:
            connected = socket.create_connection((host, port), self._timeout)
        except socket.gaierror as error:
            raise WorkerError(f"worker {self.endpoint}: no such host ({error.strerror}); check --rpc") from None
        except TimeoutError:
            raise WorkerError(
                f"worker {self.endpoint} cannot be reached within {self._timeout:g} s; check address and firewall"
            ) from None
        except OSError as error:
            raise WorkerError(
                f"worker {self.endpoint} cannot be reached ({error.strerror or error}); "
                "is it running there? Start it with: drover worker --host … --port …"
            ) from None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return connected

    def _attempt(self, action: Callable[[], Any]) -> Any:
        if self._failure is not None:
            raise WorkerError(self._failure)
        try:
            return action()
        except (OSError, EOFError, RemoteProtocolError) as error:
            failure = self._fail(error)
            if isinstance(error, RemoteProtocolError) and not self._greeted:
                raise IncompatibleWorkerError(failure) from None
            raise WorkerError(failure) from None

    def _fail(self, error: Exception) -> str:
        self._failure = self._failure or self._explain(error)
        self._socket.close()
        return self._failure

    def _explain(self, error: Exception) -> str:
        if isinstance(error, RemoteProtocolError):
            return f"worker {self.endpoint} cannot be used: {error}"
        if self._greeted:
            what = "closed the connection" if isinstance(error, EOFError) else f"went away ({error})"
            return f"worker {self.endpoint} {what}; look into its log, start it again, then start the coordinator again"
        if isinstance(error, TimeoutError):
            return (
                f"worker {self.endpoint} did not answer HELLO within {self._timeout:g} s: it is no ggml RPC server, "
                "or a stock one that is busy with another client (it serves one at a time)"
            )
        version = ".".join(map(str, messages.VERSION))
        return f"{self.endpoint} hung up at HELLO: no ggml RPC server, or one older than version 4 (we speak {version})"

    def _transmit(self, buffers: Buffers, sent: Sent | None) -> None:
        *head, last = buffers
        self.sent += sum(map(len, buffers))
        if len(last) <= _SMALL_FRAME:
            self._socket.sendall(b"".join(buffers))
            if sent is not None:
                sent(len(last))
            return
        for part in head:
            self._socket.sendall(part)
        for start in range(0, len(last), _PIECE):
            piece = memoryview(last)[start : start + _PIECE]
            self._socket.sendall(piece)
            if sent is not None:
                sent(len(piece))

    def _receive(self) -> messages.Reply | memoryview:
        while (event := self._connection.next_event()) is NEED_DATA:
            count = self._socket.recv_into(self._connection.room())
            if count == 0:
                raise EOFError
            self._connection.filled(count)
            self.received += count
        return event
