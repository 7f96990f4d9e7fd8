"""What a model takes, from the heads of its files at a server: the same as from the files on disk, for few bytes."""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drover import plan, reports
from drover.coordinator import assembly
from drover.coordinator.model_file import ModelFile
from drover.coordinator.needs import Needs
from drover.coordinator.settings import Config
from drover.errors import ArchitectureError, ChecksumError, DroverError, FetchError, ModelError, RequestError
from drover.fetch import preview
from drover.fetch.measuring import measure
from drover.plan import Room
from drover.reports import HeaderReport
from support import drover, tiny_model
from support.file_server import Files, serving
from support.tiny_model import Tiny

MODEL = drover.MODEL.read_bytes()
PATH = "/models/m.gguf"
GIB = 1 << 30


@pytest.fixture
def files() -> Iterator[Files]:
    with serving() as served:
        served.content[PATH] = MODEL
        yield served


@pytest.fixture
def split(files: Files, tmp_path: Path) -> list[Path]:
    """A model in several files, on disk and at the server."""
    folder = tmp_path / "split"
    folder.mkdir()
    tiny_model.write(folder / "s.gguf", Tiny(layers=5, factors=True), tensors_per_file=20)
    paths = sorted(folder.iterdir())
    assert len(paths) == 3
    files.content |= {f"/{path.name}": path.read_bytes() for path in paths}
    return paths


def config(**settings: Any) -> Config:
    return Config(Path("elsewhere.gguf"), **settings)


def on_disk(path: Path, **settings: Any) -> Needs:
    with ModelFile(path) as file:
        return Needs(file, config(**settings))


def units_of(report: HeaderReport) -> list[plan.Unit]:
    assert report.units is not None
    return plan.units(plan.unpacked(report.units))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"context": 100},
        {"context": 1000, "parallel": 4},
        {"cache_type_k": "q8_0", "cache_type_v": "bf16"},
        {"context": 100_000, "parallel": 64, "cache_type_k": "F32"},
    ],
)
def test_it_is_what_the_coordinator_makes_of_the_file(files: Files, settings: dict[str, Any]) -> None:
    found = measure(files.url + PATH, config(**settings))
    needs = on_disk(drover.MODEL, **settings)
    assert units_of(found) == needs.units
    assert (found.reserve, found.layers, found.architecture) == (needs.reserve, 6, "llama")
    assert (found.bytes, found.sha256) == (len(MODEL), None)
    rooms = [Room("a", 200 * GIB, 200 * GIB), Room("b", 100 * GIB, 100 * GIB)]
    units = units_of(found)
    table = plan.table(plan.split(units, rooms, None, found.reserve or 0), units, rooms)
    assert table == assembly.preview(Config(drover.MODEL, **settings), rooms)


def test_only_the_head_is_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "FIRST_BYTES", 1 << 14)
    measure(files.url + PATH, config())
    assert files.downloads(PATH) == []
    ranges = [str(one.range) for one in files.asked]
    assert ranges == [f"bytes=0-{(1 << 14) * 4**step - 1}" for step in range(len(ranges))]
    assert int(ranges[-1].rpartition("-")[2]) < len(MODEL) // 4


def test_a_split_model_is_all_its_heads(files: Files, split: list[Path]) -> None:
    for path in split:
        found = measure(f"{files.url}/{path.name}", config(context=64))
        assert units_of(found) == on_disk(split[0], context=64).units
        assert found.bytes == sum(path.stat().st_size for path in split)
    assert {one.range for one in files.asked} == {f"bytes=0-{preview.FIRST_BYTES - 1}"}


def test_files_of_a_split_model_that_do_not_belong_together(files: Files, split: list[Path]) -> None:
    first, second, third = (f"/{path.name}" for path in split)
    right = dict(files.content)
    files.content[third] = right[second]
    with pytest.raises(ModelError, match=rf"{third}: by its contents file 2 of 3, by its name 3 of 3"):
        measure(files.url + first, config())
    files.content[third] = right[third][:-1000]
    with pytest.raises(ModelError, match=rf"{third}: truncated: "):
        measure(files.url + first, config())
    del files.content[third]
    with pytest.raises(FetchError, match="00003-of-00003") as error:
        measure(files.url + first, config())
    assert error.value.reason == "NotFound"
    files.content["/alone.gguf"] = right[first]
    with pytest.raises(ModelError, match=r"/alone\.gguf: by its contents file 1 of 3, by its name 1 of 1"):
        measure(f"{files.url}/alone.gguf", config())


@pytest.mark.parametrize(
    ("tiny", "settings", "kind", "says"),
    [
        (Tiny(architecture="glm4moelite"), {}, ArchitectureError, "what llama.cpp calls 'deepseek2'"),
        (Tiny(omitted=("output_norm.weight",)), {}, ModelError, "output_norm.weight is missing"),
        (Tiny(metadata={"expert_count": 8}), {}, ModelError, "mixture-of-experts"),
        (Tiny(), {"cache_type_k": "q3_0"}, RequestError, "'q3_0' is unknown"),
        (Tiny(), {"cache_type_v": "q8_0"}, RequestError, "the heads of this model have 16"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_it_is_downloaded(
    files: Files, tiny: Tiny, settings: dict[str, Any], kind: type[DroverError], says: str, tmp_path: Path
) -> None:
    tiny_model.write(tmp_path / "m", tiny)
    files.content[PATH] = (tmp_path / "m").read_bytes()
    with pytest.raises(kind, match=says):
        measure(files.url + PATH, config(**settings))


def test_the_hash_that_the_source_tells(files: Files) -> None:
    digest = hashlib.sha256(MODEL).hexdigest()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(MODEL)}
    files.content["/v2/library/tiny/manifests/latest"] = json.dumps({"layers": [layer]}).encode()
    files.content[f"/v2/library/tiny/blobs/sha256:{digest}"] = MODEL
    assert measure("ollama://tiny", config(), registry=files.url, sha256=digest.upper()).sha256 == digest
    with pytest.raises(ChecksumError, match="at its source, and 0000"):
        measure("ollama://tiny", config(), registry=files.url, sha256="0" * 64)


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and standard error of the command."""
    report = folder / "report"
    command = [drover.COMMAND, "fetch", *arguments, "--header-only", "--report", str(report)]
    environment = {**os.environ, "HF_HOME": str(folder / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(report.read_text()), done.stderr


def test_the_command(files: Files, tmp_path: Path) -> None:
    options = ("--ctx-size", "512", "--parallel", "2", "--cache-type-k", "q8_0", "--cache-type-v", "f32")
    status, report, _ = run(tmp_path, files.url + PATH, *options)
    found = measure(files.url + PATH, config(context=512, parallel=2, cache_type_k="q8_0", cache_type_v="f32"))
    assert (status, report) == (0, json.loads(reports.encode(found)))
    assert (report["reason"], report["layers"], report["bytes"]) == ("HeaderRead", 6, len(MODEL))
    assert report["message"].startswith("m.gguf, 3.4 MiB, llama, 6 layers; with a context of 512 tokens it takes ")
    assert {path.name for path in tmp_path.iterdir()} == {"report"}


@pytest.mark.parametrize(
    ("source", "options", "status", "reason"),
    [
        ("{url}/nothing.gguf", (), 1, "NotFound"),
        ("{url}/page.gguf", (), 1, "ModelUnreadable"),
        ("{url}/models/m.gguf", ("--cache-type-v", "q9"), 1, "InvalidSettings"),
        ("{url}/models/m.gguf", ("--token-file", "/nowhere/token"), 1, "Failed"),
        ("http://127.0.0.1:1/m.gguf", (), 3, "SourceUnavailable"),
        ("pvc://claim/m.gguf", (), 1, "InvalidSource"),
    ],
)
def test_the_command_fails_as_a_download_does(
    files: Files, source: str, options: tuple[str, ...], status: int, reason: str, tmp_path: Path
) -> None:
    files.content["/page.gguf"] = b"<html>nothing here</html>"
    found, report, said = run(tmp_path, source.format(url=files.url), *options)
    assert (found, report["ok"], report["reason"], report["units"]) == (status, False, reason, None)
    assert said.splitlines()[-1].startswith(f"drover: error: {reason}: ")


def test_a_folder_or_the_header(files: Files) -> None:
    for options in ((), ("--header-only", "--into", "x")):
        command = [drover.COMMAND, "fetch", files.url + PATH, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert "give a folder, or --header-only" in done.stderr
    assert files.asked == []
