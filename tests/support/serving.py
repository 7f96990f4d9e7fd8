"""A server in a thread of the test, with what it logs: for tests of what one client does to the others."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from structlog.testing import capture_logs
from structlog.typing import EventDict

from drover.ggml.ops import Op
from drover.rpc import messages as m
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.memory import SharedDevice
from drover.worker.server import Server
from support.client import Bench, Client
from support.worker_thread import serving

LIMIT = 1 << 24


class Worker:
    """A running server and what it logged."""

    def __init__(self, server: Server, port: int, device: ReferenceDevice, logs: list[EventDict]) -> None:
        self.server = server
        self.port = port
        self.device = device
        self.logs = logs

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, self.logs
            time.sleep(0.005)

    def wait_logged(self, count: int) -> list[EventDict]:
        self.wait(lambda: len(self.said()) >= count)
        return self.said()

    def refused(self) -> dict[str, int]:
        """What was refused so far, by reason."""
        return {reason: count for reason, count in self.server._tally.refused.items() if count}

    def said(self) -> list[EventDict]:
        return [entry for entry in self.logs if entry["log_level"] != "debug"]


@contextmanager
def running(device: ReferenceDevice, **options: Any) -> Iterator[Worker]:
    server = Server([SharedDevice(device)], **options)
    with capture_logs() as logs:
        with serving(server) as port:
            yield Worker(server, port, device, logs)
        assert not server.clients


def works(client: Client) -> bool:
    """Whether a client gets the right answer to a graph."""
    bench = Bench.on(client)
    a, b = bench.tensor(3), bench.tensor(3)
    total = bench.node(Op.ADD, a, b)
    client.set(a, [1, 2, 3])
    client.set(b, [10, 20, 30])
    client.tell(bench.graph(total))
    right = bool((client.get(total) == [11, 22, 33]).all())
    client.tell(m.FreeBuffer(bench.handle))
    return right
