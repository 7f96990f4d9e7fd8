"""Counters of a worker: what each event adds, from many threads at once."""

import threading
from itertools import count

import pytest

from drover.worker.tally import Counts, Tally, Traffic


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
    with tally.computing(7):
        pass
    with pytest.raises(ZeroDivisionError), tally.computing(5):
        _ = 1 / 0
    assert tally.counts == Counts(1, 10, 3, 2, 4.0, 1, 1, 100, 50, 12)


def test_commands_and_refusals() -> None:
    tally = Tally()
    tally.served("SET_TENSOR", 100, 0)
    tally.served("SET_TENSOR", 50, 0)
    tally.served("HELLO", 33, 36)
    tally.refuse("limit")
    assert tally.commands["SET_TENSOR"] == Traffic(2, 150, 0)
    assert tally.commands["HELLO"] == Traffic(1, 33, 36)
    assert tally.commands["GET_TENSOR"] == Traffic()
    assert {reason: count for reason, count in tally.refused.items() if count} == {"limit": 1}


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
