"""The `drover` command as a user starts it: workers and coordinators as processes of a test."""

import sys
from collections.abc import Sequence
from pathlib import Path

from support.processes import Running

COMMAND = str(Path(sys.executable).with_name("drover"))
REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "examples" / "license-demo.Q4_K_M.gguf"
START_SECONDS = 240
"""A first start compiles the kernels."""


def start_worker(log: Path, port: int, *options: str) -> Running:
    """A worker on 127.0.0.1:`port`; returns when the port is open."""
    worker = Running([COMMAND, "worker", "--port", str(port), *options], log)
    try:
        return worker.wait_port(port, START_SECONDS)
    except BaseException:
        worker.stop()
        raise


def start_coordinator(log: Path, port: int, workers: Sequence[int], *options: str, model: Path = MODEL) -> Running:
    """A coordinator on 127.0.0.1:`port` that drives the workers on these ports; returns when it is ready."""
    servers = ",".join(f"127.0.0.1:{worker}" for worker in workers)
    coordinator = Running([COMMAND, "serve", str(model), "--rpc", servers, "--port", str(port), *options], log)
    try:
        return coordinator.wait_healthy(port, START_SECONDS)
    except BaseException:
        coordinator.stop()
        raise
