"""A connection to a worker, whatever is spoken over it."""

import socket
from types import TracebackType
from typing import Self

PATIENCE = 20.0


class Link:
    """A context manager that leaves when it is left."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)

    def dropped(self) -> bool:
        """Whether the worker closes the connection (it has `PATIENCE` seconds) without answering."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        """Leave."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
