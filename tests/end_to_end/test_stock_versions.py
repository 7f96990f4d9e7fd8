"""A stock client of protocol 8.0 at workers that speak another version too, or instead."""

import time
from pathlib import Path

import pytest

from support import drover
from support.peer import Peer
from support.processes import free_port

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

PROMPT = "The licensor grants you"
GREEDY = ("-n", "32", "--temp", "0", "-no-cnv", "-t", "1", "-fit", "off", "-c", "512", "-p", PROMPT)


def test_beside_an_older_generation(peer: Peer, tmp_path: Path) -> None:
    alone = peer.complete("-m", drover.MODEL, *GREEDY, "--device", "none", "--no-repack", timeout=120)
    port = free_port()
    with drover.start_worker(tmp_path / "log", port, "--threads", "1", "--also", "3.6"):
        remote = ("--rpc", f"127.0.0.1:{port}", "-ngl", "99")
        through = peer.complete("-m", drover.MODEL, *GREEDY, *remote, timeout=120)
    assert through.returncode == 0, through.stderr
    assert through.stdout == alone.stdout


def test_at_a_worker_of_another_version(peer: Peer, tmp_path: Path) -> None:
    """The client aborts, as it does at any server of another version; the worker says why, once, and what to do."""
    port = free_port()
    with drover.start_worker(tmp_path / "log", port, "--threads", "1", "--protocol", "7.0") as worker:
        remote = ("--rpc", f"127.0.0.1:{port}", "-ngl", "99")
        done = peer.run("llama-completion", "-m", drover.MODEL, *GREEDY, *remote, timeout=120)
        assert done.returncode < 0
        assert "RPC server version mismatch: 7.0.0" in done.stderr
        end = time.monotonic() + 10
        while "client left" not in worker.output and time.monotonic() < end:
            time.sleep(0.05)
    assert worker.output.count("it heard that we speak 7.0.0 and left") == 1
    assert "`--protocol` and `--also` say what we speak" in worker.output
