"""Asks a worker over ggml RPC what its devices offer: greet, count, measure, hang up. Changes nothing there."""

import socket
import time
from typing import TypeVar

from drover.errors import RemoteProtocolError, WorkerError
from drover.rpc import messages
from drover.rpc.connection import NEED_DATA, ClientConnection

SECONDS = 5.0
"""For the whole conversation."""
MOST_DEVICES = 64

_Answer = TypeVar("_Answer", bound=messages.Reply)


def device_memory(host: str, port: int, seconds: float = SECONDS) -> list[int]:
    """Bytes that each device of a worker offers in all; WorkerError if it cannot be asked."""
    where = f"the worker at {host}:{port}"
    try:
        with socket.create_connection((host, port), seconds) as connected:
            talk = _Talk(connected, seconds)
            talk.ask(messages.Hello(), messages.HelloReply)
            count = talk.ask(messages.DeviceCount(), messages.DeviceCountReply).count
            if not 0 < count <= MOST_DEVICES:
                raise WorkerError(f"{where} says that it has {count} devices; see its log")
            return [
                talk.ask(messages.GetDeviceMemory(index), messages.GetDeviceMemoryReply).total for index in range(count)
            ]
    except RemoteProtocolError as error:
        raise WorkerError(f"{where} cannot be used: {error}; use workers of the operator's own version") from None
    except EOFError:
        raise WorkerError(f"{where} hung up: it is no ggml RPC server, or one of another version") from None
    except TimeoutError:
        raise WorkerError(f"{where} did not answer within {seconds:g} s; see its log, and its NetworkPolicy") from None
    except OSError as error:
        raise WorkerError(f"{where} cannot be reached: {error.strerror or error}; see its log") from None


class _Talk:
    """One conversation; it ends at the deadline however slowly the bytes drip in."""

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        self._socket = connected
        self._connection = ClientConnection()
        self._deadline = time.monotonic() + seconds

    def ask(self, request: messages.Request, expected: type[_Answer]) -> _Answer:
        """Send a request and wait for its answer."""
        self._hurry()
        self._socket.sendall(b"".join(self._connection.send(request)))
        while (event := self._connection.next_event()) is NEED_DATA:
            self._hurry()
            count = self._socket.recv_into(self._connection.room())
            if count == 0:
                raise EOFError
            self._connection.filled(count)
        assert isinstance(event, expected)
        return event

    def _hurry(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
