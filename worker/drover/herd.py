"""Processes that live and die together: the first to end is an error that takes the others down.

None outlives this process, however that ends: each asks the kernel for SIGKILL when its parent dies. Nothing is
restarted. What the processes are is their starter's business.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self, TypeVar

from drover.errors import WorkerError

START_SECONDS = 600.0
"""A first start compiles kernels, and a large model takes its time to load."""
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05
_COMPLAINT = re.compile(r"drover(?: \w+)?: error: (.+)")
"""How a command of ours says why it ends."""
LAST_LINES = 8

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

_Found = TypeVar("_Found")


class Herd:
    """All the processes; leaving the context ends every one. What they say is kept in files of `folder`."""

    def __init__(self, folder: Path, verbose: bool = False) -> None:
        self._folder = folder
        self._verbose = verbose
        self._processes: list[Process] = []

    def start(self, name: str, module: str, *arguments: str, attached: bool = False) -> "Process":
        """Start `python -m module arguments…` under a name; attached, it writes where this process does."""
        command = [sys.executable, "-m", module, *arguments]
        with _held_back() as mask:
            process = Process(name, command, None if attached else self._folder, mask)
            self._processes.append(process)
        return process

    def wait_for(self, what: str, poll: Callable[[], _Found | None]) -> _Found:
        """Pass on what they say until `poll` finds something; WorkerError if one ends or it takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._pass_on()
            if (found := poll()) is not None:
                return found
            self.check()
            if time.monotonic() > deadline:
                raise WorkerError(f"{what} is not ready after {START_SECONDS:.0f} s; see what it said above")
            time.sleep(POLL_SECONDS)

    def watch(self, last: "Process | None" = None) -> None:
        """Stay until `last` ends well, or until we are told to stop; WorkerError if any ends otherwise."""
        while last is None or last.status != 0:
            if self._verbose:
                self._pass_on()
            self.check(last)
            time.sleep(POLL_SECONDS)

    def check(self, last: "Process | None" = None) -> None:
        """Raise WorkerError if one of them has ended; `last` may, with status 0."""
        for process in self._processes:
            if (end := process.ended()) and not (process is last and process.status == 0):
                raise WorkerError(end)

    def _pass_on(self) -> None:
        for process in self._processes:
            for line in process.errors.news():
                if not _COMPLAINT.match(line):  # that is said when it has ended
                    print(f"{process.name} | {line}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with _undisturbed():
            deadline = time.monotonic() + STOP_SECONDS
            for process in reversed(self._processes):
                process.ask_to_end()
            for process in self._processes:
                process.make_end(deadline)


class Log:
    """A growing file of text, or none at all."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._told = 0

    @property
    def text(self) -> str:
        """All of it so far."""
        return self._path.read_text(errors="replace") if self._path else ""

    def news(self) -> list[str]:
        """Whole lines since the last call."""
        if self._path is None:
            return []
        with self._path.open("rb") as file:
            file.seek(self._told)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._told += len(whole) + len(newline)
        return whole.decode(errors="replace").split("\n") if newline else []


class Process:
    """One started program and what it says, unless that goes straight to the terminal (`folder` is None).

    It blocks the signals of `mask`, whatever we block now.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path | None, mask: set[int]) -> None:
        self.name = name
        parent = os.getpid()
        with ExitStack() as files:
            paths = [folder / f"{name}.{kind}" if folder else None for kind in ("out", "err")]
            out, err = (files.enter_context(path.open("wb")) if path else None for path in paths)
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,  # Ctrl-C is ours to pass on, in order
                preexec_fn=lambda: _begin(parent, mask),  # noqa: PLW1509  other threads of ours hold nothing it needs
            )
        self.output, self.errors = map(Log, paths)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._popen.poll()

    def ended(self) -> str | None:
        """How it ended and its last words, or None while it runs."""
        status = self.status
        if status is None:
            return None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        lines = self.errors.text.splitlines() or self.output.text.splitlines()
        if lines and (complaint := _COMPLAINT.match(lines[-1])):
            return f"{self.name} (process {self.pid}) {how}: {complaint[1]}"
        last = "".join(f"\n  {line}" for line in lines[-LAST_LINES:])
        return f"{self.name} (process {self.pid}) {how}{'; its last lines:' if last else ''}{last}"

    def ask_to_end(self) -> None:
        """SIGTERM, if it still runs."""
        if self.status is None:
            self._popen.terminate()

    def make_end(self, deadline: float) -> None:
        """Wait for its end until `deadline`, then force it."""
        try:
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()


@contextmanager
def sigterm_unwinds(status: int = 128 + signal.SIGTERM) -> Iterator[None]:
    """SIGTERM leaves through every context, as Ctrl-C does, and ends the process with this exit status."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(status)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _held_back() -> Iterator[set[int]]:
    """Signals wait; the mask as it was. Python forgets what a handler raises amid its own work around a fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C or SIGTERM must not leave half of them running."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin(parent: int, mask: set[int]) -> None:
    """In the child: be killed when the parent ends, even if it ended just now; hear the signals that it holds back."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
