"""Where compiled kernels are kept: a folder named for everything they were compiled from.

numba only notices a change of the file that holds a function, not of those it calls: a digest of all of them as the
folder's name makes a stale kernel impossible. numba reads NUMBA_CACHE_DIR when it is imported: not imported here.
"""

import fcntl
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

_COMPLETE = "complete"
_SOURCES = Path(__file__).parent


def cache_directory(root: Path, level: str = "") -> Path:
    """The folder under `root` for the kernels of this very source, numba, Python and level of instructions."""
    digest = hashlib.sha256()
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(f"{package} {version(package)}\n".encode())
    digest.update(f"{sys.version}\n{level}\n".encode())
    for path in sorted(_SOURCES.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return root / "kernels" / digest.hexdigest()[:16]


@contextmanager
def compiling(folder: Path) -> Iterator[None]:
    """Compile kernels within: of several processes that want the same, one does it and the others wait to load them.

    Once they are all there nobody waits; in a folder that cannot be written everybody compiles.
    """
    if (folder / _COMPLETE).exists():
        yield
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = (folder / "lock").open("w")
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        with suppress(OSError):
            (folder / _COMPLETE).touch()
