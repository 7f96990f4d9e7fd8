"""What the weight cache saves: a model loaded by the stock client and by our coordinator, uncached and cached.

usage: python tests/bench_cache.py [--models wide.Q8_0,1b.Q4_K_M] [--clients stock,ours] [--rounds 3] [--gbit 1]
Times are of whole processes (`llama-bench` with one token; `drover load` says its loading alone), on loopback and
through a relay that passes on so many Gbit/s. Beside them: what the FNV-1a hash of the tensors that the client asks for
takes by itself, and processor seconds, which say more than the clock where others use the machine.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from drover.coordinator.model_file import ModelFile
from drover.hashing import fnv1a
from drover.worker.devices.cpu.kernel_cache import cache_directory
from support import drover
from support.models import model_file
from support.peer import Peer
from support.processes import free_port

ASKED_ABOVE = 10 << 20
TOOL_SECONDS = 900
Load = Callable[[Peer, Path, int], float]


class Link:
    """A relay to a port of this machine that passes on so many bytes a second each way; a context manager.

    `thinking` adds up how long the client took from each answer to its next request; `connected` is how long it spoke
    on the connection on which it spoke for longest, the one that carries the weights.
    """

    def __init__(self, target: int, rate: float) -> None:
        self._target, self._rate = target, rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.thinking = self.connected = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                worker = socket.create_connection(("127.0.0.1", self._target))
                for end in (client, worker):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                answered: list[float] = []
                for ends in ((client, worker, None), (worker, client, answered)):
                    threading.Thread(target=self._pass_on, args=(*ends, answered), daemon=True).start()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, mark: list[float] | None, answered: list[float]
    ) -> None:
        due, first = 0.0, time.perf_counter()
        with suppress(OSError):
            while data := source.recv(256 << 10):
                now = time.perf_counter()
                if mark is None and answered:
                    self.thinking += now - answered[0]
                    answered.clear()
                if mark is None:
                    self.connected = max(self.connected, now - first)
                due = max(due, now) + len(data) / self._rate
                time.sleep(max(0.0, due - now))
                sink.sendall(data)
                if mark is not None:
                    mark[:] = [time.perf_counter()]
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def worker(folder: Path | None) -> Iterator[tuple[int, int, int]]:
    """A worker with this cache folder, or none: its port, that of its status, its process id."""
    port, http = free_port(), free_port()
    cache = () if folder is None else ("--cache-dir", str(folder))
    with (
        tempfile.TemporaryDirectory() as logs,
        drover.start_worker(Path(logs, "log"), port, "--http", str(http), *cache) as running,
    ):
        yield port, http, running.popen.pid


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Processor time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stock(peer: Peer, model: Path, port: int) -> float:
    """Seconds of a whole `llama-bench` that computes one token."""
    asked = ("-p", "1", "-n", "0", "-r", "1", "--no-warmup", "-ngl", "99", "--rpc", f"127.0.0.1:{port}")
    start = time.perf_counter()
    done = peer.run("llama-bench", "-m", model, *asked, timeout=TOOL_SECONDS)
    if done.returncode:
        raise SystemExit(f"llama-bench ended with {done.returncode}\n{done.stderr[-2000:]}")
    return time.perf_counter() - start


def ours(_peer: Peer, model: Path, port: int) -> float:
    """Seconds that `drover load` took to put the weights in place."""
    command = [drover.COMMAND, "load", str(model), "--rpc", f"127.0.0.1:{port}", "--ctx-size", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True)
    return float(json.loads(done.stdout)["loadSeconds"])


CLIENTS: dict[str, Load] = {"stock": stock, "ours": ours}


def state(http: int) -> dict[str, int]:
    """Bytes received, and hit bytes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http}/state", timeout=10) as answer:
        found = json.load(answer)
    return {"received": found["received"], "hits": (found["cache"] or {"hitBytes": 0})["hitBytes"]}


def hash_seconds(model: Path) -> tuple[int, float, float]:
    """Bytes that the stock client asks for by their hash; how long that hash takes, and its processor time."""
    with ModelFile(model) as file:
        wanted = [
            file.data(name)
            for name, info in file.tensors.items()
            if info.nbytes > ASKED_ABOVE and name != "token_embd.weight"
        ]
        for data in wanted:
            bytes(data)  # from the disk, not to be timed
        start, processor = time.perf_counter(), time.process_time()
        for data in wanted:
            fnv1a(data)
        return sum(map(len, wanted)), time.perf_counter() - start, time.process_time() - processor


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="wide.Q8_0,1b.Q4_K_M")
    parser.add_argument("--clients", default="stock,ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gbit", type=float, default=1.0)
    options = parser.parse_args()
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory(Path(tempfile.gettempdir(), "drover-test-kernels"))))
    peer = Peer.find()
    for name in options.models.split(","):
        model = model_file(peer, *name.split("."))
        seconds: dict[str, list[float]] = defaultdict(list)
        for turn in range(options.rounds):
            asked, hashing, processor = hash_seconds(model)
            seconds[f"FNV-1a of the {asked} bytes asked for"].append(hashing)
            seconds["FNV-1a of them: processor"].append(processor)
            for label in options.clients.split(","):
                measure(peer, model, label, CLIENTS[label], options.gbit, seconds)
            print(f"{name} round {turn + 1}, load average {os.getloadavg()[0]:.1f}", flush=True)
        print(f"{name}: {model.stat().st_size} bytes")
        for what, values in seconds.items():
            print(f"  {what:60} {statistics.median(values):7.2f} ({min(values):.2f} to {max(values):.2f})")
    return 0


def measure(peer: Peer, model: Path, label: str, load: Load, gbit: float, seconds: dict[str, list[float]]) -> None:
    """One load of each kind, by turns."""
    with tempfile.TemporaryDirectory() as folder:
        for kind, cache in (("no cache", None), ("first load", Path(folder)), ("second load", Path(folder))):
            with worker(cache) as (port, http, pid), Link(port, gbit * 125e6) as link:
                seconds[f"{label}, loopback, {kind}"].append(load(peer, model, port))
                if kind == "first load":
                    continue
                before, spent, ended = state(http), cpu_seconds(pid), children_seconds()
                name = f"{label}, {gbit:g} Gbit/s, {kind}"
                seconds[name].append(load(peer, model, link.port))
                seconds[f"{name}: connected"].append(link.connected)
                seconds[f"{name}: from answers to requests"].append(link.thinking)
                seconds[f"{name}: processor, client"].append(children_seconds() - ended)
                seconds[f"{name}: processor, worker"].append(cpu_seconds(pid) - spent)
                moved = {key: value - before[key] for key, value in state(http).items()}
                print(f"{label}, {kind}: {moved['received']} bytes, and {moved['hits']} from the cache", flush=True)


if __name__ == "__main__":
    sys.exit(main())
