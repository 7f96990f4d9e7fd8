"""A real worker in a thread of the test: its server and sessions on the reference device, on a free port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from drover.rpc.versions import pair
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.memory import SharedDevice
from drover.worker.server import Server, bind
from drover.worker.store import Store


@contextmanager
def worker(
    devices: int = 1, limit: int = 64 << 20, store: Store | None = None, protocol: str = "8.0", also: str | None = None
) -> Iterator[str]:
    """Endpoint of a worker that offers `devices` reference devices of `limit` bytes each."""
    shared = [SharedDevice(ReferenceDevice(limit)) for _ in range(devices)]
    with serving(Server(shared, store, versions=pair(protocol, also))) as port:
        yield f"127.0.0.1:{port}"


@contextmanager
def serving(server: Server) -> Iterator[int]:
    """A free port of 127.0.0.1 on which a server serves in a thread, until the context ends."""
    listener = bind("127.0.0.1", 0)
    server.open(listener)
    thread = threading.Thread(target=server.serve, args=(listener,), name="worker")
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        thread.join()
