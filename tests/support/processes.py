"""Processes that tests start: output captured, port awaited, always ended.

Nothing here knows what the process is; a process never outlives the test run that started it.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self


class Running:
    """A started process whose standard output and error go to one log file; a context manager that ends it."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.command = [str(part) for part in command]
        self.log = log
        with log.open("wb") as sink:
            self.popen = subprocess.Popen(
                [*_die_with_parent(), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )

    @property
    def output(self) -> str:
        """Everything it has printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None

    @property
    def processor_seconds(self) -> float:
        """What it has computed so far."""
        words = Path("/proc", str(self.popen.pid), "stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self, timeout: float) -> int:
        """Wait for its own end and return the exit status."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s: {self.describe()}") from None

    def wait_port(self, port: int, timeout: float = 120) -> Self:
        """Wait until something listens on 127.0.0.1:`port`; an early end of the process fails at once."""
        end = time.monotonic() + timeout
        while not listening(port):
            if not self.alive:
                raise AssertionError(f"ended with status {self.popen.returncode}: {self.describe()}")
            if time.monotonic() > end:
                raise AssertionError(f"port {port} not open after {timeout} s: {self.describe()}")
            time.sleep(0.05)
        return self

    def wait_healthy(self, port: int, timeout: float = 120) -> Self:
        """Wait until GET /health on 127.0.0.1:`port` answers 200; an early end of the process fails at once."""
        end = time.monotonic() + timeout
        self.wait_port(port, timeout)
        while not _healthy(port):
            if not self.alive:
                raise AssertionError(f"ended with status {self.popen.returncode}: {self.describe()}")
            if time.monotonic() > end:
                raise AssertionError(f"port {port} not healthy after {timeout} s: {self.describe()}")
            time.sleep(0.05)
        return self

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end, force it after ten seconds; returns the exit status."""
        if self.alive:
            self.popen.send_signal(sign)
        try:
            return self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait(10)

    def describe(self) -> str:
        """Command and last lines of output, for a failure message."""
        tail = "\n".join(self.output.splitlines()[-25:])
        return f"{' '.join(self.command)}\n{tail}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody used a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def listening(port: int) -> bool:
    """Whether 127.0.0.1:`port` is in the kernel's table of listening sockets: no connection is made."""
    wanted = f"{port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A" and local.rpartition(":")[2] == wanted:
            return True
    return False


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


def _die_with_parent() -> list[str]:
    """A prefix that makes the kernel end the process when the test run is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
