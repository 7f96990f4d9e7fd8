"""Real processes throughout: small Python programs, started and ended as workers are."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drover import herd
from drover.errors import WorkerError
from drover.herd import Herd

STAY = "import sys, time; print('ready', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + STAY
FAIL = "import sys; print('on stderr: 1\\non stderr: 2', file=sys.stderr); sys.exit(3)"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that `start` can run, on the path of the processes it starts."""
    for name, text in (("stay", STAY), ("stubborn", STUBBORN), ("fail", FAIL), ("end", "")):
        (tmp_path / f"{name}_program.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def is_ready(process: herd.Process) -> bool | None:
    return True if process.output.text == "ready\n" else None


def test_leaving_ends_every_process(programs: Path) -> None:
    with Herd(programs) as started:
        processes = [started.start(name, "stay_program") for name in ("a", "b")]
        for process in processes:
            assert started.wait_for(process.name, lambda process=process: is_ready(process))  # type: ignore[misc]
            assert process.ended() is None
    assert all("was killed by SIGTERM" in str(process.ended()) for process in processes)


def test_a_process_that_ignores_sigterm_is_killed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(herd, "STOP_SECONDS", 0.2)
    with Herd(programs) as started:
        process = started.start("a", "stubborn_program")
        started.wait_for("a", lambda: is_ready(process))
    assert "was killed by SIGKILL" in str(process.ended())


def test_the_first_to_end_is_named_with_its_status_and_its_last_lines(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Herd(programs) as started:
        stays = started.start("worker-0", "stay_program")
        fails = started.start("worker-1", "fail_program")
        with pytest.raises(WorkerError) as error:
            started.wait_for("worker-1", lambda: None)
    assert str(error.value) == (
        f"worker-1 (process {fails.pid}) ended with exit status 3; its last lines:\n  on stderr: 1\n  on stderr: 2"
    )
    assert stays.ended() is not None
    assert capsys.readouterr().err == "worker-1 | on stderr: 1\nworker-1 | on stderr: 2\n"


def test_watch_ends_when_one_does(programs: Path) -> None:
    with Herd(programs) as started:
        process = started.start("a", "stay_program")
        started.wait_for("a", lambda: is_ready(process))
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            started.watch()


def test_the_last_may_end_well_and_then_the_others_are_ended(programs: Path) -> None:
    with Herd(programs) as started:
        stays = started.start("a", "stay_program")
        last = started.start("b", "end_program")
        started.watch(last)
        assert stays.status is None
    assert (last.status, stays.status) == (0, -signal.SIGTERM)


def test_the_last_must_end_well(programs: Path) -> None:
    with Herd(programs) as started, pytest.raises(WorkerError, match=r"a \(process \d+\) ended with exit status 3$"):
        started.watch(started.start("a", "fail_program", attached=True))


def test_waiting_has_an_end(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(herd, "START_SECONDS", 0.2)
    with Herd(programs) as started:
        started.start("a", "stay_program")
        with pytest.raises(WorkerError, match="a is not ready after 0 s"):
            started.wait_for("a", lambda: None)


def test_no_orphan_even_when_the_starter_is_killed(programs: Path) -> None:
    starter = programs / "starter.py"
    starter.write_text(
        "import pathlib, sys, time\n"
        "from drover.herd import Herd\n"
        "with Herd(pathlib.Path(sys.argv[1])) as started:\n"
        "    print(started.start('a', 'stay_program').pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(starter), str(programs)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert running(child)
        parent.kill()
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running(child)


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_told_to_stop_it_ends_the_others_first(programs: Path, sign: signal.Signals, status: int) -> None:
    starter = programs / "starter.py"
    starter.write_text(
        "import pathlib, sys\n"
        "from drover.herd import Herd, sigterm_unwinds\n"
        "with sigterm_unwinds():\n"
        "    try:\n"
        "        with Herd(pathlib.Path(sys.argv[1])) as started:\n"
        "            print(started.start('a', 'stay_program').pid, flush=True)\n"
        "            started.watch()\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(130)\n"
    )
    with subprocess.Popen([sys.executable, str(starter), str(programs)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        parent.send_signal(sign)
        assert parent.wait(20) == status
    assert not running(child)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
