"""`drover up` with real workers and a real coordinator on the reference device, which has nothing to compile."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from drover.cli import volumes
from drover.errors import DroverError, SpecError
from drover.local import check_local, coordinator_arguments, model_file, worker_arguments
from drover.spec import InferenceCluster
from drover.spec_file import load
from support.file_server import serving

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples/license-demo.Q4_K_M.gguf"
SPEC = """\
apiVersion: drover.dev/v1alpha1
kind: InferenceCluster
metadata: {name: herd}
spec:
  model: {source: %s}
  context: 128
  workers: [{name: w, replicas: 2, device: reference, memory: 256MiB, threads: 1}]
  split: {proportions: [2, 1]}
  serving: {port: 0}
"""
DROVER = Path(sys.executable).with_name("drover")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "herd.yaml"
    path.write_text(SPEC % MODEL)
    return path


def written(file: Path, old: str, new: str) -> InferenceCluster:
    file.write_text(file.read_text().replace(old, new))
    return load(file)


def test_flags_of_a_worker(file: Path) -> None:
    (group,) = load(file).spec.workers
    assert worker_arguments(group, 1) == [
        "--host=127.0.0.1",
        "--port=0",
        "--device=reference",
        "--threads=1",
        f"--memory={256 << 20}",
    ]
    (group,) = written(file, "threads: 1", "port: 6000, cache: {enabled: true}").spec.workers
    assert worker_arguments(group, 1)[1:] == ["--port=6001", "--device=reference", f"--memory={256 << 20}", "--cache"]


def test_flags_of_the_coordinator(file: Path) -> None:
    spec = written(file, "serving: {port: 0}", "serving: {port: 80, apiKey: s}\n  cacheTypes: {k: q8_0}").spec
    assert coordinator_arguments(spec, MODEL, ["a:1", "b:2"]) == [
        str(MODEL),
        "--rpc=a:1,b:2",
        "--host=127.0.0.1",
        "--port=80",
        "--parallel=1",
        "--cache-type-k=q8_0",
        "--cache-type-v=f16",
        "--ctx-size=128",
        "--tensor-split=2,1",
        "--api-key=s",
    ]


def test_the_model_is_found_from_where_the_file_stands(file: Path) -> None:
    (file.parent / "m.gguf").write_bytes(b"GGUF")
    spec = written(file, str(MODEL), "m.gguf").spec
    assert model_file(spec.model, file, {}) == (file.parent / "m.gguf").resolve()


def test_a_model_that_is_missing_or_another_is_refused(file: Path) -> None:
    spec = written(file, str(MODEL), "m.gguf").spec
    with pytest.raises(SpecError, match=r"spec\.model\.source: there is no file .*m\.gguf"):
        model_file(spec.model, file, {})
    (file.parent / "m.gguf").write_bytes(b"GGUF")
    for content, fits in ((b"GGUF", True), (b"other", False)):
        hashed = spec.model.model_copy(update={"sha256": hashlib.sha256(content).hexdigest()})
        if fits:
            model_file(hashed, file, {})
        else:
            with pytest.raises(SpecError, match=r"spec\.model\.sha256: .* is another file, or damaged"):
                model_file(hashed, file, {})


def test_a_model_of_the_hub_is_downloaded_and_kept(file: Path, tmp_path: Path) -> None:
    data = MODEL.read_bytes()
    written(file, str(MODEL), f"hf://org/repo/m.gguf, sha256: {hashlib.sha256(data).hexdigest()}")
    with serving() as hub:
        hub.content["/org/repo/resolve/main/m.gguf"] = hub.content["/org/repo/resolve/c0ffee/m.gguf"] = data
        for path in hub.content:
            hub.headers[path] = {"X-Repo-Commit": "c0ffee"}
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        command = [str(DROVER), "up", str(file), "--models", str(tmp_path / "models"), "--prompt", "The", "-n", "4"]
        for _ in range(2):
            hub.asked.clear()
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
            assert done.returncode == 0, done.stderr
    assert not hub.asked, "the second start has the model"
    assert (tmp_path / "models/m.gguf").read_bytes() == data


def test_a_volume_claim_is_a_folder_here(file: Path, tmp_path: Path) -> None:
    spec = written(file, str(MODEL), "pvc://models/sub/m.gguf").spec
    with pytest.raises(SpecError, match=r"the volume claim 'models' needs a folder here: --volume models=FOLDER"):
        model_file(spec.model, file, {})
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/m.gguf").write_bytes(b"GGUF")
    assert model_file(spec.model, file, volumes([f"models={tmp_path}"])) == tmp_path / "sub/m.gguf"


@pytest.mark.parametrize(("word", "fault"), [("models", "write CLAIM=FOLDER"), ("m=/not/there", "there is no folder")])
def test_volumes_that_are_refused(word: str, fault: str) -> None:
    with pytest.raises(DroverError, match=fault):
        volumes([word])


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("threads: 1", "port: 65535", r"spec\.workers\[0\]\.port: 2 workers from 65535 on reach past port 65535"),
        (
            "{port: 0}",
            "{host: 0.0.0.0, apiKeySecretRef: {name: a, key: b}}",
            r"apiKeySecretRef: there are no Secrets",
        ),
        ("{port: 0}", "{apiKeySecretRef: {name: a, key: b}}", None),
    ],
)
def test_what_one_machine_cannot_keep_is_refused(file: Path, old: str, new: str, fault: str | None) -> None:
    with pytest.raises(SpecError, match=fault) if fault else nullcontext():
        check_local(written(file, old, new), file)


def test_one_prompt_across_two_workers(file: Path) -> None:
    command = [DROVER, "up", str(file), "--prompt", "The licensor grants", "-n", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "herd: starting 2 workers\nw-0 at 127.0.0.1:" in done.stdout
    assert "The licensor grants" in done.stdout
    assert "0-4" in done.stdout
    assert "5 + output" in done.stdout
    assert "tokens/s" in done.stdout


@pytest.mark.timeout(300)
def test_the_sample_for_a_claim_runs_here_as_its_head_says(tmp_path: Path) -> None:
    sample = ROOT / "manifests/samples/cpu-pvc.yaml"
    (line,) = [line for line in sample.read_text().splitlines() if line.startswith("#   drover up ")]
    command = [DROVER, *line.removeprefix("#   drover ").split(), "--prompt", "The licensor grants", "-n", "4"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "cpu-pvc: starting 2 workers" in done.stdout
    assert "The licensor grants" in done.stdout
    assert list(tmp_path.rglob("rpc")), "the sample asks for a cache"


def test_it_ends_everything_when_a_worker_dies_and_says_which(file: Path, tmp_path: Path) -> None:
    file.write_text(file.read_text().replace("serving: {port: 0}", "serving: {enabled: false}"))
    with subprocess.Popen([DROVER, "up", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        try:
            assert up.stdout
            while "ready for a client" not in (line := up.stdout.readline()):
                assert line, up.communicate()
            first, second = children(up.pid)
            os.kill(second, signal.SIGKILL)
            _, errors = up.communicate(timeout=30)
        finally:
            up.kill()
    assert up.returncode == 1
    assert f"drover: error: w-1 (process {second}) was killed by SIGKILL" in errors
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_stop_it_leaves_nothing_behind(file: Path, sign: signal.Signals, status: int) -> None:
    file.write_text(file.read_text().replace("serving: {port: 0}", "serving: {enabled: false}"))
    with subprocess.Popen([DROVER, "up", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        try:
            deadline = time.monotonic() + 60
            while len(workers := children(up.pid)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            up.send_signal(sign)
            _, errors = up.communicate(timeout=30)
        finally:
            up.kill()
    assert (up.returncode, "Traceback" in errors) == (status, False)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_a_worker_that_cannot_start_is_reported_with_its_own_words(file: Path) -> None:
    written(file, "device: reference", "device: cuda")
    done = subprocess.run([DROVER, "up", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ended with exit status 1: " in done.stderr
    assert "Traceback" not in done.stderr


def children(pid: int) -> list[int]:
    """Process ids of direct children, in the order they were started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
