"""What this process may use of the machine it runs on: cores and memory, as the kernel and its control group allow.

Read once at start-up; every file is optional, and what cannot be read limits nothing.
"""

import os
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Version 1 control groups say "no limit" with a number above this."""


def usable_cores(root: Path = _ROOT) -> int:
    """Cores we may run on at a time: those of our affinity mask, less if the control group has a quota."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups("cpu", root):
        quota = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
            cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(1, cores)


def available_memory(root: Path = _ROOT) -> int:
    """Bytes we can take without swapping: of the machine, or of the control group if that is less."""
    available = _meminfo(root, "MemAvailable")
    for group in _groups("memory", root):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        if 0 < limit < _UNLIMITED:
            used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
            available = min(available, max(0, limit - used + _reclaimable(group)))
    return available


def _groups(controller: str, root: Path) -> list[Path]:
    """Folders of our control group and its parents, for version 2 and for a controller of version 1."""
    whole = root / "sys/fs/cgroup"
    folders = [whole, whole / controller]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            below = Path(path.lstrip("/"))
            if number == "0":
                bases = [whole, whole / "unified"]
            else:
                bases = [whole / controller, whole / controllers] if controller in controllers.split(",") else []
            folders += [base / part for base in bases for part in (below, *below.parents)]
    return list(dict.fromkeys(folders))


def _reclaimable(group: Path) -> int:
    """File cache that the kernel drops before it refuses us memory."""
    with suppress(OSError, ValueError):
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        facts = {key: int(value) for key, value in pairs}
        return facts.get("total_inactive_file", facts.get("inactive_file", 0))
    return 0


def _meminfo(root: Path, key: str) -> int:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == key:
                return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else 0


def _words(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().split()
    return []
