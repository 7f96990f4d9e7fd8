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

from drover.hashing import fnv1a
from drover.rpc import messages as m
from drover.worker import __main__ as entry
from drover.worker.__main__ import main
from drover.worker.devices.cpu.kernel_cache import cache_directory
from support.client import Bench, Client
from support.processes import Running, free_port, listening

Said = Callable[..., tuple[int, str]]
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


def test_interrupt_is_a_normal_end(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "--port", str(port), "--threads", "1", "--log-format", "json") as worker:
        worker.wait_port(port)
        assert worker.stop(signal.SIGINT) == 0
    assert '"event": "worker stopped"' in worker.output


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


def test_kernels_of_an_image_are_taken_over_into_an_empty_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not the mark that says there is nothing left to compile: the CPU may be another."""
    shipped = cache_directory(tmp_path / "image")
    shipped.mkdir(parents=True)
    for name in ("a.nbi", "complete", "lock"):
        (shipped / name).write_text(name)
    monkeypatch.setattr(entry, "SHIPPED", tmp_path / "image")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    volume = cache_directory(tmp_path / "volume")
    with ExitStack() as stack:
        entry._keep_kernels(tmp_path / "volume", stack)
        assert os.environ["NUMBA_CACHE_DIR"] == str(volume)
    assert [path.name for path in volume.iterdir()] == ["a.nbi"]
    (volume / "a.nbi").write_text("own by now")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    with ExitStack() as stack:
        entry._keep_kernels(tmp_path / "volume", stack)
    assert (volume / "a.nbi").read_text() == "own by now"
    assert [path.name for path in volume.parent.iterdir()] == [volume.name]


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
        (["--memory", "0"], "--memory 0"),
    ],
)
def test_what_cannot_be_is_one_line(said: Said, words: list[str], text: str) -> None:
    status, output = said("-p", "0", *words)
    assert status == 1
    assert output.startswith("drover worker: error: ")
    assert text in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("words", [["--threads", "0"], ["--port", "70000"], ["--nonsense"]])
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
