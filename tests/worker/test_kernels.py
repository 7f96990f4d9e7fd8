"""Compiled kernels: taken over from an image, and compiled by a process of their own."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from llvmlite import binding

from drover.errors import DroverError
from drover.worker import kernels, machine
from drover.worker.devices.cpu.instructions import Level, settings
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


def test_each_level_of_instructions_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for level in (None, Level.GENERIC):
        for name in ("NUMBA_CACHE_DIR", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
            monkeypatch.setenv(name, "")
        with ExitStack() as stack:
            kernels.keep(tmp_path, stack, level)
            folders.add(os.environ["NUMBA_CACHE_DIR"])
    assert len(folders) == 2
    assert os.environ["NUMBA_CPU_NAME"] == "generic"


def test_a_level_has_what_the_processor_has_but_not_what_is_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict.fromkeys("avx2 fma f16c avxvnni avx512f avx512bw avx512vl avx512dq amx-tile amx-int8".split(), True)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {**features, "avx10.1-256": False, "evex512": True})
    assert settings(Level.AVX2)["NUMBA_CPU_FEATURES"] == "+avx2,+avxvnni,+f16c,+fma"
    wide = settings(Level.AVX512)["NUMBA_CPU_FEATURES"].split(",")
    assert "+avx512bw" in wide
    assert not [name for name in wide if "amx" in name or "avx10" in name]
    assert "+amx-int8" in settings(Level.AMX)["NUMBA_CPU_FEATURES"]


def test_a_level_above_the_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"avx2": True, "fma": True, "f16c": True})
    with pytest.raises(DroverError, match=r"lacks avx512f, .*, which avx512 needs; leave --cpu-level out"):
        settings(Level.AVX512)


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


@pytest.mark.parametrize(
    ("cores", "free", "processes"), [(8, 64 << 30, 4), (2, 64 << 30, 2), (8, 1200 << 20, 2), (8, 100 << 20, 1)]
)
def test_no_more_processes_than_there_are_cores_and_memory_for(
    cores: int, free: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(machine, "available_memory", lambda: free)
    assert kernels._processes() == processes


def test_it_does_nothing_for_a_worker_that_has_ended(tmp_path: Path) -> None:
    nobody = [sys.executable, "-m", "drover.worker.kernels", "-1"]
    subprocess.run(nobody, check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")})
    assert not (tmp_path / "kernels").exists()


def test_what_lacks_after_a_broken_start_is_compiled(tmp_path: Path) -> None:
    """Around functions that were kept before the worker was killed."""
    folder = tmp_path / "kernels"
    shutil.copytree(
        os.environ["NUMBA_CACHE_DIR"], folder, ignore=shutil.ignore_patterns("windows.arange-*", "complete")
    )
    code = "from drover.worker import kernels; kernels.compile_apart()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(folder)})
    assert (folder / "complete").exists()
    assert [path.suffix for path in folder.rglob("windows.arange-*")]


def test_a_process_of_its_own_leaves_the_kernels_behind() -> None:
    """In the folder of this test run, where the compiler has nothing to do but to say so."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    code = "from drover.worker import kernels; import sys; kernels.compile_apart(); assert 'numba' not in sys.modules"
    (folder / "complete").unlink(missing_ok=True)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (folder / "complete").exists()
