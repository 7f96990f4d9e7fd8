"""One API request in the event loop: its jobs in the engine, their events, and how they turn into answers.

The engine's thread only hands events over; nothing here blocks. Whoever drops a generation ends its jobs.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Protocol

from drover.coordinator.replies import Choice, Json, Reply, Usage, timings
from drover.coordinator.sequence import Event, FinishEvent, Job, Publish, TokenEvent
from drover.coordinator.tokenizer import Tokenizer
from drover.coordinator.transcript import Transcript
from drover.errors import WorkerError


class Runner(Protocol):
    """The engine as the API sees it."""

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""

    @property
    def failure(self) -> str | None:
        """Why nothing can be generated any more, or None."""

    def submit(self, job: Job, publish: Publish) -> int:
        """Queue a job; its events are published from the engine's thread."""

    def cancel(self, sequence_id: int) -> None:
        """End a job early."""


class Generation:
    """The jobs of one request, running; `close` ends what is left of them."""

    def __init__(self, engine: Runner, jobs: Sequence[Job], choices_per_prompt: int, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._jobs = jobs
        self._per_prompt = choices_per_prompt
        self._tokenizer = tokenizer
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._running: dict[int, int] = {}
        self._finished: dict[int, FinishEvent] = {}
        self._transcripts: list[Transcript] = []

    def start(self, stops: Sequence[str]) -> None:
        """Submit the jobs; to be called in the event loop. RequestError or WorkerError if the engine refuses."""
        loop = asyncio.get_running_loop()
        self._transcripts = [Transcript(self._tokenizer, stops) for _ in self._jobs]
        try:
            for index, job in enumerate(self._jobs):
                self._running[index] = self._engine.submit(job, partial(_hand_over, loop, self._queue, index))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the jobs that still run."""
        for sequence in self._running.values():
            self._engine.cancel(sequence)
        self._running.clear()

    def abort(self, reason: str) -> None:
        """Let every unfinished answer fail; to be called in the event loop."""
        for index, job in enumerate(self._jobs):
            if index not in self._finished:
                self._queue.put_nowait((index, FinishEvent("error", len(job.prompt), 0, error=reason)))

    async def whole(self, reply: Reply) -> Json:
        """Wait for all answers. WorkerError if one of them fails."""
        choices = [Choice(index) for index in range(len(self._jobs))]
        async for index, event in self._events():
            choice, transcript = choices[index], self._transcripts[index]
            if isinstance(event, TokenEvent):
                delta = transcript.push(event)
            else:
                delta = transcript.finish(event)
                choice.finish_reason = self._reason(index)
            choice.text += delta.text
            choice.entries += delta.entries
        return reply.whole(choices, self.usage, self._timings(len(self._jobs) - 1))

    async def chunks(self, reply: Reply, usage_wanted: bool) -> AsyncIterator[Json]:
        """The answers piece by piece, as they come. WorkerError if one of them fails."""
        for index in range(len(self._jobs)):
            opening = reply.opening(index)
            if opening is not None:
                yield opening
        async for index, event in self._events():
            transcript = self._transcripts[index]
            finished = isinstance(event, FinishEvent)
            delta = transcript.finish(event) if isinstance(event, FinishEvent) else transcript.push(event)
            if delta:
                yield reply.chunk(index, delta)
            if finished:
                yield reply.closing(index, self._reason(index), self._timings(index))
        if usage_wanted:
            yield reply.usage(self.usage)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompts = sum(len(job.prompt) for job in self._jobs[:: self._per_prompt])
        return Usage(prompts, sum(transcript.tokens for transcript in self._transcripts))

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """Events with the index of their answer, until all are finished; a stop string ends its job here."""
        while len(self._finished) < len(self._jobs):
            index, event = await self._queue.get()
            if isinstance(event, FinishEvent):
                if event.reason == "error":
                    raise WorkerError(event.error or "the engine failed")
                self._running.pop(index, None)
                self._finished[index] = event
            yield index, event
            if self._transcripts[index].stopped and index in self._running:
                self._engine.cancel(self._running.pop(index))

    def _reason(self, index: int) -> str:
        reason = self._finished[index].reason
        return "length" if reason == "length" and not self._transcripts[index].stopped else "stop"

    def _timings(self, index: int) -> Json:
        return timings(self._finished[index])


def _hand_over(
    loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[tuple[int, Event]], index: int, event: Event
) -> None:
    """Runs in the engine's thread: the loop may be gone, and then nobody listens."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(queue.put_nowait, (index, event))
