"""One prompt without an API: submit it, and yield its text piece by piece as whole characters."""

from collections.abc import Iterator
from queue import SimpleQueue

from drover.coordinator.engine import Engine
from drover.coordinator.sequence import Event, FinishEvent, Job, Sampling
from drover.coordinator.settings import Config
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import WorkerError


def stream(config: Config, prompt: str, engine: Engine, tokenizer: Tokenizer) -> Iterator[str]:
    """The continuation of a prompt; WorkerError if it ends because of a worker."""
    sampling = Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repeat_penalty=config.repeat_penalty,
        seed=config.seed,
    )
    job = Job(tuple(tokenizer.encode(prompt)), config.max_tokens, sampling, tokenizer.end_of_generation)
    events: SimpleQueue[Event] = SimpleQueue()
    engine.submit(job, events.put)
    decoder = tokenizer.stream()
    while not isinstance(event := events.get(), FinishEvent):
        yield decoder.push(event.token)
    yield decoder.flush()
    if event.error is not None:
        raise WorkerError(event.error)
