"""A coordinator as Kubernetes sees it: probes from the first moment on, metrics, state, and its end at SIGTERM."""

import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support import drover
from support.processes import Running, free_port
from support.worker_thread import worker

pytestmark = pytest.mark.timeout(300)

SECONDS = 30


def get(port: int, path: str, body: Any = None, key: str | None = None) -> tuple[int, str]:
    """Status and text; waits for the port to open."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    end = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            assert time.monotonic() < end, "the port does not open"
            time.sleep(0.05)


def serve(folder: Path, port: int, workers: str, *options: str | Path) -> Running:
    command = [drover.COMMAND, "serve", drover.MODEL, "--rpc", workers, "--port", str(port), "--ctx-size", "128"]
    return Running([*command, *options], folder / f"coordinator-{port}.log")


@pytest.fixture
def workers() -> Iterator[str]:
    with worker() as first, worker() as second:
        yield f"{first},{second}"


def test_the_port_is_open_before_the_workers_answer(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with serve(tmp_path, port, f"127.0.0.1:{silent.getsockname()[1]}") as coordinator:
            assert get(port, "/healthz") == (200, "ok\n")
            status, why = get(port, "/readyz")
            assert (status, "workers are being reached" in why) == (503, True)
            state = json.loads(get(port, "/state")[1])
            assert (state["phase"], state["ready"], state["placement"]) == ("loading", False, [])
            status, text = get(port, "/v1/completions", {"prompt": "a"})
            assert (status, json.loads(text)["error"]["code"]) == (503, "unavailable")
            assert coordinator.stop(signal.SIGTERM) == 0
        assert "Traceback" not in coordinator.output


def test_state_and_metrics_of_a_loaded_model(tmp_path: Path, workers: str) -> None:
    port = free_port()
    key = tmp_path / "key"
    key.write_text("sesam\n")
    options = ("--tensor-split", "2,1", "--api-key-file", key, "--log-format", "json")
    with serve(tmp_path, port, workers, *options) as coordinator:
        coordinator.wait_healthy(port)
        assert get(port, "/readyz") == (200, "ok\n")
        assert get(port, "/v1/completions", {"prompt": "The"})[0] == 401
        assert get(port, "/v1/completions", {"prompt": "The", "max_tokens": 4, "temperature": 0}, "sesam")[0] == 200
        assert get(port, "/state")[0] == 401
        state = json.loads(get(port, "/state", key="sesam")[1])
        assert [(row["worker"], row["layers"]) for row in state["placement"]] == list(
            zip(workers.split(","), ("0-4", "5 + output"), strict=True)
        )
        assert state["model"]["architecture"] == "llama"
        assert state["context"] == 128
        assert all(row["bytes"] == row["total"] for row in state["loading"])
        lines = [line for line in get(port, "/metrics")[1].splitlines() if not line.startswith("#")]
        figures = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
        assert figures["drover_ready"] == 1
        assert figures["drover_generated_tokens_total"] == 4
        assert figures["drover_prompt_tokens_total"] > 0
        assert figures["drover_tokens_per_second"] > 0
        assert figures['drover_requests_total{path="/v1/completions",status="200"}'] == 1
        for number, name in enumerate(workers.split(",")):
            assert figures[f'drover_stage_seconds_total{{phase="decode",stage="{number}",worker="{name}"}}'] > 0
            assert figures[f'drover_wire_bytes_total{{direction="sent",worker="{name}"}}'] > 0
        assert coordinator.stop(signal.SIGTERM) == 0
    assert f'"url": "http://127.0.0.1:{port}"' in coordinator.output


def test_at_sigterm_the_running_answer_comes_to_its_end(tmp_path: Path, workers: str) -> None:
    port = free_port()
    body = {"prompt": "The licensor grants", "max_tokens": 40, "temperature": 0, "stream": True}
    with serve(tmp_path, port, workers) as coordinator:
        coordinator.wait_healthy(port)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            first = answer.readline()
            coordinator.popen.send_signal(signal.SIGTERM)
            refused = []
            thread = threading.Thread(target=lambda: refused.append(get(port, "/readyz")))
            thread.start()
            rest = answer.read().decode()
            thread.join()
        assert first.startswith(b"data: ")
        assert rest.count("data: ") > 35
        assert '"finish_reason": "length"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert coordinator.wait(SECONDS) == 0
    assert "Traceback" not in coordinator.output


def test_without_grace_it_ends_at_once(tmp_path: Path, workers: str) -> None:
    port = free_port()
    with serve(tmp_path, port, workers, "--grace", "0") as coordinator:
        coordinator.wait_healthy(port)
        body = {"prompt": "The", "max_tokens": 100, "temperature": 0, "stream": True}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            coordinator.popen.send_signal(signal.SIGTERM)
            assert "the coordinator is stopping" in answer.read().decode()
        assert coordinator.wait(SECONDS) == 0


def test_a_coordinator_that_lost_a_worker_asks_to_be_started_again(tmp_path: Path) -> None:
    port = free_port()
    with worker() as first, ExitStack() as stack:
        second = stack.enter_context(worker())
        with serve(tmp_path, port, f"{first},{second}") as coordinator:
            coordinator.wait_healthy(port)
            assert get(port, "/healthz")[0] == 200
            stack.close()
            status, text = get(port, "/healthz")
            assert (status, second in text) == (503, True)
            status, text = get(port, "/v1/completions", {"prompt": "The", "max_tokens": 2})
            assert (status, second in text) == (503, True)
            for path in ("/healthz", "/readyz", "/health"):
                status, text = get(port, path)
                assert (status, second in text) == (503, True)
            assert coordinator.stop(signal.SIGTERM) == 0
