"""The weight cache as clients meet it: what `drover cache seed` stored is sent by nobody, however layers are split."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drover import cache_command
from drover.coordinator.model_file import ModelFile
from support import drover, make_gguf
from support.peer import Peer
from support.processes import free_port

ASKED_ABOVE = 10 << 20
"""Bytes from which on a stock client asks for a tensor before it sends it (docs/protocol.md section 4.1)."""
SHAPE = make_gguf.Shape(layers=2, embd=1024, ff=5632, heads=8, kv=8, vocab=8000, ctx=256)


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker with a cache."""

    port: int
    http: int

    def state(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/state", timeout=10) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some tensors that a stock client asks for, and some that are too small for it."""
    path = tmp_path_factory.mktemp("model") / "wide.gguf"
    make_gguf.write(path, SHAPE)
    return path


@contextmanager
def workers(count: int, folder: Path, *options: str) -> Iterator[list[Worker]]:
    """Workers on one cache folder."""
    (folder / "rpc").mkdir(parents=True, exist_ok=True)
    made = [Worker(free_port(), free_port()) for _ in range(count)]
    with ExitStack() as stack:
        for worker in made:
            log = folder / f"worker-{worker.port}.log"
            asked = ("--threads", "1", "--http", str(worker.http), "--memory", "1GiB", *options)
            stack.enter_context(drover.start_worker(log, worker.port, "--cache-dir", str(folder), *asked))
        yield made


def sums(made: Sequence[Worker], *names: str) -> tuple[int, ...]:
    states = [worker.state()["cache"] for worker in made]
    return tuple(sum(state[name] for state in states) for name in names)


def large(model: Path) -> dict[str, int]:
    """Tensors of the model's layers that a stock client asks for; it keeps the token embedding itself."""
    with ModelFile(model) as file:
        sizes = {name: info.nbytes for name, info in file.tensors.items()}
    return {name: size for name, size in sizes.items() if size > ASKED_ABOVE and name != "token_embd.weight"}


@pytest.mark.interop
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["mmap", "none", "dio"])
def test_a_stock_client_sends_nothing_that_was_seeded(peer: Peer, model: Path, tmp_path: Path, mode: str) -> None:
    """Nothing of what it asks for, that is: what is smaller it sends unasked."""
    cache_command.seed(model, tmp_path)
    wanted = large(model)
    assert len(wanted) >= 5
    with workers(2, tmp_path) as made:
        servers = ",".join(f"127.0.0.1:{worker.port}" for worker in made)
        asked = ("-p", "1", "-n", "0", "-r", "1", "--no-warmup", "--load-mode", mode, "-ngl", "99", "--rpc", servers)
        done = peer.run("llama-bench", "-m", model, *asked, timeout=200)
        assert done.returncode == 0, done.stderr
        assert sums(made, "hits", "misses", "hitBytes", "missBytes") == (len(wanted), 0, sum(wanted.values()), 0)
        with ModelFile(model) as file:
            small = sum(info.nbytes for info in file.tensors.values() if info.nbytes <= ASKED_ABOVE)
        received = sum(worker.state()["received"] for worker in made)
        assert received < small + (4 << 20)


@pytest.mark.parametrize("split", ["1,1", "3,1"])
def test_our_coordinator_sends_nothing_at_all_of_what_was_seeded(tmp_path: Path, split: str) -> None:
    cache_command.seed(drover.MODEL, tmp_path)
    with workers(2, tmp_path) as made:
        servers = ",".join(f"127.0.0.1:{worker.port}" for worker in made)
        asked = ("--rpc", servers, "--tensor-split", split, "--ctx-size", "64")
        command = [drover.COMMAND, "load", drover.MODEL, *asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["bytesUploaded"] == 0
        assert sums(made, "misses", "missBytes") == (0, 0)
        assert report["bytesCached"] == sums(made, "hitBytes")[0] > 0
