"""A worker serves everyone: clients that idle, stop in the middle of a frame, misbehave, or work at the same time."""

import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drover.rpc import messages as m
from support import drover
from support.client import Client
from support.peer import Peer
from support.processes import free_port

pytestmark = pytest.mark.timeout(300)

GOLDEN = Path(__file__).parents[1] / "rpc" / "golden"
HALF_FRAMES = ("HELLO", "SET_TENSOR", "GRAPH_COMPUTE", "GET_ALLOC_SIZE", "GET_TENSOR")


def half(name: str) -> bytes:
    frame = (GOLDEN / f"{name}.request").read_bytes()
    return frame[: len(frame) // 2]


def allocation(client: Client, size: int) -> int:
    """Take memory, as a client with a model does; its handle."""
    reply = client.ask(m.AllocBuffer(0, size))
    assert reply.remote_ptr
    handle: int = reply.remote_ptr
    return handle


def complete(peer: Peer, workers: Sequence[int], prompt: str = "This program is") -> subprocess.CompletedProcess[str]:
    placed = ("-ngl", "99", "--rpc", ",".join(f"127.0.0.1:{port}" for port in workers))
    asked = ("-p", prompt, "-n", "16", "--temp", "0", "-no-cnv", "-t", "1", "-c", "256")
    return peer.complete("-m", drover.MODEL, *asked, *placed, timeout=200)


def test_second_client_while_first_is_idle(drover_workers: list[int]) -> None:
    port = drover_workers[0]
    with Client(port) as first:
        handle = allocation(first, 4096)
        with Client(port) as second:
            assert second.ask(m.DeviceCount()).count >= 1
        assert first.ask(m.BufferGetBase(handle)).base


@pytest.mark.parametrize("name", HALF_FRAMES)
def test_second_client_while_first_sent_half_a_frame(name: str, drover_workers: list[int]) -> None:
    port = drover_workers[0]
    with Client(port, greet=name != "HELLO") as first:
        first.raw(half(name))
        with Client(port) as second:
            assert second.ask(m.DeviceCount()).count >= 1


def test_misbehaving_client_costs_only_its_own_connection(drover_workers: list[int]) -> None:
    port = drover_workers[0]
    with Client(port) as first, Client(port) as bad:
        handle = allocation(first, 4096)
        bad.raw(bytes([99]) + bytes(8))
        assert bad.dropped()
        assert first.ask(m.BufferGetBase(handle)).base


def test_memory_of_a_client_that_went_is_free_again(drover_workers: list[int]) -> None:
    port = drover_workers[0]
    with Client(port) as watcher:
        before = watcher.ask(m.GetDeviceMemory(0)).free
        with Client(port) as client:
            allocation(client, 64 << 20)
            client.raw(half("SET_TENSOR"))
            assert watcher.ask(m.GetDeviceMemory(0)).free <= before - (64 << 20) or before == 0
        for _ in range(1000):
            if watcher.ask(m.GetDeviceMemory(0)).free == before:
                return
        pytest.fail("the memory of a closed connection is still taken")


@pytest.mark.interop
def test_stock_client_beside_idle_and_half_sent_ones(peer: Peer, drover_workers: list[int]) -> None:
    alone = complete(peer, drover_workers)
    assert alone.returncode == 0, alone.stderr
    with Client(drover_workers[0]) as idle, Client(drover_workers[1]) as halted:
        allocation(idle, 1 << 20)
        halted.raw(half("GRAPH_COMPUTE"))
        beside = complete(peer, drover_workers)
    assert beside.returncode == 0, beside.stderr
    assert beside.stdout == alone.stdout


@pytest.mark.interop
def test_stock_clients_at_the_same_time(peer: Peer, drover_workers: list[int]) -> None:
    prompts = ["This program is", "Everyone is permitted"]
    one_by_one = [complete(peer, drover_workers, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: complete(peer, drover_workers, prompt), prompts))
    assert [done.returncode for done in together] == [0, 0], [done.stderr[-500:] for done in together]
    assert [done.stdout for done in together] == [done.stdout for done in one_by_one]


@pytest.mark.interop
def test_stock_benches_at_the_same_time(peer: Peer, drover_workers: list[int]) -> None:
    """Two on one worker, and a third client whose text is what it was alone."""
    port = drover_workers[:1]
    alone = complete(peer, port)

    def bench(_: int) -> list[float]:
        asked = ("-p", "64", "-n", "16", "-r", "3", "-o", "json", "-ngl", "99", "--rpc", f"127.0.0.1:{port[0]}")
        done = peer.run("llama-bench", "-m", drover.MODEL, *asked, timeout=200)
        assert done.returncode == 0, done.stderr
        return [row["avg_ts"] for row in json.loads(done.stdout)]

    with ThreadPoolExecutor(2) as pool:
        benches = pool.map(bench, range(2))
        beside = complete(peer, port)
        speeds = list(benches)
    assert beside.stdout == alone.stdout
    assert [len(measured) for measured in speeds] == [2, 2]
    assert min(map(min, speeds)) > 0


@pytest.mark.interop
def test_stock_client_after_another_one_was_killed(peer: Peer, drover_workers: list[int], tmp_path: Path) -> None:
    """A stock client that is killed in the middle of its work leaves the worker whole."""
    port = free_port()
    server = peer.start_server(tmp_path / "server.log", port, drover.MODEL, drover_workers)
    server.popen.kill()
    server.popen.wait(10)
    after = complete(peer, drover_workers)
    assert after.returncode == 0, after.stderr
