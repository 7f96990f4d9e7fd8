"""KvCache: cells are taken lowest first, given back, shared by sequences; masks show what a token may see."""

import numpy as np
import pytest

from drover.coordinator.kv_cache import KvCache, round_up


def visible(cache: KvCache, sequence: int, position: int) -> list[int]:
    row = cache.mask(sequence, [position], cache.attended)[0]
    assert row.dtype == np.float16
    assert set(row[row != 0]) <= {np.float16(-np.inf)}
    return [int(cell) for cell in np.flatnonzero(row == 0)]


def test_cells_are_taken_from_the_lowest_free_one() -> None:
    cache = KvCache(256)
    assert list(cache.take(1, range(3))) == [0, 1, 2]
    assert list(cache.take(2, range(2))) == [3, 4]
    cache.drop(1)
    taken = cache.take(2, range(2, 7))
    assert list(taken) == [0, 1, 2, 5, 6]
    assert taken.dtype == np.int64
    assert cache.free == 256 - 7


def test_a_token_sees_itself_and_what_is_before_it_in_its_own_sequence() -> None:
    cache = KvCache(256)
    cache.take(1, range(3))
    cache.take(2, range(2))
    assert visible(cache, 1, 2) == [0, 1, 2]
    assert visible(cache, 1, 1) == [0, 1]
    assert visible(cache, 2, 0) == [3]
    mask = cache.mask(2, range(2), 256)
    assert mask.shape == (2, 256)
    assert (mask == 0).sum() == 3


def test_dropping_the_end_of_a_sequence() -> None:
    cache = KvCache(256)
    cache.take(1, range(5))
    cache.drop(1, 2)
    assert visible(cache, 1, 9) == [0, 1]
    assert list(cache.take(1, range(2, 4))) == [2, 3]
    assert visible(cache, 1, 3) == [0, 1, 2, 3]


def test_a_shared_prefix_is_stored_once_and_freed_by_the_last() -> None:
    cache = KvCache(256)
    cache.take(1, range(4))
    cache.share(1, 2, 3)
    assert cache.free == 252
    assert list(cache.take(2, [3])) == [4]
    assert visible(cache, 2, 3) == [0, 1, 2, 4]
    assert visible(cache, 1, 3) == [0, 1, 2, 3]
    cache.drop(1)
    assert cache.free == 252
    assert visible(cache, 2, 3) == [0, 1, 2, 4]
    cache.drop(2)
    assert cache.free == 256


def test_dropping_an_unknown_sequence_changes_nothing() -> None:
    cache = KvCache(256)
    cache.drop(7)
    assert cache.free == 256


@pytest.mark.parametrize(("tokens", "expected"), [(0, 256), (1, 256), (256, 256), (257, 512), (600, 768)])
def test_attended_cells_come_in_buckets(tokens: int, expected: int) -> None:
    cache = KvCache(1024)
    cache.take(1, range(tokens))
    assert cache.attended == expected


def test_attended_reaches_to_the_last_used_cell() -> None:
    cache = KvCache(1024)
    cache.take(1, range(300))
    cache.take(2, range(1))
    cache.drop(1)
    assert cache.attended == 512


@pytest.mark.parametrize(("cells", "expected"), [(1, 256), (256, 256), (257, 512)])
def test_round_up(cells: int, expected: int) -> None:
    assert round_up(cells) == expected
