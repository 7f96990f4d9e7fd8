"""Counters of a worker: what each event adds, from many threads at once."""

import threading
from itertools import count

import pytest

from drover.worker.tally import Counts, Tally


def test_what_each_event_adds() -> None:
    ticks = count(0, 2)
    tally = Tally(clock=lambda: float(next(ticks)))
    assert tally.counts == Counts()
    tally.client_came()
    tally.moved(received=10)
    tally.moved(sent=3)
    tally.hit(100)
    tally.missed()
    tally.sent_after_miss(50)
    with tally.computing():
        pass
    with pytest.raises(ZeroDivisionError), tally.computing():
        _ = 1 / 0
    assert tally.counts == Counts(1, 10, 3, 2, 4.0, 1, 1, 100, 50)


def test_no_event_is_lost_between_threads() -> None:
    tally = Tally()

    def work() -> None:
        for _ in range(500):
            tally.moved(received=1, sent=2)
            tally.hit(3)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tally.counts.received, tally.counts.sent, tally.counts.hit_bytes) == (4000, 8000, 12000)
