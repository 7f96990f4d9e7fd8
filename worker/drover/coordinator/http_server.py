"""The HTTP server: an open port, uvicorn on it in a thread of its own, and how it ends.

The main thread keeps signals and the order of things; requests are the business of `routes`.
"""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from drover.coordinator.routes import Api
from drover.errors import DroverError

SHUTDOWN_SECONDS = 2
"""How long clients may take to read what is written to them at the end."""
_POLL_SECONDS = 0.05

log = structlog.get_logger()


@contextlib.contextmanager
def opened(app: FastAPI, api: Api, host: str, port: int, grace: float) -> Iterator[tuple["Server", str]]:
    """Answer requests from a thread for as long as the context lasts; the server, and its URL.

    DroverError if the address cannot be had; port 0 takes a free one.
    """
    with listen(host, port) as listener:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        server = Server(config, api, grace)
        log.debug("API is listening", url=url_of(listener))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="API", daemon=True)
        thread.start()
        try:
            yield server, url_of(listener)
        finally:
            server.hurry()
            server.should_exit = True
            thread.join()


class Server(uvicorn.Server):
    """uvicorn, which at its end first lets running answers come to theirs, within the grace; then they fail."""

    def __init__(self, config: uvicorn.Config, api: Api, grace: float) -> None:
        super().__init__(config)
        self._api = api
        self._grace = max(0.0, grace - 2 * SHUTDOWN_SECONDS) or grace / 2
        self._told = threading.Event()
        self._hurried = False
        self._ended = threading.Event()

    def wait(self) -> None:
        """Stay until SIGINT or SIGTERM, then let it come to its end; a second signal hurries it.

        DroverError if it ended by itself.
        """

        def hear(_number: int, _frame: FrameType | None) -> None:
            if self._told.is_set():
                self.hurry()
            self._told.set()

        before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while not self._told.wait(_POLL_SECONDS) and not self._ended.is_set():
                pass
            if not self._told.is_set():
                raise DroverError("the API ended by itself; the log says more")
            self._api.status.lifecycle.stopping()
            log.info("stopping", running=len(self._api.running), grace=self._grace)
            self.should_exit = True
            while not self._ended.wait(_POLL_SECONDS):
                pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hurry(self) -> None:
        """Give up what is left of the grace."""
        self._hurried = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve to the end."""
        try:
            super().run(sockets)
        finally:
            self._ended.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what runs, end what still does, then the server; new requests hear 503 meanwhile."""
        deadline = time.monotonic() + self._grace
        # an answer that ends tells nobody
        while self._api.running and time.monotonic() < deadline and not self._hurried:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        for generation in list(self._api.running):
            generation.abort("the coordinator is stopping")
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """An open port; DroverError says why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise DroverError(f"cannot listen on {host!r}: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise DroverError(
            f"cannot listen on {_shown(host)}:{port}: {reason}; choose another --port or end what uses it"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where an open port is, as a client writes it."""
    address = listener.getsockname()
    return f"http://{_shown(address[0])}:{address[1]}"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
