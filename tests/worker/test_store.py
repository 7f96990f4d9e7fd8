"""The weight cache: interchangeable with the stock server's, and every damage a miss."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from drover.errors import DroverError
from drover.hashing import fnv1a
from drover.worker import entry, holds
from drover.worker.store import Store

DATA = bytes(range(256)) * 41
KEY = fnv1a(DATA)
TWIN, OTHER_TWIN = b"!0IC=VloaY", b"QvXtM>@Fp%"
"""Two texts of one length whose FNV-1a hash is the same, 0."""


def read(store: Store, key: int = KEY, size: int = len(DATA)) -> bytes | None:
    out = memoryview(bytearray(size))
    return bytes(out) if store.get(key, out) else None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != holds.FILE)


def test_what_is_put_can_be_read_and_is_named_as_the_stock_server_does(tmp_path: Path) -> None:
    store = Store(tmp_path / "rpc")
    assert store.size(KEY) is None
    assert read(store) is None
    store.put(memoryview(DATA))
    assert store.size(KEY) == len(DATA)
    assert read(store) == DATA
    assert names(tmp_path / "rpc") == [f"{KEY:016x}", f"{KEY:016x}.sha256"]
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
    shutil.rmtree(tmp_path / "rpc")
    assert read(store) is None
    store.put(memoryview(DATA))
    limited = Store(tmp_path / "rpc", limit=1 << 20)
    shutil.rmtree(tmp_path / "rpc")
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


# the SHA-256 beside


def test_a_file_of_the_stock_server_gets_a_sha256_once_it_is_read(tmp_path: Path) -> None:
    (tmp_path / f"{KEY:016x}").write_bytes(DATA)
    store = Store(tmp_path)
    assert entry.known(tmp_path, KEY) == ()
    assert read(store) == DATA
    assert entry.known(tmp_path, KEY) == (hashlib.sha256(DATA).hexdigest(),)
    assert read(store) == DATA


def test_a_known_sha256_decides_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow hash is computed only where there is nothing else."""
    store = Store(tmp_path)
    store.put(memoryview(DATA))
    monkeypatch.setattr("drover.hashing.fnv1a", None)
    assert read(store) == DATA


@pytest.mark.parametrize("text", ["", "nonsense", f"{'0' * 64}  {1:016x}\n"])
def test_what_cannot_be_believed_beside_is_replaced(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    store.put(memoryview(DATA))
    (tmp_path / f"{KEY:016x}.sha256").write_text(text)
    assert read(store) == DATA
    assert entry.known(tmp_path, KEY) == (hashlib.sha256(DATA).hexdigest(),)


def test_bytes_that_are_not_those_stored_are_a_miss_though_the_key_fits(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(memoryview(TWIN))
    (tmp_path / f"{0:016x}").write_bytes(OTHER_TWIN)
    assert read(store, 0, len(TWIN)) is None
    assert names(tmp_path) == []


def test_two_tensors_with_one_key_are_both_misses_from_then_on(tmp_path: Path) -> None:
    assert fnv1a(TWIN) == fnv1a(OTHER_TWIN) == 0
    store = Store(tmp_path)
    assert store.put(memoryview(TWIN))
    with capture_logs() as logs:
        assert not store.put(memoryview(OTHER_TWIN))
    assert [line["event"] for line in logs] == ["two tensors share a hash; neither is kept"]
    for again in (store, Store(tmp_path)):
        assert not again.put(memoryview(TWIN))
        assert not again.put(memoryview(OTHER_TWIN))
        assert again.size(0) is None
        assert again.shared_keys() == [0]
    (tmp_path / f"{0:016x}").write_bytes(TWIN)  # as a stock server on the same folder would
    assert read(store, 0, len(TWIN)) is None
    assert store.check(0) == "shared"


@pytest.mark.parametrize("linked", [True, False], ids=["with hard links", "without"])
def test_who_stores_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool) -> None:
    """What somebody put there while we were writing is not replaced unseen."""
    store, other = Store(tmp_path), Store(tmp_path)
    texts = iter([TWIN, OTHER_TWIN])

    def meanwhile(handle: int) -> None:
        monkeypatch.undo()
        if not linked:
            monkeypatch.setattr(os, "link", lambda *names: os.unlink(tmp_path / "no such file"))
        other.put(memoryview(next(texts)))

    monkeypatch.setattr(os, "fsync", meanwhile)
    assert store.put(memoryview(TWIN))
    assert read(store, 0, len(TWIN)) == TWIN
    if linked:
        monkeypatch.setattr(os, "fsync", meanwhile)
        store.trim(0)
        assert not store.put(memoryview(TWIN))
        assert store.shared_keys() == [0]
    assert not [name for name in names(tmp_path) if name.endswith(".partial")]


def test_a_collision_is_found_where_no_sha256_is_known(tmp_path: Path) -> None:
    (tmp_path / f"{0:016x}").write_bytes(TWIN)
    store = Store(tmp_path)
    assert not store.put(memoryview(OTHER_TWIN))
    assert store.shared_keys() == [0]


def test_what_a_stock_server_stored_meanwhile_is_not_stored_again(tmp_path: Path) -> None:
    path = tmp_path / f"{KEY:016x}"
    path.write_bytes(DATA)
    inode = path.stat().st_ino
    assert Store(tmp_path).put(memoryview(DATA))
    assert path.stat().st_ino == inode
    assert entry.known(tmp_path, KEY) == (hashlib.sha256(DATA).hexdigest(),)


def test_a_file_that_somebody_is_writing_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with (tmp_path / f"{KEY:016x}").open("wb", buffering=0) as file:
        file.write(DATA[:-1] + b"x")
        assert read(store) is None
        assert store.check(KEY) == "busy"
        assert names(tmp_path) == [f"{KEY:016x}"]
    assert read(store) is None
    assert names(tmp_path) == []


def test_check_says_what_an_entry_is_and_removes_damage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.check(KEY) == "gone"
    (tmp_path / f"{KEY:016x}").write_bytes(DATA)
    assert [store.check(KEY), store.check(KEY)] == ["new", "sound"]
    (tmp_path / f"{KEY:016x}").write_bytes(DATA[1:])
    assert store.check(KEY) == "damaged"
    assert names(tmp_path) == []
    (tmp_path / f"{1:016x}").write_bytes(DATA)  # whole, and under a key that is not its own
    entry.remember(tmp_path, 1, hashlib.sha256(DATA).hexdigest())
    assert store.check(1) == "damaged"


def test_an_entry_that_the_disk_does_not_give_back_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.put(memoryview(DATA))

    def fail(*arguments: object) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(entry, "_populated", fail)
        patched.setattr(os, "readv", fail)
        assert read(store) is None
    assert names(tmp_path) == []
    assert store.put(memoryview(DATA))
    assert read(store) == DATA


def test_sha256s_of_nothing_are_swept(tmp_path: Path) -> None:
    entry.remember(tmp_path, KEY, "0" * 64)
    entry.remember(tmp_path, 1, "0" * 64, "1" * 64)
    Store(tmp_path)
    assert names(tmp_path) == [f"{1:016x}.sha256"]


# room


def test_without_a_limit_a_share_of_the_free_room_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{KEY:016x}").write_bytes(bytes(1000))
    system = os.statvfs_result((4096, 512, 900, 50, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    assert Store(tmp_path).limit == (10 * 512 + 1000) * 80 // 100


def test_what_a_client_has_stays_until_it_leaves(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=250)
    blobs = [bytes([i]) * 100 for i in range(4)]
    client, other = store.use(), Store(tmp_path, limit=250).use()
    assert client.put(memoryview(blobs[0]))
    store.put(memoryview(blobs[1]))
    assert client.get(fnv1a(blobs[1]), memoryview(bytearray(100)))
    assert not other.put(memoryview(blobs[2]))
    assert [store.in_use(fnv1a(blob)) for blob in blobs] == [True, True, False, False]
    assert store.trim(0) == 0
    client.close()
    client.close()
    assert other.put(memoryview(blobs[2]))
    assert store.size(fnv1a(blobs[0])) is None
    assert store.used == 200
    assert other.get(fnv1a(blobs[1]), memoryview(bytearray(100)))
    assert not other.put(memoryview(blobs[3]))
    other.close()
    assert store.trim(100) == 100
    assert store.evictions == 1


def test_a_miss_is_not_held(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=100)
    client = store.use()
    assert not client.get(KEY, memoryview(bytearray(len(DATA))))
    assert not client.put(memoryview(DATA))
    assert not store.in_use(KEY)


def test_a_damaged_entry_that_fills_the_limit_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f"{KEY:016x}").write_bytes(bytes(len(DATA)))
    client = Store(tmp_path, limit=len(DATA)).use()
    assert client.put(memoryview(DATA))
    assert client.get(KEY, memoryview(bytearray(len(DATA))))


WORKER = """
import random, sys
from pathlib import Path
from drover.hashing import fnv1a
from drover.worker.store import Store
folder, seed, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
store = Store(folder, limit)
wrong = 0
for _ in range(80):
    client = store.use()
    for _ in range(3):
        blob = bytes([rng.randrange(12)]) * 40_000
        out = memoryview(bytearray(len(blob)))
        what = rng.randrange(5)
        if what == 0:
            store.check(fnv1a(blob))
        elif what == 1:
            with open(folder / f"{fnv1a(blob):016x}", "wb") as file:  # as a stock server writes, and stops half-way
                file.write(blob[: rng.choice((20_000, 40_000))])
        else:
            client.put(memoryview(blob))
        if client.get(fnv1a(blob), out) and bytes(out) != blob:
            wrong += 1
    client.close()
    if rng.randrange(20) == 0:
        store.trim(limit // 2)
print(wrong)
"""


def test_many_processes_store_read_check_and_trim(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [
        subprocess.Popen([*command, str(seed), "200000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    for worker in workers:
        out, errors = worker.communicate(timeout=100)
        assert (worker.returncode, out.splitlines()[-1:]) == (0, ["0"]), errors
    store = Store(tmp_path, 200000)
    assert not [name for name in names(tmp_path) if name.endswith(".partial")]
    store.trim(200000)
    assert {store.check(row.key) for row in store.rows()} <= {"sound", "new", "damaged"}
    assert {store.check(row.key) for row in store.rows()} <= {"sound"}


FILLER = """
import os, sys
from pathlib import Path
from drover.worker.store import Store
store = Store(Path(sys.argv[1]), int(sys.argv[2]))
for _ in range(40):
    store.put(memoryview(os.urandom(10_000)))
"""


def test_many_processes_stay_within_the_limit(tmp_path: Path) -> None:
    limit = 100_000
    command = [sys.executable, "-c", FILLER, str(tmp_path), str(limit)]
    workers = [subprocess.Popen(command) for _ in range(3)]
    most, seen = 0, Store(tmp_path, limit)
    while any(worker.poll() is None for worker in workers):
        most = max(most, seen.used)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert 50_000 < most <= limit
    assert seen.used <= limit
