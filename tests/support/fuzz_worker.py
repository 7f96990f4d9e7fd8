"""A worker process under fire, and what can be seen of it from outside: its state, its log, what it holds."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from drover.ggml.ops import Op
from drover.rpc import messages as m
from drover.rpc.versions import CURRENT, Version
from support.client import Bench, Client
from support.drover import START_SECONDS
from support.old_client import DIALECTS, OldClient, Record
from support.processes import Running, free_port

PATIENCE = 30.0
"""Seconds in which a worker answers or closes, whatever it was sent; it may be on a loaded machine."""
OPTIONS = ("--device", "cpu,reference", "--threads", "2", "--memory", "1GiB", "--max-client-memory", "64MiB")
_TESTS = Path(__file__).parents[1]
_REFUSED = re.compile(r'drover_worker_refused_total\{reason="(\w+)"\} (\S+)')
_SERVED = re.compile(r"drover_worker_commands_total\{.*\} (\S+)")


class FindingError(AssertionError):
    """Something that a worker must not do."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process takes of the system: bytes in memory, files, threads."""

    resident: int
    files: int
    threads: int


class Target:
    """A guarded worker process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self.http = free_port(), free_port()
        self.log = folder / "worker.log"
        cache = folder / "cache"
        command = [sys.executable, "-m", "support.guarded_worker", "--port", str(self.port), "--http", str(self.http)]
        environment = {"PYTHONPATH": str(_TESTS), "LLAMA_CACHE": str(cache)}
        limits = ("--frame-timeout", "5", "--cache", "--cache-size", "1MiB")
        self.running = Running([*command, *OPTIONS, *limits, *options], self.log, environment)
        try:
            self.running.wait_port(self.port, START_SECONDS)
        except BaseException:
            self.running.stop()
            raise

    def state(self) -> dict[str, Any]:
        """What it says of itself."""
        found: dict[str, Any] = json.loads(self._page("state"))
        return found

    def refused(self) -> dict[str, int]:
        """How often it refused something, by reason."""
        return {reason: int(float(count)) for reason, count in _REFUSED.findall(self._page("metrics"))}

    def served(self) -> int:
        """Frames it has served."""
        return sum(int(float(count)) for count in _SERVED.findall(self._page("metrics")))

    def end(self, seconds: float = 0.0) -> str:
        """How it has ended, if it has or does within so many seconds, and its last words."""
        with suppress(subprocess.TimeoutExpired):
            self.running.popen.wait(seconds)
        status = self.running.popen.returncode
        if status is None:
            return ""
        return f"the worker ended: {signal.Signals(-status).name if status < 0 else status}\n{self.running.describe()}"

    def require_life(self) -> None:
        """It runs."""
        if ended := self.end():
            raise FindingError(ended)

    def internal_errors(self) -> list[str]:
        """Log lines of errors that nobody has foreseen."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if re.search(r"\[\S*error|Traceback|Exception", line)]

    def rest(self) -> Footprint:
        """What it takes once everybody has left; FindingError if it still holds something then."""
        end = time.monotonic() + PATIENCE
        while left := self.state()["clients"]:
            if time.monotonic() > end:
                raise FindingError(f"clients that left are still there: {left}")
            time.sleep(0.02)
        # Asked anew: the last client may have gone after devices were looked at and before clients were.
        held = [row for row in self.state()["devices"] if row["free"] != row["total"]]
        if held:
            raise FindingError(f"memory is held for nobody: {held}")
        looks = []
        for _ in range(5):  # the thread that has answered us may not have ended yet
            time.sleep(0.1)
            looks.append(self._footprint())
        return Footprint(*(min(getattr(look, word) for look in looks) for word in Footprint.__slots__))

    def _footprint(self) -> Footprint:
        process = Path("/proc", str(self.running.popen.pid))
        rows = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        resident = int(rows["VmRSS"].split()[0]) << 10
        return Footprint(resident, len(list((process / "fd").iterdir())), int(rows["Threads"]))

    def _page(self, name: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/{name}", timeout=PATIENCE) as answer:
                text: str = answer.read().decode()
        except OSError as error:
            self.require_life()
            raise FindingError(f"/{name} is not answered: {error}") from error
        return text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.stop()


class Neighbour:
    """An honest client, connected all the time: what it computes is right, and what it keeps stays as it was."""

    def __init__(self, port: int, devices: Sequence[int]) -> None:
        self._client = Client(port)
        self._benches = [Bench.on(self._client, 4096, device) for device in devices]
        self._rng = np.random.default_rng(7)
        self._kept = []
        for bench in self._benches:
            kept, a, b = bench.tensor(500), bench.tensor(8, 3), bench.tensor(8, 3)
            total, product = bench.node(Op.ADD, a, b), bench.node(Op.MUL_MAT, a, b, extents=(3, 3))
            values = self._rng.standard_normal(500).astype(np.float32)
            self._client.set(kept, values)
            self._client.tell(bench.graph(total, product, uid=9))
            self._kept.append((kept, values.tobytes(), a, b, total, product))

    def check(self) -> None:
        """Compute once on every device; FindingError if anything is not as it must be."""
        try:
            for bench, (kept, before, a, b, total, product) in zip(self._benches, self._kept, strict=True):
                x, y = (self._rng.integers(-8, 9, (3, 8)).astype(np.float32) for _ in range(2))
                self._client.set(a, x)
                self._client.set(b, y)
                self._client.tell(m.GraphRecompute(bench.device, 9))
                if self._client.get(total).tobytes() != (x + y).tobytes():
                    raise FindingError(f"a sum on device {bench.device} is wrong")
                if self._client.get(product).tobytes() != (y @ x.T).tobytes():
                    raise FindingError(f"a product on device {bench.device} is wrong")
                if self._client.get(kept).tobytes() != before:
                    raise FindingError(f"a neighbour's bytes on device {bench.device} have changed")
        except (OSError, EOFError) as error:
            raise FindingError(f"the honest client is not served: {error!r}") from error

    def leave(self) -> None:
        """Go."""
        self._client.close()


class OldNeighbour:
    """The same of an older version, on the first device."""

    def __init__(self, port: int, version: Version) -> None:
        (dialect,) = (dialect for dialect in DIALECTS.values() if dialect.number == version.number)
        self._client = OldClient(port, dialect)
        self._client.hello()
        handle, base = self._client.buffer(4096)
        self._kept, self._a, self._b = (Record(i, handle, base + 64 * i) for i in range(1, 4))
        self._sum = Record(4, handle, base + 64 * 4, op=int(Op.ADD), src=(2, 3))
        self._before = bytes(range(16))
        self._client.set(self._kept, self._before)
        self._turn = 0

    def check(self) -> None:
        """Compute once; FindingError if anything is not as it must be."""
        self._turn += 1
        x, y = np.arange(4, dtype=np.float32) + self._turn, np.full(4, 7, np.float32)
        try:
            self._client.set(self._a, x.tobytes())
            self._client.set(self._b, y.tobytes())
            self._client.compute([self._sum], [self._a, self._b, self._sum])
            if self._client.get(self._sum, 16) != (x + y).tobytes():
                raise FindingError("an older client's sum is wrong")
            if self._client.get(self._kept, 16) != self._before:
                raise FindingError("an older neighbour's bytes have changed")
        except (OSError, EOFError) as error:
            raise FindingError(f"the honest client is not served: {error!r}") from error

    def leave(self) -> None:
        """Go."""
        self._client.close()


def neighbour(port: int, version: Version) -> Neighbour | OldNeighbour:
    """An honest client of this version."""
    try:
        return Neighbour(port, (0, 1)) if version is CURRENT else OldNeighbour(port, version)
    except (OSError, EOFError) as error:
        raise FindingError(f"the honest client is not served: {error!r}") from error
