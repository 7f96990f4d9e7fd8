"""The worker's status over HTTP: /healthz, /readyz, /metrics, /state. Read-only, and apart from the RPC port.

It opens before anything that takes time, so that a probe hears "not yet" and not a refused connection. What there is to
say comes from `status`.
"""

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog

import drover
from drover import metrics
from drover.errors import DroverError
from drover.worker.status import Status

REQUEST_SECONDS = 10.0
"""How long a client of ours may take over its request."""
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"

Answer = tuple[HTTPStatus, str, bytes]

log = structlog.get_logger()


@contextmanager
def opened(host: str, port: int, status: Status) -> Iterator[int]:
    """Answer on this address, from a thread, for as long as the context lasts; gives the port. DroverError if taken."""
    exposition = metrics.exposition(status.figures)
    answers: dict[str, Callable[[], Answer]] = {
        "/healthz": lambda: (HTTPStatus.OK, _TEXT, b"ok\n"),
        "/readyz": lambda: _readiness(status),
        "/metrics": lambda: (HTTPStatus.OK, metrics.CONTENT_TYPE, exposition()),
        "/state": lambda: (HTTPStatus.OK, _JSON, json.dumps(status.state()).encode() + b"\n"),
    }
    with _listening(host, port, answers) as server:
        thread = threading.Thread(target=server.serve_forever, name="status", daemon=True)
        thread.start()
        taken: int = server.server_address[1]
        log.info("status is open", url=f"http://{host}:{taken}")
        try:
            yield taken
        finally:
            server.shutdown()
            thread.join()


def _readiness(status: Status) -> Answer:
    why = status.why_not_ready()
    if why is None:
        return HTTPStatus.OK, _TEXT, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{why}\n".encode()


def _listening(host: str, port: int, answers: dict[str, Callable[[], Answer]]) -> "_Server":
    try:
        return _Server((host, port), answers)
    except OSError as error:
        raise DroverError(
            f"cannot listen on {host}:{port} for the status: {error.strerror or error}; choose another --http port"
        ) from None


class _Server(ThreadingHTTPServer):
    """A thread a request; none keeps the process alive."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], answers: dict[str, Callable[[], Answer]]) -> None:
        self.answers = answers
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, without the look-up of our own name that the standard library does here."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  the standard library's
        """Log what went wrong with one request: a client that goes away in the middle is nobody's fault."""
        log.debug("status request failed", peer=str(client_address), why=repr(sys.exception()))


class _Handler(BaseHTTPRequestHandler):
    """One GET or HEAD."""

    server_version = f"drover/{drover.__version__}"
    sys_version = ""
    timeout = REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Answer by path."""
        path = self.path.partition("?")[0]
        answer = self.server.answers.get(path)
        status, kind, body = answer() if answer else (HTTPStatus.NOT_FOUND, _TEXT, b"no such path\n")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  the standard library's name

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the standard library's name
        """Probes come every few seconds: they are no news."""
