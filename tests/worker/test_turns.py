"""A lock is had in the order in which it was asked for."""

import threading
import time
from collections.abc import Callable

import pytest

from drover.worker.turns import Turns


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_those_who_wait_have_it_in_the_order_they_came() -> None:
    turns = Turns()
    order: list[int] = []

    def work(number: int) -> None:
        with turns:
            order.append(number)

    turns.acquire()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait(lambda count=count: len(turns._waiting) == count)  # type: ignore[misc]
    turns.release()
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_one_who_comes_back_does_not_overtake() -> None:
    turns = Turns()
    order: list[str] = []
    turns.acquire()
    other = threading.Thread(target=lambda: (turns.acquire(), order.append("other"), turns.release()))
    other.start()
    wait(lambda: len(turns._waiting) == 1)
    turns.release()
    with turns:
        order.append("again")
    other.join()
    assert order == ["other", "again"]


def test_patience_ends() -> None:
    turns = Turns()
    assert turns.acquire(timeout=0)
    assert not turns.acquire(timeout=0.01)
    assert not turns._waiting
    turns.release()
    assert turns.acquire()
    turns.release()


def test_one_at_a_time() -> None:
    turns = Turns()
    inside = most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            if not turns.acquire(timeout=0.0001):
                turns.acquire()
            inside += 1
            most = max(most, inside)
            inside -= 1
            turns.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, inside) == (1, 0)
    assert turns.acquire(timeout=0)


def test_it_is_given_back_when_what_it_guards_fails() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns:
        _ = 1 / 0
    assert turns.acquire(timeout=0)
