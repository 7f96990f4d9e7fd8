"""`drover fetch` as a pod runs it: report, exit status, token file, and sources that an environment redirects."""

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import drover
from support.file_server import Files, serving
from support.processes import Running

MODEL = drover.MODEL.read_bytes()
DIGEST = hashlib.sha256(MODEL).hexdigest()
COMMIT = "c0ffee"


@pytest.fixture
def files() -> Iterator[Files]:
    with serving() as served:
        yield served


def run(folder: Path, *arguments: str | Path, **env: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and standard error."""
    report = folder / "report"
    command = [drover.COMMAND, "fetch", *map(str, arguments), "--into", str(folder / "models"), "--report", str(report)]
    environment = {**os.environ, "HF_HOME": str(folder / "hub"), **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(report.read_text()), done.stderr


def test_a_report_of_success(files: Files, tmp_path: Path) -> None:
    files.content["/m.gguf"] = MODEL
    for _ in range(2):
        status, report, said = run(tmp_path, f"{files.url}/m.gguf", "--sha256", DIGEST)
        assert status == 0
        assert report == {
            "ok": True,
            "reason": "Fetched",
            "message": "m.gguf, 3.4 MiB, llama",
            "path": str(tmp_path / "models/m.gguf"),
            "bytes": len(MODEL),
            "sha256": DIGEST,
            "architecture": "llama",
            "layers": 6,
        }
    assert json.loads(said.splitlines()[-1])["event"] == "model is there already"


@pytest.mark.parametrize(
    ("source", "options", "status", "reason"),
    [
        ("{url}/nothing.gguf", (), 1, "NotFound"),
        ("{url}/m.gguf", ("--sha256", "0" * 64), 1, "ChecksumMismatch"),
        ("{url}/m.gguf", ("--token-file", "/nowhere/token"), 1, "Failed"),
        ("{url}/page.gguf", (), 1, "ModelUnreadable"),
        ("http://127.0.0.1:1/m.gguf", (), 3, "SourceUnavailable"),
        ("s3://bucket/m.gguf", (), 1, "InvalidSource"),
    ],
)
def test_reports_of_failure(
    files: Files, source: str, options: tuple[str, ...], status: int, reason: str, tmp_path: Path
) -> None:
    files.content |= {"/m.gguf": MODEL, "/page.gguf": b"<html>nothing here</html>"}
    found, report, said = run(tmp_path, source.format(url=files.url), *options)
    assert (found, report["ok"], report["reason"]) == (status, False, reason)
    assert said.splitlines()[-1].startswith(f"drover: error: {reason}: ")


def test_a_file_of_the_hub_and_its_revision(files: Files, tmp_path: Path) -> None:
    with serving() as storage:
        storage.content["/blob"] = MODEL
        for revision in ("v1", COMMIT):
            path = f"/org/repo/resolve/{revision}/q4/m.gguf"
            files.redirects[path] = f"{storage.url}/blob"
            files.headers[path] = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(len(MODEL)),
                "X-Linked-Etag": f'"{DIGEST}"',
            }
        token = tmp_path / "token"
        token.write_text("hf_secret\n")
        status, report, _ = run(
            tmp_path, "hf://org/repo/q4/m.gguf@v1", "--token-file", token, HF_ENDPOINT=files.url, HF_TOKEN=""
        )
        assert (status, report["sha256"], report["architecture"]) == (0, DIGEST, "llama")
        assert {one.authorization for one in files.asked} == {"Bearer hf_secret"}
        assert {one.authorization for one in storage.asked} == {None}
        assert files.asked[-1].path == f"/org/repo/resolve/{COMMIT}/q4/m.gguf"


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (401, "RepoNotFound", "NotFound"),
        (404, "EntryNotFound", "NotFound"),
        (403, "GatedRepo", "Unauthorized"),
    ],
)
def test_what_the_hub_refuses(files: Files, status: int, code: str, reason: str, tmp_path: Path) -> None:
    path = "/org/repo/resolve/main/m.gguf"
    files.status[path] = [status]
    files.headers[path] = {"X-Error-Code": code, "X-Error-Message": "we say no"}
    found, report, _ = run(tmp_path, "hf://org/repo/m.gguf", HF_ENDPOINT=files.url)
    assert (found, report["reason"]) == (1, reason)
    assert path in report["message"]


def test_an_ollama_model_of_another_architecture(files: Files, tmp_path: Path) -> None:
    from support import tiny_model
    from support.tiny_model import Tiny

    tiny_model.write(tmp_path / "m", Tiny(architecture="glm4moelite"))
    data = (tmp_path / "m").read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": len(data)}
    files.content["/v2/library/glm/manifests/latest"] = json.dumps({"layers": [layer]}).encode()
    files.content[f"/v2/library/glm/blobs/{digest}"] = data
    status, report, _ = run(tmp_path, "ollama://glm", DROVER_OLLAMA_REGISTRY=files.url)
    assert (status, report["reason"], report["architecture"]) == (1, "UnsupportedArchitecture", "glm4moelite")
    assert "'deepseek2'" in report["message"]


def test_told_to_stop_it_leaves_a_part_to_go_on_from(files: Files, tmp_path: Path) -> None:
    files.content["/m.gguf"] = MODEL
    files.cut["/m.gguf"] = [100_000, *[0] * 4]
    command = [drover.COMMAND, "fetch", f"{files.url}/m.gguf", "--into", tmp_path / "models"]
    with Running(command, tmp_path / "log") as fetching:
        end = time.monotonic() + 30
        while "download interrupted" not in fetching.output:
            assert time.monotonic() < end, fetching.output
            time.sleep(0.02)
        assert fetching.stop(signal.SIGTERM) == 143
        assert "Traceback" not in fetching.output
    (part,) = (tmp_path / "models").glob(".*.part")
    assert part.stat().st_size >= 100_000
    files.cut.clear()
    files.asked.clear()
    status, report, _ = run(tmp_path, f"{files.url}/m.gguf")
    assert (status, report["sha256"]) == (0, DIGEST)
    assert files.downloads("/m.gguf")[0].startswith("bytes=100000-")  # type: ignore[union-attr]
