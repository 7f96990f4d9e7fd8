"""Where compiled kernels are kept: a folder named for everything they were compiled from.

numba only notices a change of the file that holds a function, not of those it calls: a digest of all of them as the
folder's name makes a stale kernel impossible. numba reads NUMBA_CACHE_DIR when it is imported: not imported here.
"""

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path

_SOURCES = Path(__file__).parent


def cache_directory(root: Path) -> Path:
    """The folder under `root` for the kernels of this very source, numba and Python."""
    digest = hashlib.sha256()
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(f"{package} {version(package)}\n".encode())
    digest.update(f"{sys.version}\n".encode())
    for path in sorted(_SOURCES.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return root / "kernels" / digest.hexdigest()[:16]
