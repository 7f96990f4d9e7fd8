"""Servers that are no workers: they answer every connection with the same bytes and hang up."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HELLO = bytes([14]) + (24).to_bytes(8, "little") + bytes(24)


@contextmanager
def impostor(answer: bytes) -> Iterator[int]:
    """A server that answers every connection with these bytes and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            with link:
                link.recv(len(HELLO))
                link.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def hello_reply(major: int, minor: int) -> bytes:
    return struct.pack("<QBBBB", 28, major, minor, 0, 0) + bytes(24)
