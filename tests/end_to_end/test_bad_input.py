"""Bad input, as a user meets it: every command says what, where and what to do in one line, and never a traceback."""

import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from drover.rpc import messages as m
from support import drover
from support.client import Client
from support.completions import post
from support.impostor import HELLO, hello_reply, impostor
from support.processes import Running, free_port
from support.proxy_record import Relay
from support.tiny_model import write_stub

pytestmark = pytest.mark.timeout(300)

SECONDS = 60
NOBODY = "127.0.0.1:1"
"""A port on which nobody listens."""


def refused(*arguments: str | Path, says: tuple[str, ...]) -> None:
    """The command ends with an error of one line that holds these words."""
    command = [drover.COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    told = "\n".join(line for line in done.stderr.splitlines() if "━" not in line)  # progress may have gone before
    assert done.returncode == 1, told
    assert "Traceback" not in told
    assert len(told.splitlines()) == 1, told
    assert told.startswith("drover: error: ")
    for word in says:
        assert word in told


class TestModels:
    @pytest.mark.parametrize("command", [("serve", "--rpc", NOBODY), ("plan", "--workers", "1GiB")])
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            pytest.param(None, ("no such file",), id="missing"),
            pytest.param(b"", ("GGUF",), id="empty"),
            pytest.param(b"PK\x03\x04 not a model at all" * 100, ("GGUF",), id="not a GGUF"),
            pytest.param(drover.MODEL.read_bytes()[:20], (), id="cut in the first header"),
            pytest.param(drover.MODEL.read_bytes()[:30_000], (), id="cut in the vocabulary"),
            pytest.param(drover.MODEL.read_bytes()[:-100_000], (), id="cut in the weights"),
        ],
    )
    def test_damaged_file(
        self, command: tuple[str, ...], content: bytes | None, says: tuple[str, ...], tmp_path: Path
    ) -> None:
        path = tmp_path / "model.gguf"
        if content is not None:
            path.write_bytes(content)
        refused(command[0], path, *command[1:], says=("model.gguf", *says))

    def test_folder_instead_of_a_file(self, tmp_path: Path) -> None:
        refused("serve", tmp_path, "--rpc", NOBODY, says=(tmp_path.name,))

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        path = write_stub(tmp_path / "m.gguf", "mammoth", gguf.GGMLQuantizationType.Q8_0)
        refused("serve", path, "--rpc", NOBODY, says=("mammoth", "llama"))

    def test_model_larger_than_all_workers(self) -> None:
        refused("plan", drover.MODEL, "--workers", "1MiB,1MiB", says=("MiB",))

    def test_model_larger_than_running_workers(self, tmp_path: Path) -> None:
        port = free_port()
        with drover.start_worker(tmp_path / "log", port, "--threads", "1", "--memory", "1MiB"):
            refused("serve", drover.MODEL, "--rpc", f"127.0.0.1:{port}", says=("MiB",))


class TestWorkers:
    def test_nobody_there(self) -> None:
        refused("serve", drover.MODEL, "--rpc", NOBODY, says=(NOBODY, "drover worker"))

    @pytest.mark.parametrize("endpoint", ["localhost:", "localhost:port", "localhost:99999", ":50052", "a:1:2"])
    def test_senseless_endpoint(self, endpoint: str) -> None:
        refused("serve", drover.MODEL, "--rpc", endpoint, says=(endpoint,))

    @pytest.mark.parametrize("version", [(7, 0), (9, 0), (8, 1), (3, 6)])
    def test_another_protocol_version(self, version: tuple[int, int]) -> None:
        with impostor(hello_reply(*version)) as port:
            refused(
                "serve",
                drover.MODEL,
                "--rpc",
                f"127.0.0.1:{port}",
                says=(str(port), f"{version[0]}.{version[1]}", "8.0"),
            )

    @pytest.mark.parametrize(
        "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", hello_reply(8, 0)], ids=["nothing", "HTTP", "only HELLO"]
    )
    def test_something_else_answers(self, answer: bytes) -> None:
        with impostor(answer) as port:
            refused("serve", drover.MODEL, "--rpc", f"127.0.0.1:{port}", says=(str(port),))

    def test_worker_dies_while_generating(self, tmp_path: Path) -> None:
        ports, api = [free_port(), free_port()], free_port()
        first = drover.start_worker(tmp_path / "first", ports[0], "--threads", "1")
        second = drover.start_worker(tmp_path / "second", ports[1], "--threads", "1")
        with first, second, drover.start_coordinator(tmp_path / "coordinator", api, ports) as coordinator:
            request = {"prompt": "The", "max_tokens": 8, "temperature": 0}
            assert post(api, "/v1/completions", request)["usage"]["completion_tokens"] == 8
            second.popen.kill()
            second.popen.wait(10)
            for _ in range(2):
                status, message = failed(lambda: post(api, "/v1/completions", request))
                assert status >= 500
                assert str(ports[1]) in message
            assert "Traceback" not in coordinator.output
            assert str(ports[1]) in coordinator.output

    def test_worker_dies_while_loading(self, tmp_path: Path) -> None:
        ports, api = [free_port(), free_port()], free_port()
        first = drover.start_worker(tmp_path / "first", ports[0], "--threads", "1")
        second = drover.start_worker(tmp_path / "second", ports[1], "--threads", "1")

        def kill(request: str) -> None:
            if request == "SET_TENSOR":
                second.popen.kill()

        with first, second, Relay(ports[1], kill) as relay:
            servers = f"127.0.0.1:{ports[0]},127.0.0.1:{relay.port}"
            refused("serve", drover.MODEL, "--rpc", servers, "--port", str(api), says=(f"127.0.0.1:{relay.port}",))
            assert second.popen.wait(10) == -signal.SIGKILL
            with drover.start_coordinator(tmp_path / "coordinator", api, ports[:1]):
                assert post(api, "/v1/completions", {"prompt": "The", "max_tokens": 4})["choices"]


def failed(ask: Callable[[], object]) -> tuple[int, str]:
    """Status and message of the API's error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask()
    with caught.value as answer:
        return answer.status or 0, json.loads(answer.read())["error"]["message"]


class TestCommandLine:
    def test_unknown_device(self) -> None:
        refused("worker", "--device", "gpu9", "--port", "0", says=("gpu9", "CPU"))

    def test_unknown_local_device(self) -> None:
        refused("serve", str(drover.MODEL), "--local", "gpu9", says=("unknown device 'gpu9'", "available: CPU"))

    @pytest.mark.parametrize("command", [("worker",), ("serve", str(drover.MODEL), "--rpc")])
    def test_port_in_use(self, command: tuple[str, ...], drover_workers: list[int]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            workers = [f"127.0.0.1:{drover_workers[0]}"] if command[-1] == "--rpc" else []
            refused(*command, *workers, "--port", port, says=(port, "use"))

    def test_key_file_that_cannot_be_used(self, tmp_path: Path) -> None:
        serve = ("serve", drover.MODEL, "--rpc", NOBODY, "--api-key-file")
        refused(*serve, tmp_path / "none", says=("none", "cannot be read"))
        (tmp_path / "empty").write_text("\n")
        refused(*serve, tmp_path / "empty", says=("empty",))

    @pytest.mark.parametrize("size", ["lots", "-1GiB", "0"])
    def test_senseless_memory(self, size: str) -> None:
        refused("worker", "--port", "0", f"--memory={size}", says=(size,))

    def test_split_of_another_length(self, drover_workers: list[int]) -> None:
        refused(
            "serve",
            drover.MODEL,
            "--rpc",
            f"127.0.0.1:{drover_workers[0]}",
            "--tensor-split",
            "3,1",
            says=("2 proportions", "1 device"),
        )


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            pytest.param(None, ("No such file",), id="missing"),
            pytest.param("a: [", (":1: ",), id="not YAML"),
            pytest.param("just text", (), id="not a mapping"),
            pytest.param("SAMPLE  workerz: 3\n", ("workerz",), id="unknown field"),
            pytest.param("kind: Pod\n", (), id="another kind"),
        ],
    )
    def test_bad_file(self, text: str | None, says: tuple[str, ...], tmp_path: Path) -> None:
        path = tmp_path / "cluster.yaml"
        sample = (drover.REPOSITORY / "manifests/samples/two-workers.yaml").read_text()
        if text is not None:
            path.write_text(text.replace("SAMPLE", sample))
        refused("up", path, says=("cluster.yaml", *says))

    def test_bad_value_names_field_and_line(self, tmp_path: Path) -> None:
        sample = (drover.REPOSITORY / "manifests/samples/two-workers.yaml").read_text()
        path = tmp_path / "cluster.yaml"
        path.write_text(re.sub(r"memory: \S+", "memory: plenty", sample))
        line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "plenty" in text)
        refused("up", path, says=("spec.workers[0].memory", f":{line}: "))

    def test_model_of_the_file_is_missing(self, tmp_path: Path) -> None:
        sample = (drover.REPOSITORY / "manifests/samples/two-workers.yaml").read_text()
        path = tmp_path / "cluster.yaml"
        path.write_text(re.sub(r"source: \S+", "source: nowhere.gguf", sample))
        refused("up", path, says=("nowhere.gguf",))


class TestCaches:
    def test_unusable_weight_cache_is_only_a_warning(self, tmp_path: Path) -> None:
        port = free_port()
        environment = {"LLAMA_CACHE": "/dev/null/cache"}
        command = [drover.COMMAND, "worker", "--port", str(port), "--threads", "1", "--cache"]
        with Running(command, tmp_path / "log", environment) as worker:
            worker.wait_port(port, drover.START_SECONDS)
            with Client(port) as client:
                assert client.ask(m.DeviceCount()).count == 1
            assert "without a weight cache" in worker.output
            assert "Traceback" not in worker.output


class TestFrames:
    @pytest.mark.parametrize(
        "frame",
        [
            pytest.param(bytes([23]) + bytes(8), id="unknown command"),
            pytest.param(bytes([6]) + (1 << 63).to_bytes(8, "little"), id="size of 2^63"),
            pytest.param(bytes([10]) + (1 << 40).to_bytes(8, "little"), id="size of 2^40"),
            pytest.param(bytes([13]) + bytes(8), id="too short"),
            pytest.param(HELLO, id="second HELLO"),
            pytest.param(os.urandom(4096), id="noise"),
        ],
    )
    def test_bad_frame_closes_one_connection(self, frame: bytes, drover_workers: list[int]) -> None:
        with Client(drover_workers[0]) as bad:
            bad.raw(frame)
            assert bad.dropped()
        with Client(drover_workers[0]) as good:
            assert good.ask(m.DeviceCount()).count == 1
