"""Memory on the host: huge pages where the kernel grants them."""

import re
from pathlib import Path

import pytest

from drover.worker.devices.host import HostBuffer

SIZE = 64 << 20


def test_buffers_are_asked_to_lie_on_huge_pages() -> None:
    """The kernel's word: VmFlags of the mapping has `hg` (madvise MADV_HUGEPAGE)."""
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no transparent huge pages")
    buffer = HostBuffer(SIZE)
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = [text for text in mappings[1:] if covers(text, buffer.address)]
    flags = re.search(r"^VmFlags: (.*)$", ours[0], re.MULTILINE)
    assert flags
    assert "hg" in flags[1].split()


def covers(mapping: str, address: int) -> bool:
    start, end = (int(word, 16) for word in mapping.split(" ", 1)[0].split("-"))
    return start <= address < end
