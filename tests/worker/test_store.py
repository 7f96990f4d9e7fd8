"""The weight cache: interchangeable with the stock server's, and every damage a miss."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from drover.errors import DroverError
from drover.hashing import fnv1a
from drover.worker.store import Store

DATA = bytes(range(256)) * 41
KEY = fnv1a(DATA)


def read(store: Store, key: int = KEY, size: int = len(DATA)) -> bytes | None:
    out = memoryview(bytearray(size))
    return bytes(out) if store.get(key, out) else None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_put_can_be_read_and_is_named_as_the_stock_server_does(tmp_path: Path) -> None:
    store = Store(tmp_path / "rpc")
    assert store.size(KEY) is None
    assert read(store) is None
    store.put(memoryview(DATA))
    assert store.size(KEY) == len(DATA)
    assert read(store) == DATA
    assert names(tmp_path / "rpc") == [f"{KEY:016x}"]
    assert (tmp_path / "rpc" / f"{KEY:016x}").read_bytes() == DATA


def test_a_file_of_the_stock_server_is_used(tmp_path: Path) -> None:
    (tmp_path / f"{KEY:016x}").write_bytes(DATA)
    assert read(Store(tmp_path)) == DATA


def test_larger_than_a_read(tmp_path: Path) -> None:
    data = os.urandom((9 << 20) + 3)
    store = Store(tmp_path)
    store.put(memoryview(data))
    assert read(store, fnv1a(data), len(data)) == data


@pytest.mark.parametrize("damaged", [DATA[:-1] + b"x", b"x" + DATA[1:]])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, damaged: bytes) -> None:
    store = Store(tmp_path)
    (tmp_path / f"{KEY:016x}").write_bytes(damaged)
    with capture_logs() as logs:
        assert read(store) is None
    assert [entry["event"] for entry in logs] == ["weight cache entry is damaged"]
    assert names(tmp_path) == []
    store.put(memoryview(DATA))
    assert read(store) == DATA


@pytest.mark.parametrize("damaged", [b"", DATA[:100], DATA + b"x"])
def test_a_file_of_another_size_is_a_miss_and_is_replaced(tmp_path: Path, damaged: bytes) -> None:
    store = Store(tmp_path)
    (tmp_path / f"{KEY:016x}").write_bytes(damaged)
    assert read(store) is None
    store.put(memoryview(DATA))
    assert read(store) == DATA


def test_things_that_are_no_files_are_misses(tmp_path: Path) -> None:
    (tmp_path / f"{KEY:016x}").mkdir()
    os.mkfifo(tmp_path / f"{1:016x}")
    store = Store(tmp_path)
    assert read(store) is None
    assert read(store, 1, 0) is None
    with capture_logs() as logs:
        store.put(memoryview(DATA))
        store.put(memoryview(DATA))
    assert [entry["log_level"] for entry in logs] == ["warning", "debug"]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_full_disk_is_said_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with capture_logs() as logs:
        store.put(memoryview(DATA))
        store.put(memoryview(DATA[1:]))
    assert names(tmp_path) == []
    assert [entry["log_level"] for entry in logs] == ["warning", "debug"]
    assert logs[0]["why"] == "No space left on device"


def test_a_folder_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    store = Store(tmp_path / "rpc")
    (tmp_path / "rpc").rmdir()
    assert read(store) is None
    store.put(memoryview(DATA))
    limited = Store(tmp_path / "rpc", limit=1 << 20)
    (tmp_path / "rpc").rmdir()
    limited.put(memoryview(DATA))


@pytest.mark.parametrize("place", ["file/rpc", "/proc/rpc"])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DroverError, match="not writable"):
        Store(tmp_path / place)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=250)
    blobs = [bytes([i]) * 100 for i in range(3)]
    for age, blob in zip((300, 200), blobs, strict=False):
        store.put(memoryview(blob))
        os.utime(tmp_path / f"{fnv1a(blob):016x}", (time.time() - age,) * 2)
    (tmp_path / "something of somebody").write_bytes(bytes(1000))
    assert read(store, fnv1a(blobs[0]), 100) == blobs[0]  # used: now the youngest
    store.put(memoryview(blobs[2]))
    assert store.size(fnv1a(blobs[1])) is None
    assert read(store, fnv1a(blobs[0]), 100)
    assert read(store, fnv1a(blobs[2]), 100)
    store.put(memoryview(bytes(251)))
    assert store.size(fnv1a(bytes(251))) is None
    assert (tmp_path / "something of somebody").exists()


def test_partial_files_left_behind_are_swept(tmp_path: Path) -> None:
    old, new = tmp_path / ".00-a.partial", tmp_path / ".00-b.partial"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1000.0, 1000.0))
    Store(tmp_path)
    assert names(tmp_path) == [new.name]


def test_many_writers_and_readers(tmp_path: Path) -> None:
    blobs = [bytes([i]) * 50_000 for i in range(4)]
    wrong: list[int] = []

    def work() -> None:
        store = Store(tmp_path, limit=120_000)
        for blob in blobs * 10:
            store.put(memoryview(blob))
            found = read(store, fnv1a(blob), len(blob))
            if found is not None and found != blob:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [name for name in names(tmp_path) if name.endswith(".partial")]
