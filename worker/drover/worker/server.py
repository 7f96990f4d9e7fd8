"""Sockets and threads: one thread a client, bytes between its socket, its connection and its session.

Whatever goes wrong with a client ends that client, with one log line, and never the process.
"""

import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from drover.errors import DeviceError, DroverError, LimitError, VersionError
from drover.rpc.connection import NEED_DATA, BodyWanted, ServerConnection
from drover.rpc.messages import COMMAND_OF, Request
from drover.rpc.versions import CURRENT, Version
from drover.worker.devices.device import Ceiling
from drover.worker.limits import FRAME_SECONDS, GENEROUS, GRACE, MAX_CLIENTS, Limits
from drover.worker.memory import SharedDevice
from drover.worker.profile import Profile
from drover.worker.session import Holding, Session
from drover.worker.store import Store
from drover.worker.tally import Reason, Tally
from drover.worker.trace import facts

HELLO_SECONDS = 60.0
"""How long a connection may say nothing before its first request."""
DEAD_SECONDS = 50
"""How long a peer that does not even acknowledge is believed to live."""
_BACKLOG = 128
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 20),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, (DEAD_SECONDS - 20) // 10),
    (socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000),
)

_OTHER_VERSION = (
    "it heard that we speak {} and left, as clients of another version do; `--protocol` and `--also` say what we speak"
)

log = structlog.get_logger()


def bind(host: str, port: int) -> socket.socket:
    """A socket with the address reserved but not open yet; raises DroverError saying why it cannot be had."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise DroverError(f"cannot listen on {host}:{port}: {_why(error)}") from error
    return listener


@dataclass(frozen=True, slots=True)
class Presence:
    """A client that is connected, at one moment: the command it waits for, and what it holds of each device."""

    peer: str
    doing: str
    requests: int
    received: int
    sent: int
    held: tuple[Holding, ...]


class Server:
    """Serves many clients at a time on devices they share."""

    def __init__(
        self,
        devices: Sequence[SharedDevice],
        store: Store | None = None,
        *,
        max_clients: int = MAX_CLIENTS,
        limits: Limits = GENEROUS,
        idle_timeout: float | None = None,
        frame_timeout: float = FRAME_SECONDS,
        grace: float = GRACE,
        trace: bool = False,
        ceilings: Sequence[Ceiling] | None = None,
        tally: Tally | None = None,
        versions: tuple[Version, Version | None] = (CURRENT, None),
    ) -> None:
        """`idle_timeout` is after how many silent seconds a client is dropped; None is never.

        `frame_timeout` is the same in the middle of a request or an answer.
        `trace` asks for a line a command. `ceilings`, what devices can do at most, has every client's graphs timed node
        by node, and a table printed when it goes.
        `grace` is how many seconds what runs may take to end after `stop`.
        `versions` are those of the protocol that are spoken, the second beside the first.
        """
        self._devices = devices
        self._store = store
        self._max_clients = max_clients
        self._limits = limits
        self._idle_timeout = idle_timeout
        self._frame_timeout = frame_timeout
        self._grace = grace
        self._trace = trace
        self._ceilings = ceilings
        self._tally = tally or Tally()
        self._versions = versions
        self.clients: dict[threading.Thread, _Client] = {}
        """Who is connected, by the thread that serves them."""
        self._guard = threading.Lock()
        self._stopping = False
        self._woken, self._wake = socket.socketpair()

    def open(self, listener: socket.socket) -> None:
        """Open the port of a bound socket; raises DroverError if somebody else was faster."""
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            raise DroverError(f"cannot listen on {_peer(listener.getsockname())}: {_why(error)}") from error

    def serve(self, listener: socket.socket) -> None:
        """Accept clients until `stop`; then each is answered what it has asked, within the grace, and sent away."""
        listener.setblocking(False)
        while not self._stopping:
            ready, _, _ = select.select([listener, self._woken], [], [])
            if listener in ready and not self._stopping:
                self._accept(listener)
        listener.close()
        self._end_clients()
        self.close()

    def close(self) -> None:
        """Give back what even an idle server holds; `serve` does it at its end."""
        self._woken.close()
        self._wake.close()

    def stop(self) -> None:
        """Make `serve` return; callable from signal handlers and other threads."""
        self._stopping = True
        with suppress(OSError):  # it has ended already
            self._wake.send(b"\0")

    def present(self) -> list[Presence]:
        """Who is connected now, the earliest first."""
        with self._guard:
            clients = list(self.clients.values())
        return [client.presence() for client in clients]

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, address = listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                log.warning("client not accepted", why=_why(error))
                time.sleep(0.05)  # out of file descriptors: do not spin until one is back
            return
        peer = _peer(address)
        with self._guard:
            full = len(self.clients) >= self._max_clients
        if full:
            link.close()
            self._tally.refuse("clients")
            log.warning("client refused", peer=peer, why=f"{self._max_clients} clients are connected")
            return
        profile = None if self._ceilings is None else Profile(self._ceilings)
        session = Session(self._devices, self._store, self._tally, self._limits, profile)
        connection = ServerConnection(*self._versions, self._limits.payload)
        waits = self._idle_timeout, self._frame_timeout
        client = _Client(link, peer, connection, session, self._tally, *waits, self._trace)
        thread = threading.Thread(target=self._attend, args=(client,), name=f"client {peer}", daemon=True)
        with self._guard:
            self.clients[thread] = client
        try:
            thread.start()
        except RuntimeError as error:
            self._forget(thread)
            link.close()
            log.warning("client refused", peer=peer, why=str(error))
            return
        self._tally.client_came()

    def _attend(self, client: "_Client") -> None:
        try:
            client.serve()
        finally:
            self._forget(threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        with self._guard:
            self.clients.pop(thread, None)

    def _end_clients(self) -> None:
        with self._guard:
            left = dict(self.clients)
        for client in left.values():
            client.send_away()
        end = time.monotonic() + self._grace
        for thread in left:
            thread.join(max(0.0, end - time.monotonic()))
        with self._guard:
            late = list(self.clients.values())
        for client in late:
            log.warning("client cut off", peer=client.peer, why=f"it was still busy after {self._grace:g} s of grace")
            client.hang_up()


class _StalledError(DroverError):
    """A client said or took nothing for too long."""


class _UnfinishedError(DroverError):
    """A client left before its request was complete."""


_REASONS: tuple[tuple[type[DroverError], Reason], ...] = (
    (_StalledError, "timeout"),
    (_UnfinishedError, "unfinished"),
    (LimitError, "limit"),
    (DeviceError, "device"),
)


class _Client:
    """One connection, from its first byte to its last."""

    def __init__(
        self,
        link: socket.socket,
        peer: str,
        connection: ServerConnection,
        session: Session,
        tally: Tally,
        idle_timeout: float | None,
        frame_timeout: float,
        trace: bool,
    ) -> None:
        self._link = link
        self.peer = peer
        self._tally = tally
        self._session = session
        self._idle_timeout = idle_timeout
        self._frame_timeout = frame_timeout
        self._trace = trace
        self._patience: float | None = None
        self._connection = connection
        self._doing = ""
        self._requests = 0
        self._received = 0
        self._sent = 0
        self._hung_up = False

    def serve(self) -> None:
        """Answer requests until the peer leaves or errs; one log line, and everything it held is given back.

        Who never greeted is a stranger who tries doors, and worth no more than a debug line.
        """
        try:
            self._prepare()
            while self._receive():
                self._answer()
            self._part()
        except DroverError as error:
            self._tally.refuse(self._reason(error))
            self._say("warning", "client dropped", str(error), known=isinstance(error, VersionError))
        except OSError as error:
            self._say("info", "client lost", _why(error))
        except Exception as error:  # a bug, or no memory left: still only this client's end
            self._tally.refuse("internal")
            self._say("error", "client dropped", f"{type(error).__name__}: {error}")
            log.debug("client dropped by an error of ours", peer=self.peer, exc_info=True)
        finally:
            self._link.close()
            self._session.close()
            if self._session.profile is not None:
                self._session.profile.report(self.peer)

    def presence(self) -> Presence:
        """What others may know of it; for other threads."""
        held = self._session.holdings()
        return Presence(self.peer, self._doing, self._requests, self._received, self._sent, held)

    def send_away(self) -> None:
        """Make `serve` return once what has arrived is answered; for other threads."""
        self._end(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Make `serve` return at its next wait, whatever has arrived; for other threads."""
        self._end(socket.SHUT_RDWR)

    def _end(self, ways: int) -> None:
        self._hung_up = True
        with suppress(OSError):  # it has left already
            self._link.shutdown(ways)

    def _prepare(self) -> None:
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            self._link.setsockopt(socket.IPPROTO_TCP, option, value)

    def _receive(self) -> bool:
        """More bytes into the connection; False when the peer has closed."""
        idle = self._connection.idle
        self._wait_at_most(self._frame_timeout if not idle else self._idle_timeout if self._requests else HELLO_SECONDS)
        try:
            count = self._link.recv_into(self._connection.room())
        except TimeoutError as error:
            what = "it said nothing" if idle else "no byte came in the middle of a request"
            raise self._stalled(error, what) from None
        self._connection.filled(count)
        self._received += count
        self._tally.moved(received=count)
        return count > 0

    def _answer(self) -> None:
        """Act on every request that is complete."""
        while (event := self._connection.next_event()) is not NEED_DATA:
            if isinstance(event, BodyWanted):
                self._begin(event.request)
                self._connection.land(self._session.landing(event.request, event.size))
                continue
            self._begin(event)
            reply = self._session.answer(event)
            sent = self._send(self._connection.send(reply))
            self._tally.served(self._doing, self._connection.frame_size, sent)
            if self._trace:
                log.info(self._doing, peer=self.peer, **facts(event, reply))
            self._requests += 1
            self._doing = ""

    def _begin(self, request: Request) -> None:
        self._doing = COMMAND_OF[type(request)].name

    def _send(self, buffers: Sequence[bytes | memoryview]) -> int:
        """All of it; the bytes sent."""
        left = [memoryview(part) for part in buffers]
        size = sum(map(len, left))
        self._wait_at_most(self._frame_timeout)
        while left:
            try:
                sent = self._link.sendmsg(left)
            except TimeoutError as error:
                raise self._stalled(error, "it took no byte of an answer") from None
            self._sent += sent
            self._tally.moved(sent=sent)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]
        return size

    def _wait_at_most(self, seconds: float | None) -> None:
        if seconds != self._patience:
            self._link.settimeout(seconds)
            self._patience = seconds

    def _stalled(self, error: TimeoutError, what: str) -> Exception:
        """Our own patience has ended; or, if that is the kernel's word, the peer is gone."""
        return error if error.errno else _StalledError(f"{what} for {self._patience:g} s")

    def _part(self) -> None:
        """The peer has closed its end."""
        if self._hung_up:
            self._say("info", "client sent away", "the worker stops")
        elif self._doing or not self._connection.idle:
            raise _UnfinishedError("it left in the middle of a request")
        elif self._requests == 1:
            self._say("warning", "client left", _OTHER_VERSION.format(self._connection.version))
        else:
            self._say("info", "client left", None)

    def _reason(self, error: DroverError) -> Reason:
        """For the figures: a stranger's every error is one of greeting."""
        if self._requests == 0:
            return "greeting"
        known = (reason for kind, reason in _REASONS if isinstance(error, kind))
        return next(known, "request" if self._doing else "frame")

    def _say(self, level: str, event: str, why: str | None, known: bool = False) -> None:
        """One line; of strangers only for who looks, unless they are `known` to be clients of another version."""
        reason = {} if why is None else {"command": self._doing or self._connection.doing, "why": why}
        counts = {"requests": self._requests, "received": self._received, "sent": self._sent}
        stranger = self._requests == 0 and level != "error" and not known
        getattr(log, "debug" if stranger else level)(event, peer=self.peer, **reason, **counts)


def _peer(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _why(error: OSError) -> str:
    return error.strerror or str(error)
