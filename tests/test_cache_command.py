"""`drover cache`: what it says and does of a folder, beside a worker that uses it."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from drover import cache_command
from drover.coordinator.model_file import ModelFile
from drover.errors import DroverError, ModelError
from drover.hashing import fnv1a
from drover.worker.store import Store
from support.tiny_model import Tiny, write

DATA = bytes(range(256)) * 8
Said = Callable[..., Result]


@pytest.fixture
def said(tmp_path: Path) -> Said:
    """Run a command on the folder of the test; errors come out as they are."""

    def run(*words: str | Path) -> Result:
        arguments = [*map(str, words), "--cache-dir", str(tmp_path)]
        return CliRunner().invoke(cache_command.app, arguments, catch_exceptions=False)

    return run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "rpc")


def test_ls_lists_the_most_recent_first(said: Said, store: Store) -> None:
    client = store.use()
    for age, text in enumerate((b"old", b"new")):
        store.put(memoryview(text))
        os.utime(store.folder / f"{fnv1a(text):016x}", (1_000_000 + age,) * 2)
    assert client.get(fnv1a(b"new"), memoryview(bytearray(3)))
    (store.folder / f"{5:016x}").write_bytes(bytes(2048))
    os.utime(store.folder / f"{5:016x}", (1.0, 1.0))
    heading, *rows, total = said("ls").stdout.splitlines()
    assert heading.split()[0] == "hash"
    assert [row.split()[0] for row in rows] == [f"{key:016x}" for key in (fnv1a(b"new"), fnv1a(b"old"), 5)]
    assert [row.split()[-1] for row in rows] == ["yes", "no", "no"]
    assert [row.split()[-2] for row in rows] == [
        hashlib.sha256(b"new").hexdigest()[:16],
        hashlib.sha256(b"old").hexdigest()[:16],
        "-",
    ]
    assert total == f"3 tensors, 2.0 KiB in {store.folder}"


def test_ls_of_an_empty_folder_and_of_none(said: Said, tmp_path: Path) -> None:
    with pytest.raises(DroverError, match=f"no weight cache {tmp_path}/rpc; --cache-dir names"):
        said("ls")
    (tmp_path / "rpc").mkdir()
    assert said("ls").stdout == f"0 tensors, 0 B in {tmp_path}/rpc\n"


def test_verify_removes_damage_and_nothing_else(said: Said, store: Store) -> None:
    store.put(memoryview(DATA))
    (store.folder / f"{fnv1a(DATA[1:]):016x}").write_bytes(DATA[1:])
    (store.folder / f"{fnv1a(DATA[2:]):016x}").write_bytes(DATA[2:-1] + b"x")
    assert "2 of 3 tensors are sound, 1 of them without a SHA-256 until now; 1 were damaged" in said("verify").stdout
    assert "2 of 2 tensors are sound; 0 were damaged" in said("verify").stdout
    assert {row.key for row in store.rows()} == {fnv1a(DATA), fnv1a(DATA[1:])}


def test_keys_of_two_tensors_are_named(said: Said, store: Store) -> None:
    for text in (b"!0IC=VloaY", b"QvXtM>@Fp%"):
        store.put(memoryview(text))
    assert f"{0:016x}  kept for nobody" in said("ls").stdout
    assert "two tensors have, which are therefore not kept: 1\n" in said("verify").stdout


def test_prune_leaves_the_most_recent_and_what_is_in_use(said: Said, store: Store) -> None:
    blobs = [bytes([i]) * 1024 for i in range(4)]
    client = store.use()
    for age, blob in enumerate(blobs):
        store.put(memoryview(blob))
        os.utime(store.folder / f"{fnv1a(blob):016x}", (1000 + age,) * 2)
    assert client.put(memoryview(blobs[0]))
    assert said("prune", "--to", "2KiB").stdout == f"removed 2.0 KiB; 2.0 KiB in {store.folder}\n"
    assert {row.key for row in store.rows()} == {fnv1a(blobs[0]), fnv1a(blobs[3])}
    with pytest.raises(DroverError, match="in use by clients that are connected"):
        said("prune", "--to", "0")
    client.close()
    said("prune", "--to", "0")
    assert store.rows() == []


@pytest.mark.parametrize("per_file", [0, 5])
def test_seed_stores_every_tensor_once(said: Said, store: Store, tmp_path: Path, per_file: int) -> None:
    write(tmp_path / "m.gguf", Tiny(type="Q8_0"), per_file)
    path = next(iter(sorted(tmp_path.glob("m*.gguf"))))
    with ModelFile(path) as file:
        expected = {fnv1a(file.data(name)): bytes(file.data(name)) for name in file.tensors}
        said_first = said("seed", path).stdout
        assert said_first.startswith(f"{len(file.tensors)} tensors, ")
    assert f"it grew by {sum(map(len, expected.values()))} bytes" in said_first
    assert "it grew by 0 bytes" in said("seed", path).stdout
    assert {row.key for row in store.rows()} == set(expected)
    for key, data in expected.items():
        out = memoryview(bytearray(len(data)))
        assert store.get(key, out)
        assert bytes(out) == data


def test_seed_says_what_is_in_the_way(said: Said, store: Store, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Tiny())
    with pytest.raises(DroverError, match=r"has .* of weights, and .* may hold 1\.0 KiB: give more with --cache-size"):
        said("seed", tmp_path / "m.gguf", "--cache-size", "1KiB")
    with ModelFile(tmp_path / "m.gguf") as file:
        total = sum(info.nbytes for info in file.tensors.values())
    client = store.use()
    client.put(memoryview(DATA))
    with pytest.raises(DroverError, match=r"1 of \d+ tensors of .* are not in"):
        said("seed", tmp_path / "m.gguf", "--cache-size", str(total))
    client.close()
    with pytest.raises(ModelError):
        said("seed", tmp_path / "missing.gguf")
