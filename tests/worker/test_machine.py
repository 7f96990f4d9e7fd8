"""Cores and memory as control groups of both versions leave them."""

import os
from pathlib import Path

import pytest

from drover.worker.machine import available_memory, usable_cores

GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": f"MemTotal: {20 * GIB >> 10} kB\nMemAvailable: {16 * GIB >> 10} kB\n"})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_control_groups(root: Path) -> None:
    assert available_memory(root) == 16 * GIB
    assert usable_cores(root) == CORES


def test_without_anything(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > 0
    assert usable_cores(tmp_path) == CORES


def test_version_2_the_tightest_parent_counts(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/pods/one\n",
            "sys/fs/cgroup/pods/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pods/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pods/one/memory.max": "max\n",
            "sys/fs/cgroup/pods/one/cpu.max": "50000 100000\n",
        },
    )
    assert available_memory(root) == 2 * GIB
    assert usable_cores(root) == 1


def test_version_1(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert available_memory(root) == GIB
    assert usable_cores(root) == 1


def test_version_1_where_controllers_share_a_mount(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "1:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        },
    )
    assert usable_cores(root) == 1


def test_version_2_beside_version_1(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "1:name=systemd:/box\n0::/box\n",
            "sys/fs/cgroup/unified/box/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/unified/box/memory.current": f"{GIB}\n",
        },
    )
    assert available_memory(root) == GIB


def test_no_quota(root: Path) -> None:
    write(
        root,
        {
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert usable_cores(root) == CORES


def test_a_group_that_is_over_its_limit_offers_nothing(root: Path) -> None:
    write(root, {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "2000\n"})
    assert available_memory(root) == 0
