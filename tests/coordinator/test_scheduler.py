"""Scheduler: who runs, in which order, and how prompts are cut."""

from drover.coordinator.scheduler import Scheduler
from drover.coordinator.sequence import Batch, Job, Sequence


def sequence(number: int, prompt: int) -> Sequence:
    return Sequence(number, Job(tuple(range(prompt)), 10), lambda event: None, tokens=list(range(prompt)))


def shape(batch: Batch | None) -> list[tuple[int, int, bool]]:
    return [(part.sequence.id, part.count, part.wants_logits) for part in batch.parts] if batch else []


def step(scheduler: Scheduler) -> list[tuple[int, int, bool]]:
    """What is computed next; sequences whose end was reached get a token, as from the engine."""
    batch = scheduler.next_batch()
    result = shape(batch)
    for part in batch.parts if batch else ():
        part.sequence.cached += part.count
        if part.wants_logits:
            part.sequence.tokens.append(0)
    return result


def test_nothing_to_do() -> None:
    scheduler = Scheduler(8)
    assert scheduler.idle
    assert scheduler.next_batch() is None


def test_a_prompt_goes_in_pieces_and_only_its_end_wants_logits() -> None:
    scheduler = Scheduler(8)
    scheduler.add(sequence(1, 20))
    assert [step(scheduler) for _ in range(5)] == [
        [(1, 8, False)],
        [(1, 8, False)],
        [(1, 4, True)],
        [(1, 1, True)],
        [(1, 1, True)],
    ]


def test_a_prompt_of_exactly_one_batch() -> None:
    scheduler = Scheduler(8)
    scheduler.add(sequence(1, 8))
    assert step(scheduler) == [(1, 8, True)]


def test_served_in_turn() -> None:
    scheduler = Scheduler(8)
    first, second = sequence(1, 4), sequence(2, 4)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == [(1, 4, True)]
    assert step(scheduler) == [(1, 1, True)]
    scheduler.finish(first)
    assert step(scheduler) == [(2, 4, True)]
    assert scheduler.sequences == [second]


def test_several_slots_share_a_batch_and_decoding_comes_first() -> None:
    scheduler = Scheduler(8, slots=2)
    scheduler.add(sequence(1, 3))
    scheduler.add(sequence(2, 12))
    scheduler.add(sequence(3, 1))
    assert step(scheduler) == [(1, 3, True), (2, 5, False)]
    assert step(scheduler) == [(1, 1, True), (2, 7, True)]
    assert step(scheduler) == [(1, 1, True), (2, 1, True)]


def test_a_waiting_sequence_can_be_finished() -> None:
    scheduler = Scheduler(8)
    running, waiting = sequence(1, 1), sequence(2, 1)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    assert scheduler.find(2) is waiting
    scheduler.finish(waiting)
    assert scheduler.find(2) is None
    scheduler.finish(running)
    assert scheduler.idle


def test_parts_know_their_tokens_and_positions() -> None:
    scheduler = Scheduler(3)
    scheduler.add(sequence(1, 5))
    step(scheduler)
    batch = scheduler.next_batch()
    assert batch is not None
    assert (batch.size, batch.parts[0].tokens, list(batch.parts[0].positions)) == (2, [3, 4], [3, 4])
