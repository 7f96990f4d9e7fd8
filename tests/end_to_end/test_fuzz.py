"""Twenty thousand frames, right and wrong, at guarded worker processes; `make fuzz` sends as many as you like."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drover.ggml.ops import METADATA_OPS
from drover.ggml.rules import RULES
from drover.rpc.versions import VERSIONS, pair
from fuzz import WARM_SESSIONS, require_same
from support.fuzz_drive import Drive
from support.fuzz_sessions import FRAMES, Sessions, material
from support.fuzz_wire import answers
from support.fuzz_worker import FindingError, Target

pytestmark = pytest.mark.timeout(300)

SEED = 20_000


@pytest.mark.parametrize(("protocol", "also", "frames"), [("8.0", "3.6", 14_000), ("5.1", "2.0", 6_000)])
def test_a_worker_under_fire(protocol: str, also: str, frames: int, tmp_path: Path) -> None:
    versions = pair(protocol, also)
    with Target(tmp_path, "--protocol", protocol, "--also", also) as target:
        drive = Drive(target, Sessions(SEED, *versions), versions)
        warm, count = min(WARM_SESSIONS, frames // FRAMES // 2), frames // FRAMES
        drive.run(range(warm))
        before = target.rest()
        drive.run(range(warm, count))
        require_same(before, target.rest())
        refused = target.refused()
        assert target.served() > frames // 2
        assert all(refused[reason] for reason in ("greeting", "frame", "request", "device", "memory", "unfinished"))


def test_sessions_are_made_again_of_their_seed() -> None:
    once = Sessions(SEED, *pair("8.0", "3.6"))
    material.cache_clear()
    again = Sessions(SEED, *pair("8.0", "3.6"))
    for number in range(30):
        assert once.session(number) == again.session(number)
        assert once.session(number) != once.session(number + 1)
        assert len(once.session(number).frames) == FRAMES


def test_every_operation_and_every_command_is_sent() -> None:
    sessions = Sessions(SEED, VERSIONS["8.0"])
    assert {pattern.op for pattern in sessions.patterns} == RULES.keys() - METADATA_OPS
    sent = {frame[0] for number in range(300) for frame in sessions.session(number).frames}
    assert sent >= VERSIONS["8.0"].commands.keys()


@pytest.mark.parametrize("name", ["8.0", "2.0"])
def test_right_sessions_are_many_and_have_answers(name: str) -> None:
    version = VERSIONS[name]
    sessions = Sessions(SEED, version)
    right = [session for session in map(sessions.session, range(400)) if session.right]
    assert len(right) > 5
    assert all(len(answers(b"".join(session.frames), version, None)) > 1 for session in right)


GUARDED = (
    "import ctypes, time; "
    "from support.guarded_worker import Fences; from drover.worker.devices.host import HostMemory; "
    "Fences().put_up(); memory = HostMemory(1 << 20); buffer = memory.alloc(100)"
)
BREAKS = {
    "write behind": ("ctypes.memset(buffer.address + 100, 1, 1); memory.free(buffer)", "behind"),
    "write before": ("ctypes.memset(buffer.address - 1, 1, 1); memory.free(buffer)", "before"),
    "write while it lives": ("ctypes.memset(buffer.address + 4195, 1, 1); time.sleep(10)", "behind"),
    "read far behind": ("ctypes.string_at(buffer.address + 100 + 4096 + 64, 1)", None),
    "read far before": ("ctypes.string_at(buffer.address - 4096, 1)", None),
    "read what was freed": ("at = buffer.address; memory.free(buffer); ctypes.string_at(at, 1)", None),
    "write what was freed": ("at = buffer.address; memory.free(buffer); ctypes.memset(at, 1, 1)", None),
}


@pytest.mark.parametrize("name", BREAKS)
def test_fences_find_who_leaves_a_buffer(name: str) -> None:
    deed, told = BREAKS[name]
    done = _python(f"{GUARDED}; {deed}")
    assert done.returncode == -(signal.SIGABRT if told else signal.SIGSEGV), done.stderr
    assert f"{told} a buffer of 100 bytes" in done.stderr if told else not done.stdout


def test_fences_let_in_who_stays_within() -> None:
    done = _python(f"{GUARDED}; buffer.array[:] = 7; ctypes.string_at(buffer.address, 4196); memory.free(buffer)")
    assert done.returncode == 0, done.stderr


def _python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_death_of_a_worker_is_found(tmp_path: Path) -> None:
    versions = pair("8.0", None)
    with Target(tmp_path) as target:
        drive = Drive(target, Sessions(SEED, *versions), versions)
        threading.Timer(1.0, target.running.popen.send_signal, (signal.SIGSEGV,)).start()
        with pytest.raises(FindingError, match=r"(?s)under way: .*the worker ended: SIGSEGV"):
            drive.run(range(100_000))
