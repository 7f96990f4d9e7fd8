"""Fetching from a server on loopback: whole, in ranges, cut off, changed, refused; and what stays in the folder."""

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from drover.errors import ArchitectureError, ChecksumError, DroverError, FetchError, ModelError
from drover.fetch import preview, transfer
from drover.fetch.fetching import fetch, obtain
from drover.fetch.receipt import Fetched
from drover.fetch.transfer import Clock
from support import tiny_model
from support.file_server import Files, serving
from support.tiny_model import Tiny

PATH = "/models/m.gguf"
HURRIED = Clock(sleep=lambda _: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    tiny_model.write(path, Tiny(layers=3))
    return path.read_bytes()


@pytest.fixture
def files(model: bytes) -> Iterator[Files]:
    with serving() as served:
        served.content[PATH] = model
        yield served


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def get(files: Files, folder: Path, path: str = PATH, **options: Any) -> Fetched:
    return obtain(files.url + path, folder, clock=HURRIED, **options)


def there(folder: Path) -> set[str]:
    """Files that are no notes of ours."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_file_and_then_nothing_to_do(files: Files, model: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    found = get(files, folder, sha256=sha256(model).upper())
    assert found == Fetched(folder / "m.gguf", len(model), sha256(model), "llama", 3)
    assert found.path.read_bytes() == model
    assert there(folder) == {"m.gguf"}
    assert not list(folder.glob("*.part"))
    asked = len(files.asked)
    assert get(files, folder) == found
    assert fetch(files.url + PATH, folder) == found.path
    assert len(files.asked) == asked


def test_what_is_there_counts_only_if_it_is_the_same(files: Files, model: bytes, tmp_path: Path) -> None:
    get(files, tmp_path)
    (tmp_path / "m.gguf").write_bytes(model[:-1])
    assert get(files, tmp_path).path.read_bytes() == model
    with pytest.raises(ChecksumError, match=f"has the SHA-256 {sha256(model)}, where was asked for 0000"):
        get(files, tmp_path, sha256="0" * 64)
    other = files.url + "/other/m.gguf"
    files.content["/other/m.gguf"] = model
    asked = len(files.asked)
    assert obtain(other, tmp_path).path.read_bytes() == model
    assert len(files.asked) > asked


def test_a_cut_download_goes_on_where_it_was(files: Files, model: bytes, tmp_path: Path) -> None:
    files.cut[PATH] = [1000, 5000, 0, 700]
    with capture_logs() as logs:
        assert get(files, tmp_path).path.read_bytes() == model
    assert files.downloads(PATH) == [None, "bytes=1000-", "bytes=6000-", "bytes=6000-", "bytes=6700-"]
    assert [entry["event"] for entry in logs].count("download interrupted") == 4


def test_a_later_attempt_goes_on_where_an_earlier_one_was(files: Files, model: bytes, tmp_path: Path) -> None:
    files.cut[PATH] = [1234, *[0] * 5]
    with pytest.raises(FetchError, match="the connection ended early") as error:
        get(files, tmp_path)
    assert (error.value.reason, error.value.transient) == ("SourceUnavailable", True)
    assert there(tmp_path) == set()
    (part,) = tmp_path.glob(".m.gguf.*.part")
    assert part.read_bytes() == model[:1234]
    files.asked.clear()
    assert get(files, tmp_path).sha256 == sha256(model)
    assert files.downloads(PATH) == ["bytes=1234-"]
    assert not list(tmp_path.glob(".*.part"))


def test_a_part_of_another_version_is_not_continued(files: Files, tmp_path: Path) -> None:
    files.cut[PATH] = [1234, *[0] * 5]
    with pytest.raises(FetchError):
        get(files, tmp_path)
    tiny_model.write(tmp_path / "other", Tiny(layers=3, seed=2))
    files.content[PATH] = (tmp_path / "other").read_bytes()
    assert get(files, tmp_path).path.read_bytes() == files.content[PATH]
    assert files.downloads(PATH)[-1] is None
    assert not list(tmp_path.glob(".*.part"))


def test_a_part_that_is_whole_is_only_checked(files: Files, model: bytes, tmp_path: Path) -> None:
    files.cut[PATH] = [len(model) - 1, *[0] * 5]
    with pytest.raises(FetchError):
        get(files, tmp_path)
    (part,) = tmp_path.glob(".*.part")
    part.write_bytes(model)
    files.asked.clear()
    assert get(files, tmp_path).sha256 == sha256(model)
    assert files.downloads(PATH) == []


def test_a_server_that_knows_no_ranges(files: Files, model: bytes, tmp_path: Path) -> None:
    files.ranges = False
    files.cut[PATH] = [1000]
    assert get(files, tmp_path).path.read_bytes() == model


def test_redirects_keep_the_range_and_lose_the_token(files: Files, model: bytes, tmp_path: Path) -> None:
    with serving() as elsewhere:
        elsewhere.content["/blob"] = model
        elsewhere.cut["/blob"] = [1000]
        del files.content[PATH]
        files.redirects[PATH] = f"{elsewhere.url}/blob"
        assert get(files, tmp_path, token="secret").sha256 == sha256(model)
        assert elsewhere.downloads("/blob") == [None, "bytes=1000-"]
        assert {one.authorization for one in files.asked} == {"Bearer secret"}
        assert {one.authorization for one in elsewhere.asked} == {None}


@pytest.mark.parametrize(
    ("status", "reason", "transient"),
    [
        (401, "Unauthorized", False),
        (403, "Unauthorized", False),
        (404, "NotFound", False),
        (400, "Refused", False),
        (429, "SourceUnavailable", True),
        (503, "SourceUnavailable", True),
    ],
)
def test_refusals(files: Files, status: int, reason: str, transient: bool, tmp_path: Path) -> None:
    files.status[PATH] = [status]
    with pytest.raises(FetchError, match=rf"{PATH}.*\({status}\)") as error:
        get(files, tmp_path)
    assert (error.value.reason, error.value.transient) == (reason, transient)
    assert there(tmp_path) == set()


def test_a_server_that_is_busy_in_the_middle(files: Files, model: bytes, tmp_path: Path) -> None:
    files.cut[PATH] = [1000]
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            files.status[PATH] = [503, 503]

    found = obtain(files.url + PATH, tmp_path, clock=Clock(sleep=sleep))
    assert found.path.read_bytes() == model
    assert naps == [2, 4, 8]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/m.gguf", "http://no.such.host.invalid/m.gguf", "https://127.0.0.1:{port}/m.gguf"]
)
def test_a_server_that_is_not_there(files: Files, url: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="cannot be reached: ") as error:
        obtain(url.format(port=files.port), tmp_path)
    assert (error.value.reason, error.value.transient) == ("SourceUnavailable", True)


def test_a_wrong_hash_leaves_nothing(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ChecksumError, match=r"m\.gguf has the SHA-256 .* it is discarded"):
        get(files, tmp_path, sha256="0" * 64)
    assert there(tmp_path) == set()
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!DOCTYPE html>" + b"x" * 100, "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF", "truncated in its header"),
        (b"GGUF\x09\0\0\0" + bytes(16), "GGUF version 9"),
    ],
)
def test_what_is_no_model_is_not_downloaded(files: Files, content: bytes, says: str, tmp_path: Path) -> None:
    files.content[PATH] = content
    with pytest.raises(ModelError, match=says):
        get(files, tmp_path)
    assert files.downloads(PATH) == []


def test_a_model_that_is_truncated_at_its_source(files: Files, model: bytes, tmp_path: Path) -> None:
    files.content[PATH] = model[:-100]
    with pytest.raises(ModelError, match=rf"{PATH}: truncated: 100 of {len(model)} bytes are missing"):
        get(files, tmp_path)
    assert files.downloads(PATH) == []


@pytest.mark.parametrize(
    ("name", "says"), [("mammoth", "supported: llama$"), ("glm4moelite", "what llama.cpp calls 'deepseek2'")]
)
def test_an_architecture_that_we_do_not_load(files: Files, name: str, says: str, tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "m", Tiny(architecture=name))
    files.content[PATH] = (tmp_path / "m").read_bytes()
    with pytest.raises(ArchitectureError, match=says) as error:
        get(files, tmp_path / "into")
    assert error.value.architecture == name
    assert files.downloads(PATH) == []


def test_a_long_header_is_read_in_steps(
    files: Files, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "FIRST_BYTES", 100)
    assert get(files, tmp_path).layers == 3
    looks = [one.range for one in files.asked if (one.range or "").startswith("bytes=0-")]
    assert looks[:3] == ["bytes=0-99", "bytes=0-399", "bytes=0-1599"]
    monkeypatch.setattr(preview, "MOST_BYTES", 1000)
    with pytest.raises(ModelError, match="truncated in its header"):
        get(files, tmp_path / "again")


def test_all_parts_of_a_split_model(files: Files, model: bytes, tmp_path: Path) -> None:
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        files.content[f"/models/{name}"] = model + bytes(number)
    found = get(files, tmp_path, "/models/m-00002-of-00003.gguf", sha256=sha256(model))
    assert found.path == tmp_path / names[0]
    assert (found.bytes, found.sha256) == (3 * len(model) + 3, sha256(model))
    assert there(tmp_path) == set(names)
    asked = len(files.asked)
    assert get(files, tmp_path, "/models/m-00002-of-00003.gguf") == found
    assert len(files.asked) == asked
    (tmp_path / names[2]).unlink()
    assert get(files, tmp_path, "/models/m-00002-of-00003.gguf") == found
    del files.content[f"/models/{names[2]}"]
    with pytest.raises(FetchError, match="m-00003-of-00003") as error:
        get(files, tmp_path / "new", "/models/m-00002-of-00003.gguf")
    assert error.value.reason == "NotFound"
    assert there(tmp_path / "new") == set()


def test_a_volume_that_is_too_small(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(FetchError, match=r"m\.gguf needs .* more and .* has 1000 B left") as error:
        get(files, tmp_path)
    assert (error.value.reason, error.value.transient) == ("DiskFull", False)
    assert files.downloads(PATH) == []


def test_a_volume_that_is_too_small_for_all_parts(
    files: Files, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is said before the first of them is downloaded; what has come already counts as there."""
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    files.content |= {f"/models/{name}": model for name in names}
    files.cut[f"/models/{names[1]}"] = [1000, *[0] * 5]
    with pytest.raises(FetchError, match="the connection ended early"):
        get(files, tmp_path, f"/models/{names[0]}")
    assert there(tmp_path) == set()
    files.asked.clear()
    usage = shutil.disk_usage(tmp_path)
    free = len(model) - 1001
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: usage._replace(free=free))
    with pytest.raises(FetchError, match=r"m-00001-of-00002\.gguf and 1 more need .* left, 1 B too little"):
        get(files, tmp_path, f"/models/{names[0]}")
    free += 1
    assert get(files, tmp_path, f"/models/{names[0]}").bytes == 2 * len(model)
    assert [files.downloads(f"/models/{name}") for name in names] == [[], ["bytes=1000-"]]
    assert there(tmp_path) == set(names)


def test_a_volume_that_fills_up(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer.os, "fsync", full)
    with pytest.raises(FetchError, match=r"is full: m\.gguf needs") as error:
        get(files, tmp_path)
    assert error.value.reason == "DiskFull"


def test_a_folder_that_cannot_be_written(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="cannot be written") as error:
        get(files, tmp_path / "file")
    assert error.value.reason == "NotWritable"


def test_two_at_once_download_once(files: Files, model: bytes, tmp_path: Path) -> None:
    found: list[Fetched | DroverError] = []

    def work() -> None:
        try:
            found.append(get(files, tmp_path))
        except DroverError as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.sha256 for one in found if isinstance(one, Fetched)] == [sha256(model)] * 4
    assert files.downloads(PATH) == [None]


def test_progress_is_logged(files: Files, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", len(model) // 4)
    now = [0.0]

    def clock() -> float:
        now[0] += 4.0
        return now[0]

    with capture_logs() as logs:
        obtain(files.url + PATH, tmp_path, clock=Clock(now=clock))
    rows = [entry for entry in logs if entry["event"] == "downloading"]
    assert rows
    assert set(rows[0]) == {"event", "log_level", "file", "bytes", "total", "rate", "eta_seconds"}
    assert rows[0]["total"] == len(model)
    assert rows[0]["eta_seconds"] > 0


def manifest(digest: str, size: int, kind: str = "application/vnd.ollama.image.model") -> bytes:
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "1" * 64, "size": 5},
        {"mediaType": kind, "digest": digest, "size": size},
    ]
    return json.dumps({"schemaVersion": 2, "layers": layers}).encode()


def test_a_model_of_ollama(files: Files, model: bytes, tmp_path: Path) -> None:
    digest = f"sha256:{sha256(model)}"
    files.content["/v2/library/tiny/manifests/1b"] = manifest(digest, len(model))
    files.content[f"/v2/library/tiny/blobs/{digest}"] = model
    found = obtain("ollama://tiny:1b", tmp_path, registry=files.url + "/")
    assert found == Fetched(tmp_path / "tiny-1b.gguf", len(model), sha256(model), "llama", 3)
    with pytest.raises(ChecksumError, match="at its source"):
        obtain("ollama://tiny:1b", tmp_path, registry=files.url, sha256="0" * 64)
    files.content[f"/v2/library/tiny/blobs/{digest}"] = model[:-1] + b"x"
    with pytest.raises(ChecksumError, match="its source says"):
        obtain("ollama://tiny:1b", tmp_path / "again", registry=files.url)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "InvalidManifest"),
        (b"{}", "InvalidManifest"),
        (b'{"layers": 3}', "InvalidManifest"),
        (manifest("sha256:" + "a" * 64, 10, "application/x"), "NotFound"),
        (manifest("md5:123", 10), "InvalidManifest"),
    ],
)
def test_odd_manifests(files: Files, content: bytes, reason: str, tmp_path: Path) -> None:
    files.content["/v2/library/tiny/manifests/latest"] = content
    with pytest.raises(FetchError) as error:
        obtain("ollama://tiny", tmp_path, registry=files.url)
    assert error.value.reason == reason


def test_a_volume_is_nothing_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="nothing to fetch"):
        obtain("pvc://claim/m.gguf", tmp_path)
