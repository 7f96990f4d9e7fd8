"""How threads share the items of a record."""

import numpy as np
import numpy.typing as npt
import pytest

from drover.worker.devices.cpu.record import RECORD_BYTES
from drover.worker.devices.cpu.simd import jit, store_i64
from drover.worker.devices.cpu.sync import each_run


@jit
def runs_of(record: int, items: int, least: int, most: int, threads: int, out: int) -> int:
    """Write the runs that a thread gets, if no other takes any; how many."""
    count = 0
    for first, size in each_run(record, items, least, most, threads):
        store_i64(out + 16 * count, first)
        store_i64(out + 16 * count + 8, size)
        count += 1
    return count


def runs(items: int, least: int, most: int, threads: int) -> npt.NDArray[np.int64]:
    """First items and sizes, in the order of claims."""
    record, found = np.zeros(RECORD_BYTES, np.uint8), np.zeros((items + 1, 2), np.int64)
    count = runs_of(record.ctypes.data, items, least, most, threads, found.ctypes.data)
    return found[:count]


@pytest.mark.parametrize("items", [1, 15, 16, 17, 255, 2048, 5632, 32000])
@pytest.mark.parametrize(("least", "most"), [(1, 1), (16, 4), (16, 64), (16, 1 << 20)])
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_runs_cover_every_item_once_and_get_no_longer(items: int, least: int, most: int, threads: int) -> None:
    found = runs(items, least, most, threads)
    firsts, sizes = found[:, 0], found[:, 1]
    assert firsts[0] == 0
    assert (firsts[1:] == firsts[:-1] + sizes[:-1]).all()
    assert firsts[-1] + sizes[-1] == items
    assert (np.diff(sizes) <= 0).all()
    assert sizes.max() <= max(least, most)
    assert (sizes[:-1] >= least).all()


def test_the_first_runs_are_half_of_the_work_and_the_last_are_short() -> None:
    sizes = runs(2048, 16, 2048, 2)[:, 1].tolist()
    assert sizes[:4] == [512, 512, 256, 256]
    assert sizes[-1] == 16
