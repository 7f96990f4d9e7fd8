"""Engine: the loop that schedules, runs, samples and publishes; its thread owns all state of sequences and cache.

Other threads reach it only by its inbox. When a worker is gone, every sequence ends with that error and later ones are
refused with it: what was on the worker cannot be rebuilt here.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue

import numpy as np
import structlog

from drover.coordinator.kv_cache import KvCache
from drover.coordinator.pipeline import Pipeline, Rows
from drover.coordinator.sampler import Sampler
from drover.coordinator.scheduler import Scheduler
from drover.coordinator.sequence import Batch, FinishEvent, FinishReason, Job, Publish, Sequence, TokenEvent
from drover.errors import DeviceError, RequestError, WorkerError

RECENT_STEPS = 32
"""Steps over which the rate of generating is told."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Cancel:
    sequence_id: int


class _Stop:
    """Asks the thread to end."""


Message = Sequence | _Cancel | _Stop


class Engine:
    """Runs jobs on a pipeline; `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler,
        cache: KvCache,
        *,
        context: int,
        vocabulary: int,
        rng: np.random.Generator,
        clock: Callable[[], float],
    ) -> None:
        self.context = context
        self.failure: str | None = None
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        self._vocabulary = vocabulary
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._cache = cache
        self._rng = rng
        self._clock = clock
        self._ids = count(1)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._samplers: dict[int, Sampler] = {}
        self._running = True
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End the thread after the step in progress, or after `seconds`; unfinished jobs end with an error."""
        self._inbox.put(_Stop())
        self._thread.join(seconds)
        self._pipeline.close()
        self._thread.join(seconds)

    @property
    def queue(self) -> tuple[int, int]:
        """How many sequences run, and how many wait; any thread may ask."""
        running, waiting = self._scheduler.counts
        return running, waiting + self._inbox.qsize()

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated a second, over recent steps that generated any; any thread may ask."""
        steps = list(self._recent)
        seconds = sum(step for _, step in steps)
        return sum(tokens for tokens, _ in steps) / seconds if seconds > 0 else 0.0

    def submit(self, job: Job, publish: Publish) -> int:
        """Queue a job; `publish` hears its events, in the engine's thread. RequestError if it can never run."""
        if self.failure is not None:
            raise WorkerError(self.failure)
        self._check(job)
        sequence = Sequence(next(self._ids), job, publish, tokens=list(job.prompt))
        self._inbox.put(sequence)
        return sequence.id

    def cancel(self, sequence_id: int) -> None:
        """End a job if it still runs; it then finishes as "cancelled"."""
        self._inbox.put(_Cancel(sequence_id))

    def _loop(self) -> None:
        try:
            while self._read_inbox():
                self._turn()
            self._fail("the coordinator is stopping")
        except BaseException as error:
            self._fail(f"the coordinator broke: {error!r}; look into its log and start it again")
            raise

    def _turn(self) -> None:
        try:
            self.step()
        except (WorkerError, DeviceError) as error:
            log.error("step failed", error=str(error))  # noqa: TRY400  ours: its text says it all
            self._fail(str(error))

    def step(self) -> None:
        """One batch: compute it, then give every sequence whose end was reached its next token."""
        batch = self._scheduler.next_batch()
        if batch is None:
            return
        started = self._clock()
        logits = self._pipeline.run(batch, self._cache)
        self._account(batch, self._clock() - started)
        wanting = [part.sequence for part in batch.parts if part.wants_logits]
        for sequence, row in zip(wanting, logits, strict=True):
            self._advance(sequence, row)

    def _account(self, batch: Batch, seconds: float) -> None:
        generating = 0
        for part in batch.parts:
            part.sequence.cached += part.count
            if part.sequence.generated:
                part.sequence.decode_seconds += seconds
                generating += 1
            else:
                part.sequence.prompt_seconds += seconds
                self.prompt_tokens += part.count
        if generating:
            self._recent.append((generating, seconds))

    def _advance(self, sequence: Sequence, logits: Rows) -> None:
        try:
            choice = self._samplers[sequence.id].choose(logits, sequence.tokens)
        except DeviceError as error:
            return self._finish(sequence, "error", str(error))
        sequence.tokens.append(choice.token)
        sequence.generated += 1
        self.generated_tokens += 1
        if choice.token in sequence.job.stop_tokens:
            return self._finish(sequence, "stop")
        sequence.publish(TokenEvent(choice.token, choice.logprob, choice.top))
        if sequence.generated >= sequence.job.max_tokens or len(sequence.tokens) >= self.context:
            self._finish(sequence, "length")
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self._scheduler.finish(sequence)
        self._cache.drop(sequence.id)
        self._samplers.pop(sequence.id, None)
        sequence.publish(
            FinishEvent(
                reason,
                len(sequence.job.prompt),
                sequence.generated,
                sequence.prompt_seconds,
                sequence.decode_seconds,
                error,
            )
        )

    def _fail(self, why: str) -> None:
        self.failure = why
        while not self._inbox.empty():
            self._take(self._inbox.get())
        for sequence in self._scheduler.sequences:
            self._finish(sequence, "error", why)

    def _read_inbox(self) -> bool:
        """Take in what other threads want, waiting for it while there is nothing to do; False to end."""
        try:
            while True:
                self._take(self._inbox.get(block=self._running and self._scheduler.idle))
        except Empty:
            return self._running

    def _take(self, message: Message) -> None:
        match message:
            case Sequence():
                self._admit(message)
            case _Cancel(sequence_id):
                found = self._scheduler.find(sequence_id)
                if found is not None:
                    self._finish(found, "cancelled")
            case _Stop():
                self._running = False

    def _admit(self, sequence: Sequence) -> None:
        seed = sequence.job.sampling.seed
        rng = np.random.default_rng(self._rng.integers(1 << 63) if seed is None else seed % (1 << 63))
        self._samplers[sequence.id] = Sampler(sequence.job.sampling, rng, sequence.job.top_logprobs)
        self._scheduler.add(sequence)
        if self.failure is not None:
            self._finish(sequence, "error", self.failure)

    def _check(self, job: Job) -> None:
        if not job.prompt:
            raise RequestError("the prompt is empty")
        if len(job.prompt) >= self.context:
            raise RequestError(
                f"the prompt has {len(job.prompt)} tokens and the context {self.context}; "
                "shorten it, or start the coordinator with a larger --ctx-size"
            )
        if job.max_tokens < 1:
            raise RequestError(f"max_tokens is {job.max_tokens}; it must be at least 1")
        if not all(0 <= token < self._vocabulary for token in job.prompt):
            raise RequestError(f"the prompt has token ids outside 0 to {self._vocabulary - 1}")
