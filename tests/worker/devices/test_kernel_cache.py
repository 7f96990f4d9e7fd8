"""Processes that start together compile the kernels once between them."""

import threading
from pathlib import Path

import pytest

from drover.worker.devices.cpu.kernel_cache import compiling


def test_one_compiles_while_the_other_waits(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    inside, waited = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        with compiling(folder):
            waited.set()

    thread = threading.Thread(target=other)
    thread.start()
    with compiling(folder):
        inside.set()
        assert not waited.wait(0.2)
    assert waited.wait(10)
    thread.join()


def test_nobody_waits_once_they_are_there(tmp_path: Path) -> None:
    with compiling(tmp_path):
        pass
    with compiling(tmp_path), compiling(tmp_path):
        pass


def test_a_failed_compilation_is_not_complete(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), compiling(tmp_path):
        print(1 // 0)
    assert not (tmp_path / "complete").exists()


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with compiling(tmp_path / "file" / "kernels"):
        pass
