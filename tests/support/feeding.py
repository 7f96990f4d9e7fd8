"""Bytes into a connection as they arrive from a socket, in pieces."""

from typing import Any

from drover.rpc.connection import NEED_DATA, BodyWanted, ClientConnection, ServerConnection


def feed(connection: ServerConnection | ClientConnection, data: bytes, step: int) -> list[Any]:
    """What a connection makes of `data` in pieces of at most `step` bytes; bodies land in fresh memory."""
    events: list[Any] = []
    sent = 0
    while True:
        event = connection.next_event()
        if isinstance(event, BodyWanted):
            assert isinstance(connection, ServerConnection)
            connection.land(memoryview(bytearray(event.size)))
        elif event is not NEED_DATA:
            events.append(event)
        elif sent == len(data):
            return events
        else:
            room = connection.room()
            count = min(step, len(room), len(data) - sent)
            room[:count] = data[sent : sent + count]
            connection.filled(count)
            sent += count
