"""What is in use: counted within a process, locked between processes, and over when a process ends."""

import errno
import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drover.worker.holds import Holds

KEYS = [0, 3, 4, 1 << 63, (1 << 64) - 1]
HOLDER = """
import sys
from pathlib import Path
from drover.worker.holds import Holds
holds = Holds(Path(sys.argv[1]))
for key in sys.argv[2:]:
    holds.hold(int(key))
print("held", flush=True)
for line in sys.stdin:
    holds.release(int(line))
    print("released", flush=True)
"""


def free(holds: Holds, key: int) -> bool:
    with holds.claimed(key) as claimed:
        return claimed


@contextmanager
def another_process(folder: Path, *keys: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", HOLDER, str(folder), *map(str, keys)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("key", KEYS)
def test_every_holder_counts(tmp_path: Path, key: int) -> None:
    holds = Holds(tmp_path)
    assert free(holds, key)
    holds.hold(key)
    holds.hold(key)
    holds.release(key)
    assert not free(holds, key)
    holds.release(key)
    assert free(holds, key)


@pytest.mark.parametrize("key", KEYS)
def test_two_on_one_folder(tmp_path: Path, key: int) -> None:
    one, other = Holds(tmp_path), Holds(tmp_path)
    one.hold(key)
    other.hold(key)
    one.release(key)
    assert not free(one, key)
    assert free(one, key ^ 1 << 40)
    other.release(key)
    assert free(one, key)
    assert free(other, key)


def test_another_process_and_its_end(tmp_path: Path) -> None:
    holds = Holds(tmp_path)
    with another_process(tmp_path, *KEYS) as process:
        assert [free(holds, key) for key in KEYS] == [False] * len(KEYS)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{KEYS[2]}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "released\n"
        assert [free(holds, key) for key in KEYS] == [False, False, True, False, False]
        process.kill()
        process.wait()
        assert all(free(holds, key) for key in KEYS)


def test_nobody_begins_to_hold_what_is_claimed(tmp_path: Path) -> None:
    one, other = Holds(tmp_path), Holds(tmp_path)
    held = threading.Event()

    def hold() -> None:
        other.hold(8)
        held.set()

    thread = threading.Thread(target=hold)
    with one.claimed(8) as claimed:
        assert claimed
        thread.start()
        assert not held.wait(0.2)
    thread.join(10)
    assert held.is_set()
    assert not free(one, 8)


def test_one_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work(holds: Holds) -> None:
        nonlocal inside, most
        for _ in range(50):
            with holds.alone():
                with guard:
                    inside += 1
                    most = max(most, inside)
                with guard:
                    inside -= 1

    shared = Holds(tmp_path)
    threads = [threading.Thread(target=work, args=(holds,)) for holds in (shared, shared, Holds(tmp_path))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


@pytest.mark.parametrize("locks", [True, False])
def test_without_locks_a_process_knows_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    def none(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if locks:
        monkeypatch.setattr(fcntl, "fcntl", none)
    holds = Holds(tmp_path if locks else tmp_path / "missing")
    holds.hold(5)
    assert not free(holds, 5)
    holds.release(5)
    assert free(holds, 5)
    with holds.alone():
        pass
