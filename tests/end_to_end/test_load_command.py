"""`drover load` against real workers: the proof, its report, and every way it can fail."""

import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest

from drover.coordinator.model_file import ModelFile
from drover.worker.devices.device import Buffer
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.memory import SharedDevice
from drover.worker.server import Server, bind
from drover.worker.store import Store
from support import drover
from support.impostor import hello_reply, impostor
from support.tiny_model import write_stub
from support.worker_thread import worker

pytestmark = pytest.mark.timeout(300)

NOBODY = "127.0.0.1:1"
SMALL = ("--ctx-size", "64")


def load(*arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and standard error of the command."""
    command = [drover.COMMAND, "load", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert len(done.stdout.encode()) <= 4097
    return done.returncode, json.loads(done.stdout), done.stderr


@contextmanager
def serving(device: ReferenceDevice) -> Iterator[str]:
    server, listener = Server([SharedDevice(device)]), bind("127.0.0.1", 0)
    server.open(listener)
    thread = threading.Thread(target=server.serve, args=(listener,))
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join()


class Forgetful(ReferenceDevice):
    """A device that takes weights and keeps zeros."""

    def window(self, buffer: Buffer, offset: int, size: int) -> memoryview:
        whole = super().window(buffer, offset, size)
        return memoryview(bytearray(size)) if size > 1000 else whole


def test_the_proof_of_two_workers_and_then_from_their_caches(tmp_path: Path) -> None:
    with (
        worker(store=Store(tmp_path / "a")) as first,
        worker(store=Store(tmp_path / "b")) as second,
    ):
        report = tmp_path / "report"
        workers = ("--rpc", f"{first},{second}", "--tensor-split", "2,1", *SMALL)
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps({first: [0, 4], second: [5, 5]}))
        command = [drover.COMMAND, "load", str(drover.MODEL), *workers, "--report", str(report), "--expect", str(plan)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        data = json.loads(report.read_text())
        assert (data["ok"], data["reason"]) == (True, "Verified")
        assert data["model"]["architecture"] == "llama"
        assert data["model"]["layers"] == 6
        assert [(stage["worker"], stage["layers"]) for stage in data["stages"]] == [
            (first, "0-4"),
            (second, "5 + output"),
        ]
        for stage in data["stages"]:
            assert stage["memoryBefore"] - stage["memoryAfter"] >= stage["bytes"] > 0
            assert stage["wireSent"] > 0
            assert stage["wireReceived"] > 0
        uploaded = data["bytesUploaded"]
        assert (uploaded >= data["model"]["bytes"], data["bytesCached"]) == (True, 0)
        assert data["tokensPerSecond"] > 0
        assert data["promptTokensPerSecond"] > 0
        assert 0.01 < data["predictedTokensPerSecond"] / data["tokensPerSecond"] < 100
        assert (
            f"; {data['tokensPerSecond']:g} tokens/s, {data['predictedTokensPerSecond']:g} predicted" in data["message"]
        )
        assert data["text"]
        status, again, _ = load(drover.MODEL, *workers)
        assert status == 0
        assert (again["bytesUploaded"], again["bytesCached"]) == (0, uploaded)
        assert again["text"] == data["text"]


class Meddling(ReferenceDevice):
    """A device on whose machine something happens when the first weights come."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(64 << 20)
        self._act: Callable[[], object] | None = act

    def window(self, buffer: Buffer, offset: int, size: int) -> memoryview:
        if self._act is not None and size > 1000:
            self._act()
            self._act = None
        return super().window(buffer, offset, size)


def test_a_model_that_is_replaced_while_it_is_loaded_is_not_proven(tmp_path: Path) -> None:
    model, new = tmp_path / "m.gguf", tmp_path / "new.gguf"
    for path in (model, new):
        shutil.copy(drover.MODEL, path)
    with serving(Meddling(lambda: new.replace(model))) as endpoint:
        status, report, _ = load(model, "--rpc", endpoint, *SMALL)
        assert (status, report["ok"], report["reason"]) == (3, False, "ModelChanged")
        assert report["message"] == f"{model}: changed while it was being read; try again once it is there whole"
        status, report, _ = load(model, "--rpc", endpoint, *SMALL)
    assert (status, report["reason"]) == (0, "Verified")


def test_who_serves_notices_that_the_model_is_another_one(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(drover.MODEL, model)
    with worker() as endpoint:
        fingerprint = load(model, "--rpc", endpoint, *SMALL)[1]["fingerprint"]
        command = [drover.COMMAND, "serve", str(model), "--rpc", endpoint, "--fingerprint", fingerprint, *SMALL]
        once = ("--prompt", "The", "-n", "1")
        done = subprocess.run([*command, *once], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        other = bytearray(drover.MODEL.read_bytes())
        with ModelFile(model) as file:
            other[file.tensors["output_norm.weight"].offset] ^= 1
        (tmp_path / "new.gguf").write_bytes(other)
        (tmp_path / "new.gguf").replace(model)
        done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 4
        assert f"drover: error: {model}: another model than the one that was proven" in done.stderr.splitlines()[-1]
        status, report, _ = load(model, "--rpc", endpoint, *SMALL)
    assert (status, report["ok"]) == (0, True)
    assert report["fingerprint"] != fingerprint


@pytest.mark.interop
def test_the_proof_of_stock_workers_beside_our_own(stock_workers: list[int]) -> None:
    stock = f"127.0.0.1:{stock_workers[0]}"
    with worker() as ours:
        status, report, said = load(drover.MODEL, "--rpc", f"{stock},{ours}", "--tensor-split", "1,1", *SMALL)
    assert (status, report["reason"]) == (0, "Verified"), said
    assert [stage["worker"] for stage in report["stages"]] == [stock, ours]
    assert report["tokensPerSecond"] > 0


def test_a_worker_that_holds_nothing() -> None:
    with worker() as first, worker() as second:
        status, report, said = load(drover.MODEL, "--rpc", f"{first},{second}", "--tensor-split", "1,0", *SMALL)
    assert (status, report["ok"], report["reason"]) == (1, False, "SplitMismatch")
    assert report["message"] == f"worker {second} holds nothing of the model"
    assert f"SplitMismatch: worker {second}" in said
    assert report["tokensPerSecond"] > 0


def test_layers_that_lie_elsewhere_than_planned() -> None:
    with worker() as first, worker() as second:
        plan = json.dumps({first: [0, 2], second: [3, 5]})
        status, report, _ = load(
            drover.MODEL, "--rpc", f"{first},{second}", "--tensor-split", "5,1", "--expect", plan, *SMALL
        )
    assert (status, report["reason"]) == (1, "SplitMismatch")
    assert f"worker {first} holds layers 0 to 5, and was to hold layers 0 to 2" in report["message"]


def test_a_worker_that_forgets_what_it_was_sent() -> None:
    with worker() as first, serving(Forgetful(64 << 20)) as second:
        status, report, _ = load(drover.MODEL, "--rpc", f"{first},{second}", "--tensor-split", "1,1", *SMALL)
    assert (status, report["ok"]) == (1, False)
    assert report["reason"] == "SplitMismatch"
    assert f"worker {second} gives back other bytes than it was sent for " in report["message"]


def test_a_model_that_does_not_fit() -> None:
    with worker(limit=1 << 20) as first, worker(limit=1 << 20) as second:
        status, report, _ = load(drover.MODEL, "--rpc", f"{first},{second}", *SMALL)
    assert (status, report["reason"]) == (1, "DoesNotFit")
    assert "are left over; one more device with " in report["message"]


def test_workers_that_cannot_be_used() -> None:
    status, report, _ = load(drover.MODEL, "--rpc", NOBODY)
    assert (status, report["reason"]) == (3, "WorkerUnavailable")
    assert NOBODY in report["message"]
    with impostor(hello_reply(7, 0)) as port:
        status, report, _ = load(drover.MODEL, "--rpc", f"127.0.0.1:{port}")
    assert (status, report["reason"]) == (1, "IncompatibleWorker")
    assert "it speaks ggml RPC 7.0.0" in report["message"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--sha256", "0" * 64), "ChecksumMismatch"),
        (("--cache-type-k", "f99"), "InvalidSettings"),
        (("--expect", "[1, 2]"), "InvalidSettings"),
        (("--expect", '{"a:1": [1]}'), "InvalidSettings"),
        (("--expect", "{nope"), "InvalidSettings"),
    ],
)
def test_what_cannot_work_is_said_before_a_worker_is_asked(arguments: tuple[str, ...], reason: str) -> None:
    status, report, _ = load(drover.MODEL, "--rpc", NOBODY, *arguments)
    assert (status, report["ok"], report["reason"]) == (1, False, reason)


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    mammoth = write_stub(tmp_path / "m.gguf", "mammoth", gguf.GGMLQuantizationType.Q8_0)
    status, report, _ = load(mammoth, "--rpc", NOBODY)
    assert (status, report["reason"]) == (1, "UnsupportedArchitecture")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(drover.MODEL.read_bytes()[:-1000])
    status, report, _ = load(cut, "--rpc", NOBODY)
    assert (status, report["reason"]) == (1, "ModelUnreadable")
    digest = hashlib.sha256(drover.MODEL.read_bytes()).hexdigest()
    assert load(drover.MODEL, "--rpc", NOBODY, "--sha256", digest)[0] == 3
