"""Fixtures that several folders share: log folders, running workers, the stock peer."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from drover.worker import kernels
from drover.worker.devices.cpu.kernel_cache import cache_directory
from support import drover
from support.peer import Peer, PeerUnavailableError
from support.processes import free_port

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell's background job ignores SIGINT, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Read when numba is imported. By default kernels stay beside the sources, even when their callees have changed.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory(Path(tempfile.gettempdir(), "drover-test-kernels"))))


_MANY_TESTS = 1000


def pytest_collection_finish(session: pytest.Session) -> None:
    """A run of nearly everything has several processes compile the kernels before it starts."""
    if len(session.items) > _MANY_TESTS and not session.config.option.collectonly:
        kernels.compile_apart()


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command that a test ran in this process has sent the log to that test's standard error; nobody else's."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the output of processes."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def peer() -> Peer:
    """The installed stock llama.cpp; without it the test is skipped with the reason."""
    try:
        return Peer.find()
    except PeerUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def drover_workers(logs: Path) -> Iterator[list[int]]:
    """Ports of two Drover workers that every test of the run may use."""
    with ExitStack() as stack:
        ports = [free_port(), free_port()]
        for port in ports:
            stack.enter_context(drover.start_worker(logs / f"drover-worker-{port}.log", port, "--threads", "1"))
        yield ports


@pytest.fixture(scope="session")
def stock_workers(peer: Peer, logs: Path) -> Iterator[list[int]]:
    """Ports of two stock workers; each serves one client at a time."""
    with ExitStack() as stack:
        ports = [free_port(), free_port()]
        for port in ports:
            stack.enter_context(peer.start_worker(logs / f"stock-worker-{port}.log", port))
        yield ports
