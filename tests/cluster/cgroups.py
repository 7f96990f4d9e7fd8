"""The control groups of the node's pods: below one group of our own, so that all of them can be found and ended."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from cluster.cache import ClusterUnavailableError

NAME = "drover-kube"
MOUNT = Path("/sys/fs/cgroup")


def make() -> None:
    """Make the group in every hierarchy there is (one, with version 2)."""
    try:
        for root in _hierarchies():
            group = root / NAME
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # version 1: empty sets refuse every process
                if (group / name).exists() and not (MOUNT / "cgroup.controllers").exists():
                    (group / name).write_text((root / name).read_text())
            if (root / "cgroup.controllers").exists() and root == MOUNT:
                wanted = " ".join(f"+{name}" for name in (root / "cgroup.controllers").read_text().split())
                (root / "cgroup.subtree_control").write_text(wanted)
                (group / "cgroup.subtree_control").write_text(wanted)
    except OSError as error:
        raise ClusterUnavailableError(f"{error.filename}: {error.strerror}; control groups must be writable") from None


def processes() -> set[int]:
    """Everything that runs in a pod of the node."""
    return {
        int(pid)
        for root in _hierarchies()
        for file in (root / NAME).rglob("cgroup.procs")
        for pid in _read(file).split()
    }


def remove() -> None:
    """Remove the emptied groups, inner ones first."""
    for root in _hierarchies():
        deadline = time.monotonic() + 5
        while (root / NAME).exists() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(root / NAME, topdown=False):
                _remove_empty(Path(folder))
            time.sleep(0.02)


def kill(pids: set[int]) -> None:
    """End them at once."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _hierarchies() -> Iterator[Path]:
    if (MOUNT / "cgroup.controllers").exists():
        yield MOUNT
        return
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(where)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the group went away meanwhile
        return ""


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
