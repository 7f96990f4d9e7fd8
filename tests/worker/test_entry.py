"""One entry of the weight cache: read whole or not at all, shielded while it is mapped; what is written beside it."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drover.hashing import Fnv1a, fnv1a
from drover.worker import entry

SIZES = [0, 1, 4096, entry.PIECE - 1, entry.PIECE, entry.PIECE + 1, 3 * entry.PIECE + 17]
SHA = "a" * 64


@pytest.fixture(params=[True, False], ids=["mapped", "read"])
def mapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to the bytes: of a file that nobody can write to, and of one on which there is no lease."""
    if not request.param:
        monkeypatch.setattr(entry.Content, "_shield", lambda self: False)
    return bool(request.param)


@pytest.mark.parametrize("size", SIZES)
def test_a_pass_copies_and_hashes(tmp_path: Path, mapped: bool, size: int) -> None:
    data = os.urandom(size)
    path = tmp_path / "entry"
    path.write_bytes(data)
    out, fnv, sha = memoryview(bytearray(size)), Fnv1a(), hashlib.sha256()
    with entry.opened(path) as content:
        assert content is not None
        assert content.copy(out, fnv, sha)
        assert bytes(out) == data
        assert (fnv.value, sha.hexdigest()) == (fnv1a(data), hashlib.sha256(data).hexdigest())
        assert content.digest() == entry.Digest(size, fnv.value, sha.hexdigest())
        for other in (size + 1, max(0, size - 1)):
            assert other == size or not content.copy(memoryview(bytearray(other)))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_changes_size_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    monkeypatch.setattr(entry.Content, "_shield", lambda self: False)
    path = tmp_path / "entry"
    path.write_bytes(bytes(100))
    with entry.opened(path) as content:
        assert content is not None
        os.truncate(path, 100 + change)
        assert not content.copy(memoryview(bytearray(100)))
        assert content.digest().size == 100 + change


def test_nobody_cuts_a_mapped_file_short(tmp_path: Path) -> None:
    """Who tries waits until it is closed; without that a worker would die of it (SIGBUS)."""
    path = tmp_path / "entry"
    path.write_bytes(bytes(3 * entry.PIECE))
    with entry.opened(path) as content:
        assert content is not None
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
        with subprocess.Popen([sys.executable, "-c", f"open({str(path)!r}, 'wb')"]) as other:
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(1)
            assert content.copy(memoryview(bytearray(3 * entry.PIECE)))
            os.close(content.handle)
            assert other.wait(10) == 0
            os.dup2(os.open(path, os.O_RDONLY), content.handle)  # for the end of `opened`
    assert path.stat().st_size == 0


def test_a_file_that_is_being_written_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    path.write_bytes(b"half")
    with path.open("ab"), entry.opened(path) as content:
        assert content is not None
        assert content.being_written
        assert content.digest().size == 4
    with entry.opened(path) as content:
        assert content is not None
        assert not content.being_written


def test_what_is_no_file_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe", "missing"):
        with entry.opened(tmp_path / name) as content:
            assert content is None


def test_what_is_beside_is_for_sha256sum(tmp_path: Path) -> None:
    data = b"some weights"
    key, sha256 = fnv1a(data), hashlib.sha256(data).hexdigest()
    entry.path_of(tmp_path, key).write_bytes(data)
    entry.remember(tmp_path, key, sha256)
    assert entry.known(tmp_path, key) == (sha256,)
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", f"{key:016x}.sha256"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0
    entry.remember(tmp_path, key, sha256, SHA)
    assert entry.known(tmp_path, key) == (sha256, SHA)
    entry.remove(tmp_path, key)
    assert list(tmp_path.iterdir()) == []
    entry.remove(tmp_path, key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "nonsense",
        SHA,
        f"{SHA}  {2:016x}\n",
        f"{SHA} {1:016x}\n",
        f"{SHA.upper()}  {1:016x}\n",
        f"{SHA}  {1:016x}\n{SHA[1:]}",
        "é" * 5000,
    ],
)
def test_nonsense_beside_is_as_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / f"{1:016x}.sha256").write_text(text)
    assert entry.known(tmp_path, 1) == ()
