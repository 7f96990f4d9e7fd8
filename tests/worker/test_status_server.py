"""The worker's status over HTTP, from before the port is open until the worker stops."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drover.errors import DroverError
from drover.ggml.ops import Op
from drover.ggml.types import I32
from drover.hashing import fnv1a
from drover.rpc import messages as m
from drover.worker import status_server
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.memory import SharedDevice
from drover.worker.server import Server, bind
from drover.worker.status import Status
from drover.worker.store import Store
from drover.worker.tally import Tally
from support.client import Bench, Client

LIMIT = 1 << 24


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics(port: int) -> dict[str, float]:
    lines = [line for line in get(port, "/metrics")[1].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


class Watched:
    """A worker with a status: the status's port, the RPC port, and the parts."""

    def __init__(self, folder: Path) -> None:
        self.tally = Tally()
        self.status = Status(self.tally)
        self.store = Store(folder)
        self.device = SharedDevice(ReferenceDevice(LIMIT))
        self.server = Server([self.device], self.store, tally=self.tally)
        self.http = self.rpc = 0


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    made = Watched(folder)
    with status_server.opened("127.0.0.1", 0, made.status) as made.http, bind("127.0.0.1", 0) as listener:
        made.server.open(listener)
        made.status.opened([made.device], made.server, made.store)
        made.rpc = listener.getsockname()[1]
        thread = threading.Thread(target=made.server.serve, args=(listener,))
        thread.start()
        try:
            yield made
        finally:
            made.server.stop()
            thread.join()


def test_readiness_follows_the_phases() -> None:
    status = Status(Tally())
    with status_server.opened("127.0.0.1", 0, status) as port:
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/readyz")[0] == 503
        assert "kernels" in get(port, "/readyz")[1]
        assert json.loads(get(port, "/state")[1])["phase"] == "starting"
        assert metrics(port)["drover_worker_ready"] == 0
        server = Server([])
        status.opened([], server, None)
        assert get(port, "/readyz") == (200, "ok\n")
        status.stopping()
        assert get(port, "/readyz") == (503, "the worker is stopping\n")
        assert get(port, "/healthz")[0] == 200
        status.opened([], server, None)
        assert get(port, "/readyz")[0] == 503
        server.close()


def test_state_and_metrics_say_what_a_client_did(tmp_path: Path) -> None:
    data = np.arange(64, dtype=np.float32).tobytes()
    with watched(tmp_path) as worker, Client(worker.rpc) as client:
        bench = Bench.on(client, 1 << 16)
        a, b = bench.tensor(64), bench.tensor(64)
        total = bench.node(Op.ADD, a, b)
        assert client.ask(m.SetTensorHash(a, 0, fnv1a(data))).result == 0
        client.tell(m.SetTensor(a, 1, 0, memoryview(data)))
        assert client.ask(m.SetTensorHash(b, 0, fnv1a(data))).result == 1
        client.tell(bench.graph(total, uid=1))
        client.tell(m.GraphRecompute(0, 1))
        client.get(total)
        state: Any = json.loads(get(worker.http, "/state")[1])
        (row,) = state["clients"]
        assert (row["bufferBytes"], row["doing"]) == (1 << 16, None)
        assert row["holds"] == [{"device": 0, "buffers": 1, "bytes": 1 << 16, "graphs": 1}]
        assert state["devices"][0] == {
            "name": "REFERENCE",
            "description": worker.device.device.description,
            "free": LIMIT - (1 << 16),
            "total": LIMIT,
        }
        assert state["protocol"] == "8.0.0"
        assert state["ready"] is True
        assert state["cache"] == {
            "folder": str(tmp_path),
            "bytes": 256,
            "limit": worker.store.limit,
            "evictions": 0,
            "hits": 1,
            "misses": 1,
            "hitBytes": 256,
            "missBytes": 256,
        }
        figures = metrics(worker.http)
        expected = {
            "clients": 1,
            "connections_total": 1,
            "received_bytes_total": row["received"],
            "sent_bytes_total": row["sent"],
            "graphs_total": 2,
            "graph_nodes_total": 2,
            'commands_total{command="SET_TENSOR_HASH"}': 2,
            'commands_total{command="COMM_FREE"}': 0,
            'command_bytes_total{command="GET_TENSOR",direction="received"}': 9 + 312,
            'command_bytes_total{command="GET_TENSOR",direction="sent"}': 8 + 256,
            'command_bytes_total{command="SET_TENSOR",direction="received"}': 9 + 305 + 256,
            'command_bytes_total{command="SET_TENSOR",direction="sent"}': 0,
            'refused_total{reason="frame"}': 0,
            "cache_hits_total": 1,
            "cache_misses_total": 1,
            "cache_hit_bytes_total": 256,
            "cache_miss_bytes_total": 256,
            "cache_evictions_total": 0,
            "cache_bytes": 256,
            "cache_limit_bytes": worker.store.limit,
            'buffer_bytes{device="0",name="REFERENCE"}': 1 << 16,
            'device_free_bytes{device="0",name="REFERENCE"}': LIMIT - (1 << 16),
            'device_total_bytes{device="0",name="REFERENCE"}': LIMIT,
        }
        assert {name: figures[f"drover_worker_{name}"] for name in expected} == expected
        assert figures["drover_worker_compute_seconds_total"] > 0


def every_kind_of_refusal(worker: Watched) -> Iterator[tuple[str, Client]]:
    """A client of its own for each, which has just been refused."""
    for reason in ("greeting", "frame", "request", "device", "unfinished", "memory"):
        with Client(worker.rpc, greet=reason != "greeting") as client:
            if reason == "greeting":
                client.raw(b"GET / HTTP/1.1\r\n\r\n")
            elif reason == "frame":
                client.raw(b"\x63" + bytes(8))
            elif reason == "request":
                client.tell(m.FreeBuffer(5))
            elif reason == "device":
                bench = Bench.on(client)
                rows = bench.tensor(1, type_=I32)
                client.set(rows, [1000], np.int32)
                client.tell(bench.graph(bench.node(Op.GET_ROWS, bench.tensor(4, 3), rows, extents=(4, 1))))
            elif reason == "unfinished":
                client.raw(b"\x0f")
                client.socket.shutdown(socket.SHUT_WR)
            elif reason == "memory":
                assert client.ask(m.AllocBuffer(0, LIMIT + 1)).remote_ptr == 0
            assert reason == "memory" or client.dropped()
            yield reason, client


def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    with watched(tmp_path) as worker:
        for reason, _ in every_kind_of_refusal(worker):
            assert worker.tally.refused[reason] == 1, reason  # type: ignore[index]
        assert sum(worker.tally.refused.values()) == 6
        assert metrics(worker.http)['drover_worker_refused_total{reason="greeting"}'] == 1
        assert json.loads(get(worker.http, "/state")[1])["refused"]["device"] == 1


def test_a_device_that_computes_is_not_waited_for(tmp_path: Path) -> None:
    with watched(tmp_path) as worker:
        assert json.loads(get(worker.http, "/state")[1])["devices"][0]["free"] == LIMIT
        with worker.device.lock:
            assert json.loads(get(worker.http, "/state")[1])["devices"][0]["free"] == LIMIT
            assert get(worker.http, "/readyz")[0] == 200


def test_other_paths_methods_and_nonsense(tmp_path: Path) -> None:
    with watched(tmp_path) as worker:
        assert get(worker.http, "/nothing") == (404, "no such path\n")
        assert get(worker.http, "/healthz", "POST")[0] == 501
        assert get(worker.http, "/healthz", "HEAD") == (200, "")
        assert get(worker.http, "/readyz?verbose") == (200, "ok\n")
        with Client(worker.http, greet=False) as client:
            client.raw(b"\x00\x01\xff" * 50 + b"\r\n\r\n")
        assert get(worker.http, "/healthz")[0] == 200


def test_an_address_that_is_taken() -> None:
    status = Status(Tally())
    with (
        status_server.opened("127.0.0.1", 0, status) as port,
        pytest.raises(
            DroverError, match=rf"cannot listen on 127\.0\.0\.1:{port} for the status: Address already in use"
        ),
        status_server.opened("127.0.0.1", port, status),
    ):
        pass
