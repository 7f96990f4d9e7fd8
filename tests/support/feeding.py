"""Bytes into a connection as they arrive from a socket, in pieces."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from drover.rpc.connection import NEED_DATA, BodyWanted, ClientConnection, ServerConnection

Piece = Callable[[], int]


def feed(connection: ServerConnection | ClientConnection, data: bytes, step: int) -> list[Any]:
    """What a connection makes of `data` in pieces of at most `step` bytes; bodies land in fresh memory."""
    return list(heard(connection, data, lambda: step))


def heard(connection: ServerConnection | ClientConnection, data: bytes, piece: Piece) -> Iterator[Any]:
    """The same, one by one, in pieces of at most so many bytes as `piece` says each time."""
    sent = 0
    while True:
        event = connection.next_event()
        if isinstance(event, BodyWanted):
            assert isinstance(connection, ServerConnection)
            connection.land(np.empty(event.size, np.uint8).data)
        elif event is not NEED_DATA:
            yield event
        elif sent == len(data):
            return
        else:
            room = connection.room()
            count = min(piece(), len(room), len(data) - sent)
            room[:count] = data[sent : sent + count]
            connection.filled(count)
            sent += count
