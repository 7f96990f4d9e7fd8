"""Engine: events of a job from submission to end, jobs in turn, cancelling, refusals, and workers that die."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drover.coordinator.engine import Engine
from drover.coordinator.sequence import Event, FinishEvent, Job, Sampling, TokenEvent
from drover.errors import RequestError, WorkerError
from support import driving, tiny_model
from support.driving import GREEDY, Heard
from support.tiny_model import Tiny
from support.worker_thread import worker


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    tiny_model.write(path, Tiny())
    return path


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with worker() as endpoint, driving.engine(path, [endpoint], batch_size=16) as engine:
        yield engine


def run(engine: Engine, job: Job) -> Heard:
    heard = Heard()
    engine.submit(job, heard.publish)
    heard.wait()
    return heard


def test_a_job_hears_its_tokens_and_its_end(engine: Engine) -> None:
    heard = run(engine, Job((1, 2, 3), 5, GREEDY))
    assert len(heard.tokens) == 5
    end = heard.events[-1]
    assert isinstance(end, FinishEvent)
    assert (end.reason, end.prompt_tokens, end.completion_tokens, end.error) == ("length", 3, 5, None)
    assert end.prompt_seconds > 0
    assert end.decode_seconds > 0
    assert all(event.logprob is None and event.top == () for event in heard.events if isinstance(event, TokenEvent))


def test_what_it_has_done_is_counted(engine: Engine) -> None:
    prompts, generated = engine.prompt_tokens, engine.generated_tokens
    run(engine, Job(tuple(range(20)), 5, GREEDY))
    assert (engine.prompt_tokens - prompts, engine.generated_tokens - generated) == (20, 5)
    assert engine.tokens_per_second > 0
    assert engine.queue == (0, 0)


def test_a_stop_token_ends_a_job_and_is_not_published(engine: Engine) -> None:
    tokens = run(engine, Job((1, 2, 3), 9, GREEDY)).tokens
    stop = next(token for token in tokens[1:] if token != tokens[0])
    heard = run(engine, Job((1, 2, 3), 9, GREEDY, frozenset({stop})))
    assert heard.tokens == tokens[: tokens.index(stop)]
    assert heard.wait().reason == "stop"


def test_the_context_is_a_limit(engine: Engine) -> None:
    heard = run(engine, Job((5,) * (engine.context - 3), 99, GREEDY))
    assert (heard.wait().reason, len(heard.tokens)) == ("length", 3)


def test_log_probabilities(engine: Engine) -> None:
    (event, _) = run(engine, Job((1, 2, 3), 1, GREEDY, top_logprobs=3)).events
    assert isinstance(event, TokenEvent)
    assert event.logprob == pytest.approx(event.top[0][1])
    assert event.top[0][0] == event.token
    assert len(event.top) == 3


def test_a_seed_repeats_and_none_does_not(engine: Engine) -> None:
    def tokens(seed: int | None) -> list[int]:
        return run(engine, Job((1, 2, 3), 20, Sampling(temperature=1.5, seed=seed))).tokens

    assert tokens(4) == tokens(4) != tokens(5)
    assert tokens(None) != tokens(None)
    assert len(tokens(-1)) == 20
    assert len(tokens(1 << 80)) == 20


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job((), 5), "the prompt is empty"),
        (Job((1,) * 512, 5), "512 tokens and the context 512"),
        (Job((1,), 0), "max_tokens is 0"),
        (Job((1, 80), 5), "token ids outside 0 to 79"),
        (Job((-1,), 5), "token ids outside"),
    ],
)
def test_jobs_that_can_never_run(job: Job, message: str, engine: Engine) -> None:
    with pytest.raises(RequestError, match=message):
        engine.submit(job, lambda event: None)


def test_jobs_are_served_in_turn_and_independent(engine: Engine) -> None:
    jobs = [Job((number, 2, 3), 6, GREEDY) for number in range(4)]
    alone = [run(engine, job).tokens for job in jobs]
    order: list[int] = []
    heard = [Heard() for _ in jobs]

    def publish(number: int) -> Callable[[Event], None]:
        def hear(event: Event) -> None:
            order.append(number)
            heard[number].publish(event)

        return hear

    ids = [engine.submit(job, publish(number)) for number, job in enumerate(jobs)]
    for each in heard:
        each.wait()
    assert [each.tokens for each in heard] == alone
    assert order == sorted(order)
    assert len(set(ids)) == 4


def test_cancelling_ends_running_and_waiting_jobs(engine: Engine) -> None:
    running, waiting = Heard(), Heard()
    first = engine.submit(Job((1,), 400, GREEDY), running.publish)
    second = engine.submit(Job((2,), 400, GREEDY), waiting.publish)
    engine.cancel(second)
    engine.cancel(first)
    engine.cancel(12345)
    assert running.wait().reason == "cancelled"
    assert waiting.wait().reason == "cancelled"
    assert waiting.tokens == []
    assert len(run(engine, Job((1,), 3, GREEDY)).tokens) == 3


def test_a_worker_that_dies_ends_every_job_and_refuses_later_ones(path: Path) -> None:
    started = threading.Event()
    running, waiting = Heard(), Heard()

    def hear(event: Event) -> None:
        running.publish(event)
        started.set()

    with worker() as first:
        leaving = worker()
        second = leaving.__enter__()
        with driving.engine(path, [first, second]) as engine:
            engine.submit(Job((1, 2), 500, GREEDY), hear)
            engine.submit(Job((3, 4), 5, GREEDY), waiting.publish)
            assert started.wait(20)
            leaving.__exit__(None, None, None)
            for heard in (running, waiting):
                end = heard.wait()
                assert end.reason == "error"
                assert end.error is not None
                assert f"worker {second}" in end.error
            assert engine.failure == running.wait().error
            with pytest.raises(WorkerError, match=f"worker {second} .*start it again"):
                engine.submit(Job((1,), 5), lambda event: None)


def test_stopping_ends_unfinished_jobs(path: Path) -> None:
    heard = Heard()
    with worker() as endpoint:
        with driving.engine(path, [endpoint]) as engine:
            engine.submit(Job((1,), 500, GREEDY), heard.publish)
            while not heard.tokens:
                time.sleep(0.001)
        assert heard.wait().reason == "error"
        assert "stopping" in (heard.wait().error or "")
