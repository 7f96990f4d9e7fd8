"""The command as a user runs it; what each sub-command does is tested where it is."""

import subprocess
import sys
from pathlib import Path

import pytest

import drover

ROOT = Path(__file__).resolve().parents[1]
DROVER = Path(sys.executable).with_name("drover")
MODEL = ROOT / "examples/license-demo.Q4_K_M.gguf"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DROVER, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"drover {drover.__version__}\n")


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("worker", "serve", "load", "fetch", "up", "plan", "cache"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize("command", ["worker", "serve", "load", "fetch", "up", "plan", "cache"])
def test_every_command_explains_itself(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"Usage: drover {command} " in done.stdout


def test_nothing_heavy_is_imported_before_a_command_runs() -> None:
    script = (
        "import sys, drover.cli; print(sorted({'numpy', 'numba', 'pydantic', 'yaml', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_plan_shows_the_split_with_no_worker_running() -> None:
    done = run("plan", str(MODEL), "--workers", "1GiB,1GiB", "--tensor-split", "3,1", "--ctx-size", "256")
    assert (done.returncode, done.stderr) == (0, "")
    heading, first, second, total = (line.split() for line in done.stdout.splitlines())
    assert heading[:2] == ["device", "layers"]
    assert first[:2] == ["worker-0", "0-5"]
    assert second[:2] == ["worker-1", "output"]
    assert float(first[2]) + float(second[2]) == pytest.approx(float(total[1]), abs=0.2)


def test_plan_follows_memory() -> None:
    done = run("plan", str(MODEL), "--workers", "1GiB,3GiB")
    assert [line.split()[1] for line in done.stdout.splitlines()[1:3]] == ["0-1", "2-5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere.gguf", "--workers", "1GiB"], "nowhere.gguf"),
        (["plan", "README", "--workers", "1GiB"], "not a GGUF"),
        (["plan", "MODEL", "--workers", "4 gigs"], "'4 gigs' is not a size; write e.g. 4GiB"),
        (["plan", "MODEL", "--workers", "1GiB,"], "'' is not a size"),
        (["plan", "MODEL", "--workers", "1GiB", "--tensor-split", "1,2"], "2 proportions for 1 devices"),
        (["plan", "MODEL", "--workers", "3MiB"], "the model does not fit: it needs "),
        (["up", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["up", "README"], "README.md:"),
    ],
)
def test_an_error_is_one_line_and_status_1(arguments: list[str], message: str) -> None:
    files = {"README": str(ROOT / "README.md"), "MODEL": str(MODEL)}
    done = run(*(files.get(argument, argument) for argument in arguments))
    assert done.returncode == 1
    assert done.stderr.startswith("drover: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_wrong_flag_is_a_usage_error() -> None:
    done = run("plan", str(MODEL), "--wrkers", "1GiB")
    assert done.returncode == 2
    assert "--wrkers" in done.stderr
    assert "Traceback" not in done.stderr
