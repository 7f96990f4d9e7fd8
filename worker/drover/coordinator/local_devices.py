"""Devices of this machine as stages: worker processes of our own on loopback, which end with the coordinator.

One path for all devices: a local one is driven over the same protocol as any other. The worker chooses a free port and
prints it.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from drover.coordinator.remote import RemoteDevice, connect
from drover.herd import Herd, Process

_ENDPOINT = re.compile(r"^\s*endpoint\s*: (\S+)\n", re.MULTILINE)
_OPEN = re.compile(r"^\s*transport\s*: ", re.MULTILINE)


@contextmanager
def opened(names: Sequence[str], threads: int | None, verbose: bool = False) -> Iterator[list[RemoteDevice]]:
    """One worker process a device name ("cpu"); WorkerError with its last words if one does not start."""
    options = ["--host=127.0.0.1", "--port=0", *([f"--threads={threads}"] if threads else [])]
    with tempfile.TemporaryDirectory(prefix="drover-") as folder, Herd(Path(folder), verbose) as herd:
        processes = [
            herd.start(f"local-{name}-{number}", "drover.worker", *options, f"--device={name}")
            for number, name in enumerate(names)
        ]
        devices = [device for process in processes for device in herd.wait_for(process.name, partial(_reach, process))]
        try:
            yield devices
        finally:
            for device in devices:
                device.close()


def address_of(worker: Process) -> str | None:
    """Where a worker process listens, as it printed it; None before its port is open."""
    text = worker.output.text
    endpoint = _ENDPOINT.search(text)
    return endpoint[1] if endpoint and _OPEN.search(text) else None


def _reach(worker: Process) -> list[RemoteDevice] | None:
    """The devices of a worker, once it has opened its port."""
    endpoint = address_of(worker)
    return connect(endpoint, name=worker.name) if endpoint else None
