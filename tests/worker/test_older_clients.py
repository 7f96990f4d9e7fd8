"""Clients of older versions at a real worker: each hears its own version and gets the results it asked for."""

import math
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from drover.errors import DroverError
from drover.hashing import fnv1a
from drover.rpc import messages as m
from drover.rpc.versions import HASHED_BYTES, VERSIONS, pair
from drover.worker.store import Store
from support.client import Client
from support.old_client import DIALECTS, Dialect, OldClient, Record
from support.worker_thread import worker

ADD, MUL = 2, 7


@contextmanager
def port_of(protocol: str = "8.0", also: str | None = None, store: Store | None = None) -> Iterator[int]:
    with worker(protocol=protocol, also=also, store=store) as endpoint:
        yield int(endpoint.rpartition(":")[2])


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def converse(client: OldClient) -> None:
    """From HELLO to the last FREE_BUFFER, with every command that llama.cpp sent."""
    dialect = client.dialect
    assert client.hello() == bytes(dialect.number) + (b"" if dialect.brief else bytes(25))
    if dialect.devices:
        assert client.ask(15, b"", 4) == struct.pack("<I", 1)
    assert client.device_memory()[1] == 64 << 20
    alignment, largest = client.alignment_and_size()
    assert alignment == 64
    assert largest > 0
    handle, base = client.buffer(4096)
    client.settle(5, struct.pack("<QB", handle, 7))
    a, b = Record(1, handle, base), Record(2, handle, base + 64)
    matrix = Record(3, handle, base + 128, rows=2)
    assert client.get(a, 16) == b"\7" * 16
    client.settle(12, a.packed())
    compute(client, handle, base, a, b, matrix)
    assert client.ask(9, a.packed() + b.packed(), 1) == b"\1"
    assert client.get(b, 16) == client.get(a, 16)
    assert client.ask(7, a.packed() + struct.pack("<QQ", 0, 1), 1) == b"\0"
    if dialect.memset:
        client.settle(17, a.packed() + struct.pack("<QQB", 0, 8, 0))
        assert client.get(a, 16)[:8] == bytes(8)
    client.settle(4, struct.pack("<Q", handle))
    assert client.device_memory()[1] == 64 << 20


def compute(client: OldClient, handle: int, base: int, a: Record, b: Record, matrix: Record) -> None:
    """Operations whose numbers have moved, and one whose parameter has."""
    dialect = client.dialect
    total = Record(4, handle, base + 256, op=ADD, src=(1, 2))
    dots = Record(5, handle, base + 320, op=dialect.mul_mat, src=(3, 4), columns=2)
    gelu = Record(6, handle, base + 384, op=dialect.unary, param=dialect.gelu_erf, src=(4,))
    client.set(a, floats(1, 2, 3, 4))
    client.set(b, floats(10, 20, 30, 40))
    client.set(matrix, floats(1, 0, 0, 0, 0, 1, 0, 1))
    nodes = [total, dots, gelu]
    assert client.alloc_size(dots) == 8
    client.compute(nodes, [a, b, matrix, *nodes])
    assert client.get(dots, 8) == floats(11, 66)
    client.set(a, floats(-11, -22, -33, -40))
    if dialect.recompute:
        client.tell(16, struct.pack("<I", 0))
    else:
        client.compute(nodes, [a, b, matrix, *nodes])
    expected = [x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in (-1, -2, -3, 0)]
    assert struct.unpack("<4f", client.get(gelu, 16)) == pytest.approx(expected, abs=1e-6)


def test_every_older_version_has_a_client() -> None:
    assert set(DIALECTS) == set(VERSIONS) - {"8.0"}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_client_of_that_version(name: str) -> None:
    with port_of(name) as port, OldClient(port, DIALECTS[name]) as client:
        converse(client)


@pytest.mark.parametrize("main", ["8.0", "7.0", "4.0.1"])
@pytest.mark.parametrize("also", ["3.6", "2.0"])
def test_two_generations_on_one_port(main: str, also: str) -> None:
    with port_of(main, also) as port:
        for _ in range(2):
            with OldClient(port, DIALECTS[also]) as older:
                converse(older)
            if main == "8.0":
                with Client(port) as current:
                    assert current.ask(m.DeviceCount()) == m.DeviceCountReply(1)
            else:
                with OldClient(port, DIALECTS[main]) as newer:
                    converse(newer)


def test_both_generations_at_the_same_time() -> None:
    done: list[str] = []

    def work(name: str) -> None:
        with OldClient(port, DIALECTS[name]) as client:
            converse(client)
        done.append(name)

    with port_of("7.0", "2.0") as port:
        threads = [threading.Thread(target=work, args=(name,)) for name in ("7.0", "2.0") * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(done) == ["2.0"] * 3 + ["7.0"] * 3


def test_recompute_means_the_last_graph() -> None:
    with port_of("7.0") as port, OldClient(port, DIALECTS["7.0"]) as client:
        client.hello()
        handle, base = client.buffer(4096)
        a = Record(1, handle, base)
        doubled = Record(2, handle, base + 64, op=ADD, src=(1, 1))
        squared = Record(3, handle, base + 64, op=MUL, src=(1, 1))
        client.set(a, floats(3, 3, 3, 3))
        client.compute([doubled], [a, doubled])
        client.compute([squared], [a, squared])
        client.set(a, floats(5, 5, 5, 5))
        client.tell(16, struct.pack("<I", 0))
        assert client.get(doubled, 16) == floats(25, 25, 25, 25)


def test_large_tensors_are_cached_as_older_servers_did(tmp_path: Path) -> None:
    data = bytes(HASHED_BYTES + 16)
    large = Record(1, 0, 0, columns=len(data) // 4)
    with port_of("6.0", store=Store(tmp_path, None)) as port, OldClient(port, DIALECTS["6.0"]) as client:
        client.hello()
        large.buffer, large.data = client.buffer(len(data))
        asked = large.packed() + struct.pack("<QQ", 0, fnv1a(data))
        assert client.ask(7, asked, 1) == b"\0"
        client.set(large, data)
        assert client.ask(7, asked, 1) == b"\1"
        client.set(large, bytes(64))
        client.get(large, 4)
    assert [path.stat().st_size for path in tmp_path.iterdir() if len(path.name) == 16] == [len(data)]


def test_what_a_version_lacks_does_not_exist_for_its_clients() -> None:
    with port_of("2.0") as port:
        for command, payload in ((15, b""), (16, struct.pack("<I", 0)), (17, bytes(313)), (22, bytes(4))):
            with OldClient(port, DIALECTS["2.0"]) as client:
                client.hello()
                client.tell(command, payload)
                assert client.dropped()


def said_of(attempt: Dialect, protocol: str, also: str | None = None, *, answered: bool) -> EventDict:
    """The one line that is logged of a client that greets as `attempt` does, and goes then or is sent away."""
    with capture_logs() as logs, port_of(protocol, also) as port:
        with OldClient(port, attempt) as client:
            if answered:
                assert client.hello()[:3] == bytes(VERSIONS[also or protocol].number)
            else:
                client.tell(14, b"" if attempt.brief else bytes(24))
                assert client.dropped()
        end = time.monotonic() + 10
        while not (said := [entry for entry in logs if entry["log_level"] != "debug"]) and time.monotonic() < end:
            time.sleep(0.005)
    (entry,) = said
    return entry


def test_a_brief_hello_where_only_newer_ones_are_served() -> None:
    entry = said_of(DIALECTS["3.6"], "8.0", answered=False)
    assert (entry["event"], entry["log_level"]) == ("client dropped", "warning")
    assert "a version before 4.0, we 8.0.0; `--also 3.6` (or 2.0)" in entry["why"]


def test_a_full_hello_where_only_older_ones_are_served() -> None:
    entry = said_of(DIALECTS["7.0"], "3.6", answered=False)
    assert (entry["event"], entry["log_level"]) == ("client dropped", "warning")
    assert "it speaks 4.0 or newer, we 3.6.1; `--protocol`" in entry["why"]


@pytest.mark.parametrize(("attempt", "protocol", "also"), [("7.0", "8.0", None), ("3.6", "8.0", "2.0")])
def test_a_client_that_hears_another_version_and_leaves(attempt: str, protocol: str, also: str | None) -> None:
    """It is answered all the same, as the protocol asks: who does not like the version leaves."""
    entry = said_of(DIALECTS[attempt], protocol, also, answered=True)
    assert (entry["event"], entry["log_level"]) == ("client left", "warning")
    assert f"it heard that we speak {VERSIONS[also or protocol]} and left" in entry["why"]
    assert "`--protocol` and `--also` say what we speak" in entry["why"]


@pytest.mark.parametrize(
    ("main", "also", "why"),
    [
        ("3.5", None, "protocol '3.5' is not served; those that are: 8.0, 7.0,"),
        ("8.0", "1.0", "protocol '1.0' is not served"),
        ("8.0", "7.0", "cannot share a port"),
        ("3.6", "2.0", "cannot share a port"),
    ],
)
def test_versions_that_cannot_be_served(main: str, also: str | None, why: str) -> None:
    with pytest.raises(DroverError, match=why):
        pair(main, also)
