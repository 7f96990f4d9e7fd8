"""Where built things are kept between runs: outside the checkout, each under a name that holds a digest of its sources.

DROVER_CLUSTER_CACHE moves the folder. A thing is made beside its place and renamed when it is whole, so a killed run
leaves nothing that looks finished.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT = Path("/var/cache/drover/cluster")
KEPT = 4
"""Versions of one thing that stay: work in several checkouts goes on beside each other."""


class ClusterUnavailableError(Exception):
    """Why there is no cluster to test on, in one line: what, where, what to do."""


def folder() -> Path:
    """The cache folder, made if need be."""
    path = Path(os.environ.get("DROVER_CLUSTER_CACHE") or DEFAULT)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterUnavailableError(f"{path}: {error.strerror}; name another in DROVER_CLUSTER_CACHE") from None
    return path


def digest(*sources: str | Path) -> str:
    """A short name for content: texts as they are, files and folders by relative name and bytes."""
    total = hashlib.sha256()
    for source in sources:
        if isinstance(source, str):
            total.update(source.encode() + b"\0")
            continue
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(str(path.relative_to(source.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def kept(kind: str, key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The file or folder KIND-KEY.SUFFIX; if it is not there, `make` writes it to the path it is given."""
    target = folder() / f"{kind}-{key}{suffix}"
    if not target.exists():
        with locked(kind):
            if not target.exists():
                started = time.monotonic()
                print(f"making {target.name}", file=sys.stderr, flush=True)
                _make(target, make)
                _drop_older(target, kind, suffix)
                print(f"made {target} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    os.utime(target)
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    for abandoned in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        make(partial / target.name)
        (partial / target.name).rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _drop_older(newest: Path, kind: str, suffix: str) -> None:
    versions = sorted(newest.parent.glob(f"{kind}-{'?' * 12}{suffix}"), key=lambda path: path.stat().st_mtime)
    for path in versions[:-KEPT]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def locked(name: str, seconds: float = 3600) -> Iterator[None]:
    """Hold a lock of the cache (or, with a path, of the machine); who has it is waited for, a killed run has not."""
    with (folder() / f"{name}.lock").open("a") as lock:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterUnavailableError(f"{lock.name}: another run has held it for {seconds:.0f} s") from None
                time.sleep(0.2)
        yield
