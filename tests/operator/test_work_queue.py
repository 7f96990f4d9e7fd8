import threading

from drover_operator.work_queue import LONGEST_PAUSE, RESTLESS, WorkQueue

A, B = ("farm", "a"), ("farm", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue() -> tuple[WorkQueue, Clock]:
    clock = Clock()
    return WorkQueue(clock), clock


def due(work: WorkQueue) -> tuple[str, str] | None:
    """What could be taken now, without waiting for it."""
    key, _ = work._next()
    if key is not None:
        work.add(key)  # back again
    return key


def test_what_is_added_often_is_taken_once() -> None:
    work, _ = queue()
    for _ in range(3):
        work.add(A)
    assert work.take() == A
    work.done(A)
    assert due(work) is None
    assert len(work) == 0


def test_what_happens_during_work_is_done_after_it() -> None:
    work, _ = queue()
    work.add(A)
    assert work.take() == A
    work.add(A)
    assert due(work) is None
    work.done(A)
    assert work.take() == A


def test_the_sooner_of_two_times_counts() -> None:
    work, clock = queue()
    work.add(A, 10)
    work.add(A, 5)
    work.add(A, 20)
    work.add(B, 7)
    clock.now = 4.9
    assert due(work) is None
    clock.now = 8
    assert [work.take(), work.take()] == [A, B]


def test_failures_come_back_later_and_later() -> None:
    work, clock = queue()
    work.add(A)
    pauses = []
    for _ in range(12):
        assert work.take() == A
        pauses.append(work.failed(A))
        clock.now += pauses[-1]
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == LONGEST_PAUSE
    assert work.take() == A
    work.done(A)
    work.add(A)
    assert work.take() == A
    assert work.failed(A) == 1


def test_what_happens_during_a_pause_does_not_make_it_longer() -> None:
    work, clock = queue()
    work.add(A)
    for left in (20, 19, 18, 17):
        work.take()
        work.done(A, again=left)
        clock.now += 1
        if left > 17:
            work.add(A)
    clock.now += 15.9
    assert due(work) is None
    clock.now += 0.2
    assert work.take() == A


def test_who_asks_to_be_looked_at_again_is_and_ever_more_seldom() -> None:
    work, clock = queue()
    work.add(A)
    for pause in (10, 20, 40):
        assert work.take() == A
        work.done(A, again=10)
        clock.now += pause - 0.1
        assert due(work) is None
        clock.now += 0.1
    assert work.take() == A
    work.done(A, again=1000)
    clock.now += 999
    assert due(work) is None


def test_an_event_comes_before_the_time_asked_for() -> None:
    work, _ = queue()
    work.add(A)
    work.take()
    work.done(A, again=60)
    work.add(A)
    assert work.take() == A


def test_a_fight_over_an_object_slows_down() -> None:
    """Each write brings an event, and each event a write: without end, but ever more seldom."""
    work, clock = queue()
    cycles = []
    work.add(A)
    while clock.now < 3600:
        key, seconds = work._next()
        if key is None:
            clock.now += seconds or 0.1
            continue
        work.add(key)
        assert work.take() == A
        cycles.append(clock.now)
        work.add(A, 0.1)
        work.done(A, wrote=True)
    assert len(cycles) < RESTLESS + 25
    assert cycles[RESTLESS - 1] < 5


def test_one_cycle_at_rest_ends_it() -> None:
    work, clock = queue()
    for _ in range(RESTLESS + 5):
        work.add(A)
        clock.now += 1000
        assert work.take() == A
        work.done(A, wrote=True)
    work.add(A)
    assert due(work) is None
    work.add(A, fresh=True)
    assert due(work) == A
    clock.now += 1000
    assert work.take() == A
    assert work.done(A) == 0
    work.add(A)
    assert work.take() == A


def test_closing_lets_everybody_go() -> None:
    work, _ = queue()
    taken: list[object] = []
    threads = [threading.Thread(target=lambda: taken.append(work.take())) for _ in range(3)]
    for thread in threads:
        thread.start()
    work.close()
    for thread in threads:
        thread.join(5)
    assert taken == [None, None, None]


def test_many_threads_never_work_on_the_same_key() -> None:
    import time

    work, busy, seen, clashes = WorkQueue(time.monotonic), set[tuple[str, str]](), [0], [0]
    lock = threading.Lock()

    def turn() -> None:
        while (key := work.take()) is not None:
            with lock:
                clashes[0] += key in busy
                busy.add(key)
            time.sleep(0.0005)
            with lock:
                busy.discard(key)
                seen[0] += 1
            work.done(key)

    threads = [threading.Thread(target=turn) for _ in range(6)]
    for thread in threads:
        thread.start()
    for number in range(600):
        work.add(("farm", str(number % 7)))
    deadline = time.monotonic() + 10
    while len(work) and time.monotonic() < deadline:
        time.sleep(0.01)
    work.close()
    for thread in threads:
        thread.join(5)
    assert clashes == [0]
    assert seen[0] >= 7
