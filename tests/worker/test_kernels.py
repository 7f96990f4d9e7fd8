"""Compiled kernels: taken over from an image, and compiled by a process of their own."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from drover.worker import kernels
from drover.worker.devices.cpu.kernel_cache import cache_directory


def test_kernels_of_an_image_are_taken_over_into_an_empty_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not the mark that says there is nothing left to compile: the CPU may be another."""
    shipped = cache_directory(tmp_path / "image")
    shipped.mkdir(parents=True)
    for name in ("a.nbi", "complete", "lock"):
        (shipped / name).write_text(name)
    monkeypatch.setattr(kernels, "SHIPPED", tmp_path / "image")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    volume = cache_directory(tmp_path / "volume")
    with ExitStack() as stack:
        kernels.keep(tmp_path / "volume", stack)
        assert os.environ["NUMBA_CACHE_DIR"] == str(volume)
    assert [path.name for path in volume.iterdir()] == ["a.nbi"]
    (volume / "a.nbi").write_text("own by now")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    with ExitStack() as stack:
        kernels.keep(tmp_path / "volume", stack)
    assert (volume / "a.nbi").read_text() == "own by now"
    assert [path.name for path in volume.parent.iterdir()] == [volume.name]


def test_nothing_is_started_where_nothing_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: started.append(command))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "complete").touch()
    kernels.compile_apart()
    assert not started
    (tmp_path / "complete").unlink()
    kernels.compile_apart()
    assert started == [[sys.executable, "-m", "drover.worker.kernels", str(os.getpid())]]


def test_it_does_nothing_for_a_worker_that_has_ended(tmp_path: Path) -> None:
    nobody = [sys.executable, "-m", "drover.worker.kernels", "-1"]
    subprocess.run(nobody, check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")})
    assert not (tmp_path / "kernels").exists()


def test_a_process_of_its_own_leaves_the_kernels_behind() -> None:
    """In the folder of this test run, where the compiler has nothing to do but to say so."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    code = "from drover.worker import kernels; import sys; kernels.compile_apart(); assert 'numba' not in sys.modules"
    (folder / "complete").unlink(missing_ok=True)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (folder / "complete").exists()
