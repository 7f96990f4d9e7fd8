"""The `worker` command as a user starts it, on the reference device: what it prints, and how it ends."""

import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import structlog

from drover.ggml.ops import Op
from drover.hashing import fnv1a
from drover.rpc import messages as m
from drover.worker.__main__ import main
from support.client import Bench, Client
from support.old_client import DIALECTS, OldClient
from support.processes import Running, free_port, listening

Said = Callable[..., tuple[int, str]]
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
KERNELS = Path(tempfile.gettempdir(), "drover-test-kernels")
"""Shared by the processes of this file, so that only the first compiles the hash."""
BANNER = """\
Starting RPC server v8\\.0\\.0
  endpoint       : 127\\.0\\.0\\.1:{port}
  local cache    : {cache}
Devices:
  REFERENCE: .+ \\(64 MiB, 64 MiB free\\)
  transport      : TCP
"""


def start(folder: Path, *options: str | Path, env: Mapping[str, str] | None = None) -> Running:
    settings = {"XDG_CACHE_HOME": str(folder / "home"), "LLAMA_CACHE": "", "NUMBA_CACHE_DIR": str(KERNELS)}
    settings |= env or {}
    command = [sys.executable, "-m", "drover.worker", "--device", "reference", "--memory", "64MiB", *options]
    return Running(command, folder / "log", settings)


def test_banner_service_and_a_quiet_end(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "-p", str(port)) as worker:
        worker.wait_port(port)
        with Client(port) as client:
            assert client.ask(m.GetDeviceMemory(0)) == m.GetDeviceMemoryReply(64 << 20, 64 << 20)
            assert worker.stop(signal.SIGTERM) == 0
            assert client.dropped()
    assert re.search(BANNER.format(port=port, cache="n/a"), worker.output)
    assert "Traceback" not in worker.output


def long_graph(client: Client) -> m.GraphCompute:
    """Some ten seconds of work."""
    bench = Bench.on(client, 48 << 20)
    source = bench.tensor(4 << 20)
    node = bench.node(Op.SQR, source)
    return bench.graph(*[node] * 3000)


def test_a_graph_that_outlasts_the_grace_does_not_delay_the_end(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "-p", str(port), "--grace", "1") as worker:
        worker.wait_port(port)
        with Client(port) as client, Client(port) as idle:
            client.tell(long_graph(client))
            assert idle.ask(m.DeviceCount()).count == 1
            time.sleep(0.5)
            began = time.monotonic()
            assert worker.stop(signal.SIGTERM) == 0
            assert 0.9 < time.monotonic() - began < 5
            assert idle.dropped()
    assert "client cut off" in worker.output
    assert "Traceback" not in worker.output


def test_limits_of_a_client_are_options(tmp_path: Path) -> None:
    port = free_port()
    limits = "--max-clients 2 --max-client-memory 1MiB --max-client-graphs 1 --max-graph-nodes 1 --max-payload 2KiB"
    with start(tmp_path, "-p", str(port), "--max-graph-tensors", "2", *limits.split()) as worker:
        worker.wait_port(port)
        with Client(port) as client, Client(port) as other, Client(port, greet=False) as third:
            assert third.dropped()
            assert other.ask(m.GetDeviceMemory(0)) == m.GetDeviceMemoryReply(1 << 20, 64 << 20)
            bench = Bench.on(client)
            nodes = [bench.node(Op.SQR, bench.tensor(4)) for _ in range(2)]
            client.tell(bench.graph(*nodes))
            assert client.dropped()
            other.tell(m.SetTensor(Bench.on(other).tensor(513), 0, 0, memoryview(bytes(2052))))
            assert other.dropped()
    assert "a graph of 2 nodes and 4 tensors; 1 and 2 are possible" in worker.output
    assert "SET_TENSOR with 2052 bytes; we take 2048 at a time" in worker.output
    assert "2 clients are connected" in worker.output


def test_a_line_for_each_command_if_the_environment_asks(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "-p", str(port), "--log-format", "json", env={"GGML_RPC_DEBUG": "1"}) as worker:
        worker.wait_port(port)
        with Client(port) as client:
            bench = Bench.on(client, 4096)
            client.set(bench.tensor(3), [1, 2, 3])
            assert client.ask(m.DeviceCount()).count == 1
    lines = [json.loads(line) for line in worker.output.splitlines() if line.startswith("{")]
    commands = [line for line in lines if line["event"].isupper()]
    assert [line["event"] for line in commands] == "HELLO ALLOC_BUFFER BUFFER_GET_BASE SET_TENSOR DEVICE_COUNT".split()
    assert (commands[1]["size"], commands[1]["answer_remote_ptr"]) == (4096, 1)
    assert commands[3]["data"] == "12 bytes"


def banner_of(tmp_path: Path, *options: str) -> list[str]:
    """The devices of a worker as its banner lists them, and as a client sees their memory."""
    port = free_port()
    with start(tmp_path, "-p", str(port), *options) as worker:
        worker.wait_port(port)
        with Client(port) as client:
            count = client.ask(m.DeviceCount()).count
            totals = [client.ask(m.GetDeviceMemory(number)).total >> 20 for number in range(count)]
    listed = re.findall(r"^  (\w+): .*\((\d+) MiB, \d+ MiB free\)$", worker.output, re.MULTILINE)
    assert [int(size) for _, size in listed] == totals
    return [f"{name} {size}" for name, size in listed]


def test_several_devices_behind_one_port_each_with_its_memory(tmp_path: Path) -> None:
    listed = banner_of(tmp_path, "-d", "reference, reference", "--memory", "48MiB,16MiB")
    assert listed == ["REFERENCE 48", "REFERENCE 16"]


def test_a_share_of_what_the_machine_has(tmp_path: Path) -> None:
    """Devices in the host's memory share it."""
    half, other = (int(row.split()[1]) for row in banner_of(tmp_path, "-d", "reference,reference", "--memory", "50%"))
    assert half == other
    assert half * 4 < MEMORY >> 20


def test_older_spellings(tmp_path: Path) -> None:
    """The 64MiB of `start` are overruled: that option is left out here."""
    port = free_port()
    settings = {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": os.environ["NUMBA_CACHE_DIR"]}
    words = ["-d", "reference", "-cpu", "-m", "32", "-t", "1", "-p", str(port)]
    with Running([sys.executable, "-m", "drover.worker", *words], tmp_path / "log", settings) as worker:
        worker.wait_port(port)
        with Client(port) as client:
            assert client.ask(m.DeviceCount()).count == 2
            assert client.ask(m.GetDeviceMemory(1)).total == 32 << 20
    assert re.search(r"^  REFERENCE: .*\n  CPU: ", worker.output, re.MULTILINE)


def test_two_workers_on_one_machine_do_not_clash(tmp_path: Path) -> None:
    """Started together with the same folder, both serve, and what one was sent the other has."""
    data = np.arange(64, dtype=np.float32).tobytes()
    with ExitStack() as stack:
        workers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            options = ("-p", "0", "--http", "0", "--cache-dir", tmp_path / "both")
            workers.append(stack.enter_context(start(tmp_path / name, *options)))
        ports = [port_of(worker) for worker in workers]
        for port in ports:
            with Client(port) as client:
                tensor = Bench.on(client).tensor(64)
                known = client.ask(m.SetTensorHash(tensor, 0, fnv1a(data))).result
                assert known == (port == ports[1])
                client.tell(m.SetTensor(tensor, 1, 0, memoryview(data)))
                assert client.ask(m.SetTensorHash(tensor, 0, fnv1a(data))).result == 1


def port_of(worker: Running) -> int:
    """The port that a worker chose, once it has said so."""
    end = time.monotonic() + 60
    while "transport" not in worker.output:
        assert worker.alive, worker.output
        assert time.monotonic() < end
        time.sleep(0.05)
    found = re.search(r"endpoint       : 127\.0\.0\.1:(\d+)", worker.output)
    assert found
    return int(found[1])


def test_resident_memory_is_that_of_the_buffers_and_little_more(tmp_path: Path) -> None:
    """Even of a worker whose kernels were to be compiled first."""
    port, size = free_port(), 512 << 20
    settings = {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": os.environ["NUMBA_CACHE_DIR"]}
    command = [sys.executable, "-m", "drover.worker", "-d", "cpu", "-t", "2", "-p", str(port)]
    with Running(command, tmp_path / "log", settings) as worker:
        worker.wait_port(port)
        with Client(port) as client:
            bench = Bench.on(client, size)
            client.tell(m.BufferClear(bench.handle, 1))
            weights, rows = bench.tensor(4096, 16384), bench.tensor(4096, 64)
            client.tell(bench.graph(bench.node(Op.MUL_MAT, weights, rows, extents=(16384, 64))))
            assert client.ask(m.DeviceCount()).count == 1
            status = Path(f"/proc/{worker.popen.pid}/status").read_text()
    resident = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert resident
    assert size < int(resident[1]) << 10 <= 1.1 * size + 250e6


def test_interrupt_is_a_normal_end(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "--port", str(port), "--threads", "1", "--log-format", "json") as worker:
        worker.wait_port(port)
        assert worker.stop(signal.SIGINT) == 0
    assert '"event": "worker stopped"' in worker.output


def test_two_versions_on_one_port(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "-p", str(port), "--protocol", "7.0", "--also", "3.6") as worker:
        worker.wait_port(port)
        for name in ("7.0", "3.6"):
            with OldClient(port, DIALECTS[name]) as client:
                assert client.hello()[:3] == bytes(DIALECTS[name].number)
    assert "Starting RPC server v7.0.0\n  also speaks    : v3.6.1\n" in worker.output


@pytest.mark.parametrize(
    ("option", "env", "folder"),
    [
        (["-c"], {}, "home/llama.cpp/rpc"),
        (["--cache"], {"LLAMA_CACHE": "{0}/llama"}, "llama/rpc"),
        (["--cache-dir", "{0}/mine"], {"LLAMA_CACHE": "{0}/llama"}, "mine/rpc"),
    ],
)
def test_cache_folders(tmp_path: Path, option: list[str], env: dict[str, str], folder: str) -> None:
    port = free_port()
    options = [word.format(tmp_path) for word in option]
    settings = {name: value.format(tmp_path) for name, value in env.items()}
    data = np.arange(64, dtype=np.float32).tobytes()
    with start(tmp_path, "-p", str(port), *options, env=settings) as worker:
        worker.wait_port(port)
        with Client(port) as client:
            tensor = Bench.on(client).tensor(64)
            assert client.ask(m.SetTensorHash(tensor, 0, fnv1a(data))).result == 0
            client.tell(m.SetTensor(tensor, 1, 0, memoryview(data)))
            assert client.ask(m.SetTensorHash(tensor, 0, fnv1a(data))).result == 1
    assert re.search(BANNER.format(port=port, cache=re.escape(str(tmp_path / folder))), worker.output)
    assert (tmp_path / folder / f"{fnv1a(data):016x}").read_bytes() == data


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    port = free_port()
    with start(tmp_path, "-p", str(port), "--cache-dir", tmp_path / "file", env={"NUMBA_CACHE_DIR": ""}) as worker:
        worker.wait_port(port)
        with Client(port) as client:
            assert client.ask(m.DeviceCount()) == m.DeviceCountReply(1)
    assert "local cache    : n/a" in worker.output
    assert "serving without a weight cache" in worker.output
    assert "compiled kernels cannot be kept" in worker.output
    assert "Traceback" not in worker.output


@pytest.mark.parametrize("option", ["--cache-size", "--cache-limit"])
def test_a_cache_keeps_to_its_size_from_the_start(tmp_path: Path, option: str) -> None:
    """The second is the older name of the first."""
    folder = tmp_path / "mine" / "rpc"
    folder.mkdir(parents=True)
    for age in range(3):
        blob = bytes([age]) * 1024
        path = folder / f"{fnv1a(blob):016x}"
        path.write_bytes(blob)
        os.utime(path, (1000.0 + age,) * 2)
    port = free_port()
    with start(tmp_path, "-p", str(port), "--cache-dir", tmp_path / "mine", option, "2KiB") as worker:
        worker.wait_port(port)
        kept = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert kept == {f"{fnv1a(bytes([age]) * 1024):016x}" for age in (1, 2)}


def test_other_hosts_are_warned_of(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "-H", "0.0.0.0", "-p", str(port)) as worker:
        worker.wait_port(port)
    assert "WARNING: listening on 0.0.0.0" in worker.output
    assert f"endpoint       : 0.0.0.0:{port}" in worker.output


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Said]:
    """Run the command in this process, for command lines that end before it serves: exit status and output."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["drover.worker", "--device", "reference", *words])
        try:
            status = main()
        except SystemExit as end:
            status = int(end.code or 0)
        return status, "".join(capfd.readouterr())

    monkeypatch.setenv("NUMBA_CACHE_DIR", "/nowhere")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    yield run
    structlog.reset_defaults()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-d", "reference,tpu"], "unknown device 'tpu'; available: CPU, REFERENCE"),
        (["-H", "192.0.2.1", "-p", "5"], "cannot listen on 192.0.2.1:5: Cannot assign requested address"),
        (["-H", "no.such.host.invalid", "-p", "5"], "cannot listen on no.such.host.invalid:5: "),
        (["--memory", "lots"], "'lots' is not a size; write e.g. 4GiB"),
        (["--protocol", "3.5"], "protocol '3.5' is not served; those that are: 8.0, 7.0,"),
        (["--also", "7.0"], "protocols 8.0 and 7.0 cannot share a port"),
        (["--memory", "0"], "'0' offers nothing that can be had; write e.g. 8GiB or 80%"),
        (["--memory", "120%"], "'120%' offers nothing that can be had"),
        (["--memory", "1GiB,2GiB"], "--memory has 2 amounts for 1 devices"),
        (["--memory", "1GiB", "-m", "5"], "--memory and --mem are two spellings of one option"),
        (["-d", "cuda:9"], "CUDA9: "),
        (["--max-client-memory", "some"], "'some' is not a size; write e.g. 4GiB"),
        (["--max-payload", "0"], "--max-payload 0"),
    ],
)
def test_what_cannot_be_is_one_line(said: Said, words: list[str], text: str) -> None:
    status, output = said("-p", "0", *words)
    assert status == 1
    assert output.startswith("drover worker: error: ")
    assert text in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [["--threads", "0"], ["--port", "70000"], ["--nonsense"], ["--max-clients", "0"], ["--max-client-graphs", "1025"]],
)
def test_bad_options(said: Said, words: list[str]) -> None:
    status, output = said(*words)
    assert status == 2
    assert words[0] in output


def test_help_names_the_options_of_the_stock_server(said: Said) -> None:
    status, output = said("-h")
    assert status == 0
    for option in ("--threads", "--device", "--host", "--port", "--cache", "--memory", "--log-format"):
        assert option in output


def status_of(port: int, path: str) -> tuple[int, str]:
    """Status and text of the worker's HTTP port, once it is open."""
    end = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            assert time.monotonic() < end, "the status port does not open"
            time.sleep(0.05)


def test_probes_are_answered_before_kernels_are_compiled(tmp_path: Path) -> None:
    """And SIGTERM is a normal end then, too."""
    http, port = free_port(), free_port()
    env = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    with start(tmp_path, "--device", "cpu", "-p", str(port), "--http", str(http), env=env) as worker:
        assert status_of(http, "/healthz") == (200, "ok\n")
        status, why = status_of(http, "/readyz")
        assert (status, "kernels" in why) == (503, True)
        assert json.loads(status_of(http, "/state")[1])["phase"] == "starting"
        assert not listening(port)
        assert worker.stop(signal.SIGTERM) == 0
    assert "Traceback" not in worker.output


def test_the_status_of_a_worker_that_serves(tmp_path: Path) -> None:
    http, port = free_port(), free_port()
    options = ("-p", str(port), "--http", str(http), "--log-format", "json")
    with start(tmp_path, *options) as worker:
        worker.wait_port(port)
        with Client(port) as client:
            client.ask(m.DeviceCount())
            assert status_of(http, "/readyz") == (200, "ok\n")
            assert len(json.loads(status_of(http, "/state")[1])["clients"]) == 1
            assert "drover_worker_clients 1.0" in status_of(http, "/metrics")[1]
        assert worker.stop(signal.SIGTERM) == 0
    assert f'"url": "http://127.0.0.1:{http}"' in worker.output


def test_a_status_port_in_use(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "-p", "0", "--http", str(port)) as first:
        status_of(port, "/healthz")
        second = Path(tmp_path, "second")
        second.mkdir()
        with start(second, "-p", "0", "--http", str(port)) as other:
            assert other.wait(60) == 1
        assert first.alive
    assert f"cannot listen on 127.0.0.1:{port} for the status: Address already in use" in other.output


def test_a_port_in_use(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "-p", str(port)) as first:
        first.wait_port(port)
        second = Path(tmp_path, "second")
        second.mkdir()
        with start(second, "-p", str(port)) as other:
            assert other.wait(60) == 1
    assert other.output == f"drover worker: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
