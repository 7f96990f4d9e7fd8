"""Sampler: which tokens each setting leaves, that a draw follows the probabilities, and that seeds repeat."""

from collections import Counter

import numpy as np
import pytest

from drover.coordinator import sampler
from drover.coordinator.sampler import Sampler
from drover.coordinator.sequence import Sampling
from drover.errors import DeviceError

LOGITS = np.log(np.array([0.05, 0.4, 0.25, 0.2, 0.1], np.float32))


def drawn(sampling: Sampling, logits: np.ndarray = LOGITS, count: int = 400) -> Counter[int]:  # type: ignore[type-arg]
    rng = np.random.default_rng(3)
    return Counter(sampler.draw(logits, sampling, rng) for _ in range(count))


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=0), {1}),
        (Sampling(), {0, 1, 2, 3, 4}),
        (Sampling(top_k=1), {1}),
        (Sampling(top_k=3), {1, 2, 3}),
        (Sampling(top_k=99), {0, 1, 2, 3, 4}),
        (Sampling(top_p=0.6), {1, 2}),
        (Sampling(top_p=0.3), {1}),
        (Sampling(top_p=0.0), {1}),
        (Sampling(min_p=0.45), {1, 2, 3}),
        (Sampling(min_p=1.0), {1}),
        (Sampling(top_k=4, top_p=0.9, min_p=0.4), {1, 2, 3}),
        (Sampling(temperature=0.01), {1}),
    ],
    ids=str,
)
def test_what_can_be_drawn(sampling: Sampling, possible: set[int]) -> None:
    assert set(drawn(sampling)) == possible


def test_draws_follow_the_probabilities() -> None:
    counts = drawn(Sampling(), count=4000)
    assert [counts[i] / 4000 for i in range(5)] == pytest.approx([0.05, 0.4, 0.25, 0.2, 0.1], abs=0.03)


def test_temperature_flattens() -> None:
    assert drawn(Sampling(temperature=5.0))[0] > 2 * drawn(Sampling())[0]


def test_equal_logits_at_temperature_zero_give_the_lowest_id() -> None:
    assert sampler.draw(np.zeros(4, np.float32), Sampling(temperature=0), np.random.default_rng()) == 0


def test_a_seed_repeats() -> None:
    def run(seed: int) -> list[int]:
        chooser = Sampler(Sampling(), np.random.default_rng(seed))
        return [chooser.choose(LOGITS, [1]).token for _ in range(50)]

    assert run(5) == run(5) != run(6)


PENALTIES = {
    "none": (Sampling(), [1, 1, 2], [2.0, 2.0, -2.0, 0.0]),
    "repeat": (Sampling(repeat_penalty=2.0), [1, 1, 2], [2.0, 1.0, -4.0, 0.0]),
    "presence": (Sampling(presence_penalty=0.5), [1, 1, 2], [2.0, 1.5, -2.5, 0.0]),
    "frequency": (Sampling(frequency_penalty=0.5), [1, 1, 2], [2.0, 1.0, -2.5, 0.0]),
    "last one only": (Sampling(frequency_penalty=0.5, repeat_last_n=1), [1, 1, 2], [2.0, 2.0, -2.5, 0.0]),
    "no history": (Sampling(repeat_penalty=2.0), [], [2.0, 2.0, -2.0, 0.0]),
    "looking back 0": (Sampling(repeat_penalty=2.0, repeat_last_n=0), [1], [2.0, 2.0, -2.0, 0.0]),
    "looking back all": (Sampling(frequency_penalty=1.0, repeat_last_n=-1), [1] * 99, [2.0, -97.0, -2.0, 0.0]),
    "bias": (Sampling(logit_bias=((3, 5.0), (0, -1.0), (77, 1.0), (-1, 1.0))), [], [1.0, 2.0, -2.0, 5.0]),
}


@pytest.mark.parametrize(("sampling", "history", "expected"), PENALTIES.values(), ids=PENALTIES)
def test_penalties(sampling: Sampling, history: list[int], expected: list[float]) -> None:
    logits = np.array([2, 2, -2, 0], np.float32)
    assert list(sampler.adjusted(logits, sampling, history)) == expected
    assert list(logits) == [2, 2, -2, 0]


def test_log_probabilities_are_of_the_unmodified_logits() -> None:
    biased = Sampling(temperature=0, logit_bias=((0, 100.0),))
    choice = Sampler(biased, np.random.default_rng(0), 2).choose(LOGITS, [])
    assert choice.token == 0
    assert choice.logprob == pytest.approx(np.log(0.05), abs=1e-6)
    assert [token for token, _ in choice.top] == [1, 2]
    assert [logprob for _, logprob in choice.top] == pytest.approx([np.log(0.4), np.log(0.25)], abs=1e-6)


@pytest.mark.parametrize(("top", "length"), [(None, 0), (0, 0), (3, 3), (99, 5)])
def test_how_many_log_probabilities(top: int | None, length: int) -> None:
    choice = Sampler(Sampling(temperature=0), np.random.default_rng(0), top).choose(LOGITS, [])
    assert len(choice.top) == length
    assert (choice.logprob is None) == (top is None)


def test_ties_among_the_strongest_go_to_the_lower_id() -> None:
    assert list(sampler.strongest(np.array([1, 3, 3, 3, 2], np.float32), 2)) == [1, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers(bad: float) -> None:
    logits = LOGITS.copy()
    logits[2] = bad
    with pytest.raises(DeviceError, match="not numbers"):
        Sampler(Sampling(), np.random.default_rng(0)).choose(logits, [])


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[1] = -np.inf
    assert 1 not in drawn(Sampling(), logits)
