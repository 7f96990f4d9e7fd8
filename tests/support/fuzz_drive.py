"""Sessions sent to a worker, several at a time; what it does that it must not is an error with the frame's number."""

import selectors
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from drover.rpc.versions import Version
from support.fuzz_sessions import FRAMES, Session, Sessions
from support.fuzz_wire import answers
from support.fuzz_worker import PATIENCE, FindingError, Target, neighbour

AT_ONCE = 4
NEIGHBOUR_EVERY, LOOK_EVERY = 50, 200
"""Sessions between two checks of the honest client, and of the worker's own figures."""
REMEMBERED = 2000
_NOW = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Flight:
    """A session on its way."""

    session: Session
    link: socket.socket
    left: memoryview
    deadline: float
    heard: bytearray = field(default_factory=bytearray)


class Drive:
    """Many sessions, one worker."""

    def __init__(self, target: Target, sessions: Sessions, versions: tuple[Version, Version | None]) -> None:
        self._target = target
        self._sessions = sessions
        self._versions = versions
        self._selector = selectors.DefaultSelector()
        self._flights: set[_Flight] = set()
        self._peers: OrderedDict[int, int] = OrderedDict()
        """Which session had a port of ours: log lines name clients by it."""
        self._done = 0

    def run(self, numbers: Iterable[int]) -> None:
        """Send these sessions; FindingError for what goes wrong."""
        honest = neighbour(self._target.port, self._versions[0])
        try:
            for number in numbers:
                while sum(flight.session.ending != "stalls" for flight in self._flights) >= AT_ONCE:
                    self._turn()
                self._start(self._sessions.session(number))
                if self._done % NEIGHBOUR_EVERY == 0:
                    honest.check()
                if self._done % LOOK_EVERY == 0:
                    self._look()
                self._done += 1
            while self._flights:
                self._turn()
            honest.check()
            self._look()
        except FindingError as finding:
            raise self._told(finding) from finding
        finally:
            honest.leave()
            for flight in list(self._flights):
                self._end(flight)

    def _start(self, session: Session) -> None:
        try:
            link = socket.create_connection(("127.0.0.1", self._target.port), PATIENCE)
        except OSError as error:
            raise FindingError(f"a connection is not accepted: {error}") from error
        self._peers[link.getsockname()[1]] = session.number
        if len(self._peers) > REMEMBERED:
            self._peers.popitem(last=False)
        link.setblocking(False)
        flight = _Flight(session, link, memoryview(b"".join(session.frames)), time.monotonic() + PATIENCE)
        self._flights.add(flight)
        self._selector.register(link, selectors.EVENT_READ, flight)
        self._send(flight)

    def _turn(self) -> None:
        """Whatever can be sent or heard now; FindingError if somebody waits for too long."""
        for key, events in self._selector.select(1.0):
            flight: _Flight = key.data
            if events & selectors.EVENT_READ and not self._hear(flight):
                continue
            if events & selectors.EVENT_WRITE:
                self._send(flight)
        now = time.monotonic()
        for flight in self._flights:
            if now > flight.deadline:
                raise FindingError(f"{_frames(flight.session)}: neither answered nor closed in {PATIENCE:g} s")

    def _send(self, flight: _Flight) -> None:
        try:
            while flight.left:
                flight.left = flight.left[flight.link.send(flight.left) :]
        except BlockingIOError:
            self._selector.modify(flight.link, selectors.EVENT_READ | selectors.EVENT_WRITE, flight)
            return
        except ConnectionError:  # it has been dropped: what it said before is still to be read
            flight.left = memoryview(b"")
        self._selector.modify(flight.link, selectors.EVENT_READ, flight)
        if flight.session.ending == "resets":
            flight.link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW)
            self._end(flight)
        elif flight.session.ending == "leaves":
            try:
                flight.link.shutdown(socket.SHUT_WR)
            except OSError:  # it has gone already
                return

    def _hear(self, flight: _Flight) -> bool:
        """Whether there may be more to come."""
        try:
            while data := flight.link.recv(1 << 18):
                flight.heard += data
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        self._end(flight)
        self._judge(flight)
        return False

    def _judge(self, flight: _Flight) -> None:
        """Whether the answers are those of the first so many requests."""
        expected = answers(b"".join(flight.session.frames), *self._versions)
        at = index = 0
        while len(flight.heard) - at >= 8:
            (size,) = struct.unpack_from("<Q", flight.heard, at)
            if index >= len(expected) or size != expected[index]:
                wanted = expected[index] if index < len(expected) else "none"
                raise FindingError(f"{_frames(flight.session)}: answer {index} has {size} bytes, not {wanted}")
            at, index = at + 8 + size, index + 1
        if flight.session.right and (index < len(expected) or at != len(flight.heard)):
            raise FindingError(f"{_frames(flight.session)}: {index} of {len(expected)} right requests were answered")

    def _end(self, flight: _Flight) -> None:
        self._selector.unregister(flight.link)
        flight.link.close()
        self._flights.discard(flight)

    def _look(self) -> None:
        """At the worker itself."""
        self._target.require_life()
        if not self._target.refused()["internal"]:
            return
        told = self._target.internal_errors()
        ports = [int(word.split(":")[1]) for line in told for word in line.split() if word.startswith("peer=")]
        where = [f"frames from {self._peers[port] * FRAMES}" for port in ports if port in self._peers]
        raise FindingError(
            f"errors that nobody has foreseen, {', '.join(where) or 'of no session of ours'}:\n" + "\n".join(told)
        )

    def _told(self, finding: FindingError) -> FindingError:
        under_way = ", ".join(_frames(flight.session) for flight in self._flights) or "nothing"
        return FindingError(f"{finding}\nunder way: {under_way}\n{self._target.end(seconds=1)}")


def _frames(session: Session) -> str:
    return f"frames {session.first} to {session.first + FRAMES - 1}"
