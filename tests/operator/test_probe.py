"""The probe against real workers, and against what is none."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from drover.errors import WorkerError
from drover.rpc.messages import VERSION
from drover_operator.probe import device_memory
from support.worker_thread import worker


def test_what_a_worker_offers() -> None:
    with worker(devices=2, limit=32 << 20) as endpoint:
        host, _, port = endpoint.partition(":")
        assert device_memory(host, int(port)) == [32 << 20, 32 << 20]


@contextmanager
def peer(act: Callable[[socket.socket], None]) -> Iterator[int]:
    """Someone who listens, and does with the first client what he likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                act(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(5)


def hello(major: int) -> Callable[[socket.socket], None]:
    def act(client: socket.socket) -> None:
        client.recv(4096)
        reply = bytes([major, VERSION[1], VERSION[2], 0]) + bytes(24)
        client.sendall(len(reply).to_bytes(8, "little") + reply)
        client.recv(4096)

    return act


def drip(client: socket.socket) -> None:
    client.recv(4096)
    with suppress(OSError):  # the probe has gone
        for _ in range(8):
            client.sendall(b"\0")
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (lambda client: client.recv(4096), "hung up: it is no ggml RPC server"),
        (lambda client: time.sleep(0.6), r"did not answer within 0\.3 s"),
        (drip, r"did not answer within 0\.3 s"),
        (
            lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3),
            "cannot be used: HELLO was answered with",
        ),
        (hello(3), "speaks ggml RPC 3.*use workers of the operator's own version"),
    ],
    ids=["hangs up", "is silent", "drips", "speaks HTTP", "is old"],
)
def test_what_is_no_worker_is_said_so(act: Callable[[socket.socket], None], fault: str) -> None:
    with peer(act) as port, pytest.raises(WorkerError, match=fault):
        device_memory("127.0.0.1", port, seconds=0.3)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(WorkerError, match=f"the worker at 127.0.0.1:{port} cannot be reached: Connection refused"):
        device_memory("127.0.0.1", port)
