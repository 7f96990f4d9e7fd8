"""Compiled kernels of the cpu device: where they are kept, and processes of their own that compile those that lack.

A compiler leaves some 300 MB behind in the process that it ran in. That of a child goes with it, and the worker loads
what its children have left in the folder. numba is not imported here: NUMBA_CACHE_DIR must be set before it is.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from pathlib import Path

import structlog

from drover.worker import machine
from drover.worker.devices.cpu.instructions import Level, settings
from drover.worker.devices.cpu.kernel_cache import cache_directory, compiling

SHIPPED = Path(sys.prefix, "share", "drover")
"""Where an image keeps the kernels that were compiled when it was built."""
_COMPLETE = "complete"
"""The mark of a folder that lacks nothing for the CPU it was made on."""
_LOCK = "lock"
_MOST_PROCESSES = 4
"""A few parts take so long that more would wait for them."""
_PROCESS_BYTES = 512 << 20
"""What each is to have of the memory that is free."""
_PR_SET_PDEATHSIG = 1

log = structlog.get_logger()


def keep(root: Path, stack: ExitStack, level: Level | None = None) -> None:
    """Tell numba what to compile for and where to keep it, unless the user has told it where.

    A folder we cannot use costs a warning. Raises DroverError if the processor is below the level asked for.
    """
    if level is not None:
        os.environ.update(settings(level))
    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    folder = cache_directory(root, level or "")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _copy_shipped(folder)
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        log.warning("compiled kernels cannot be kept", folder=str(folder), why=error.strerror or str(error))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drover-kernels-"))) / folder.name
        _copy_shipped(folder)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)


def _copy_shipped(folder: Path) -> None:
    """Start from the kernels that an image brings; numba uses those for this CPU, and adds its own on another."""
    shipped = SHIPPED / "kernels" / folder.name
    if folder.exists() or not shipped.is_dir():
        return
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder.parent, prefix="shipped-") as partial:
        whole = Path(partial, folder.name)
        shutil.copytree(shipped, whole, ignore=shutil.ignore_patterns(_COMPLETE, _LOCK))
        whole.rename(folder)


def compile_apart() -> None:
    """Have processes of their own compile what the folder lacks; if that fails, whoever opens the device compiles."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    if (folder / _COMPLETE).exists():
        return
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-m", "drover.worker.kernels", str(os.getpid())]
    with suppress(OSError):
        subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, check=False)


def main() -> None:
    """What the child does: share the parts among children of its own, for the worker whose process is the argument."""
    _end_with(int(sys.argv[1]))
    from drover.worker.devices.cpu.run import parts

    every = parts()
    with (
        compiling(Path(os.environ["NUMBA_CACHE_DIR"])),
        ProcessPoolExecutor(_processes(), get_context("fork"), _end_with, (os.getpid(),)) as pool,
    ):
        for done in [pool.submit(_compile, number) for number in range(len(every))]:
            done.result()


def _processes() -> int:
    """As many as there are cores and memory for."""
    return max(1, min(machine.usable_cores(), machine.available_memory() // _PROCESS_BYTES, _MOST_PROCESSES))


def _compile(number: int) -> None:
    from drover.worker.devices.cpu.run import parts

    parts()[number]()


def _end_with(parent: int) -> None:
    """End this process when the one that started it does, or now if that has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


if __name__ == "__main__":
    main()
