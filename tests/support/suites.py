"""llama.cpp's own tests of operations and architectures through one worker: run whole or in part, and what they said.

A tool that aborts costs as little as can be: what it had not reached runs again in parts, one tensor type of one
operation, or one architecture, to a process.
"""

import csv
import re
import resource
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from support import rpc_shim
from support.peer import Peer
from support.processes import Running, free_port

TOOL_SECONDS = 2 * 3600
MORE_CASES = 12
"""Of an operation, in a sample, besides one for all types and modes together."""

Cases = Mapping[str, Sequence[str]]
"""By operation, as the tool spells it: the parameters of its cases."""

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CASE = re.compile(r"\b(([A-Z0-9_]+)\([^()]*=.*\)): (?:.*)(OK|FAIL|not supported)\b")
"""A verdict; what an operation says of its error may stand before it on the line."""
_KIND = re.compile(r"\b(?:\w*type\w*|mode|prec)=\w+")
_FIRST_TYPE = re.compile(r"\b(type_a|type_K|type_src|type)=\w+")
_NUMBER = re.compile(r"\d+")
_ARCHITECTURE = re.compile(r"^\| *([^|]+?)\|[^|]*\| *(Dense|MoE) *\|(.*)\|$")
_UNFINISHED = re.compile(r"^\| *([^|]+?)\|")


@dataclass(slots=True)
class Outcome:
    """What the tools said about one operation or architecture."""

    name: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    lost: int = 0
    """Cases that did not run because the tool died before them."""
    aborted: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not self.failed and not self.aborted

    @property
    def seen(self) -> int:
        """Cases with a verdict."""
        return self.passed + len(self.failed) + self.skipped

    def __str__(self) -> str:
        counts = f"{self.passed:6} passed {len(self.failed):6} failed {self.lost:6} not run {self.skipped:6} skipped"
        return f"{self.name:20} {counts}"


class Suites:
    """A worker and the environment in which llama.cpp's tools find it as RPC0; a dead worker is started again."""

    def __init__(self, peer: Peer, folder: Path, start: Callable[[Path, int], Running]) -> None:
        self._peer = peer
        self._log = folder / "worker.log"
        self._start = start
        self._library = rpc_shim.build(folder)
        self._port = free_port()
        self._worker = start(self._log, self._port)

    def close(self) -> None:
        """End the worker."""
        self._worker.stop()

    @property
    def processor_seconds(self) -> tuple[float, float]:
        """What tools, and workers that have died, have computed so far, and what the worker has."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime, self._worker.processor_seconds

    def cases(self, names: Sequence[str] = ()) -> dict[str, list[str]]:
        """All cases of these operations, or of all."""
        lines, aborted = self._run("test-backend-ops", "support", *_only(names), "--output", "csv")
        if aborted:
            raise AssertionError(f"the cases cannot be listed: {aborted}")
        found: dict[str, list[str]] = {}
        for row in csv.DictReader(lines):
            found.setdefault(row["op_name"], []).append(row["op_params"])
        return found

    def operations(self, names: Sequence[str] = ()) -> list[Outcome]:
        """All cases of these operations, or of all, in one run; the rest of a run that aborted in smaller ones."""
        listed = self.cases(names)
        outcomes, aborted = self._operations(_only(names))
        if not aborted:
            return list(outcomes.values())
        for name, cases in listed.items():
            if name not in outcomes or outcomes[name].seen < len(cases):
                outcomes[name] = self._one_by_one(name, cases)
        return list(outcomes.values())

    def sampled(self, cases: Cases) -> list[Outcome]:
        """The outcomes of some cases."""
        outcomes = []
        for name, wanted in cases.items():
            pattern = f"^({'|'.join(map(re.escape, wanted))})$"
            found, aborted = self._operations(("-o", name, "-p", pattern))
            outcome = found.get(name) or Outcome(name)
            _note_end(outcome, len(wanted), f"of {len(wanted)} cases: {aborted or 'ended early'}")
            outcomes.append(outcome)
        return outcomes

    def _one_by_one(self, name: str, cases: Sequence[str]) -> Outcome:
        """One process for each tensor type."""
        total = Outcome(name)
        for pattern, count in _by_type(cases).items():
            found, aborted = self._operations(("-o", name, "-p", pattern))
            part = found.get(name) or Outcome(name)
            _note_end(part, count, f"{pattern}: {aborted or 'ended early'}")
            total.passed, total.skipped = total.passed + part.passed, total.skipped + part.skipped
            total.lost += part.lost
            total.failed += part.failed
            total.aborted += part.aborted
        return total

    def architectures(self, pattern: str = ".*") -> list[Outcome]:
        """All architectures in one run; when a run dies of one, another run takes those behind it."""
        outcomes: dict[str, Outcome] = {}
        while True:
            others = "|".join(map(re.escape, outcomes)) or "$"
            wanted = f"^(?!(?:{others})$)(?:{pattern})$"
            lines, aborted = self._run("test-llama-archs", "-b", "RPC0", "-s", "1", "-a", wanted)
            for line in lines:
                if found := _ARCHITECTURE.match(line):
                    _count_architecture(outcomes, found[1], found[2], found[3])
            if not aborted:
                break
            unfinished = _UNFINISHED.match(lines[-1] if lines else "")
            name = unfinished[1] if unfinished else "?"
            if name in outcomes and outcomes[name].aborted:
                break
            outcomes.setdefault(name, Outcome(name)).aborted.append(aborted)
        return list(outcomes.values())

    def _operations(self, options: Sequence[str]) -> tuple[dict[str, Outcome], str]:
        """One run: outcomes by operation, and how the tool died if it did."""
        lines, aborted = self._run("test-backend-ops", "test", *options)
        outcomes: dict[str, Outcome] = {}
        for line in lines:
            if found := _CASE.search(line):
                _count_case(outcomes.setdefault(found[2], Outcome(found[2])), found[1], found[3])
        return outcomes, aborted

    def _run(self, tool: str, mode: str, *options: str) -> tuple[list[str], str]:
        """Lines that a tool prints, and how it died if it did."""
        if not self._worker.alive:
            self._worker = self._start(self._log, self._port)
        environment = rpc_shim.environment(self._peer, self._library, self._port)
        device = () if mode.startswith("-") else ("-b", "RPC0")
        try:
            done = self._peer.run(tool, mode, *device, *options, timeout=TOOL_SECONDS, env=environment)
        except subprocess.TimeoutExpired:
            return [], f"no end after {TOOL_SECONDS} s"
        lines = _COLOR.sub("", done.stdout).splitlines()
        if done.returncode in {0, 1}:
            return lines, ""
        return lines, _last_words(_COLOR.sub("", done.stderr), done.returncode, self._worker)


def sample(listed: Cases) -> dict[str, list[str]]:
    """Of each operation a small case of all types and modes it brings together, and more of its smaller half.

    Which ones depends on nothing but the cases themselves.
    """
    return {name: _sample_of(cases) for name, cases in listed.items()}


def kinds(cases: Iterable[str]) -> set[tuple[str, ...]]:
    """The types and modes that cases bring together: `("type_a=q4_0", "type_b=f32")`."""
    return {tuple(_KIND.findall(case)) for case in cases}


def _sample_of(cases: Sequence[str]) -> list[str]:
    by_size = sorted(dict.fromkeys(cases), key=_size)
    chosen: dict[str, None] = {}
    for case in by_size:
        if kinds([case]) - kinds(chosen):
            chosen[case] = None
    smaller = [case for case in by_size[: (len(by_size) + 1) // 2] if case not in chosen]
    chosen |= dict.fromkeys(sorted(smaller, key=lambda case: zlib.crc32(case.encode()))[:MORE_CASES])
    return list(chosen)


def _size(case: str) -> int:
    """About how much work a case is: the product of all its numbers."""
    return prod(int(number) for number in _NUMBER.findall(case) if int(number))


def _only(names: Iterable[str]) -> tuple[str, ...]:
    wanted = ",".join(names)
    return ("-o", wanted) if wanted else ()


def _by_type(cases: Iterable[str]) -> Counter[str]:
    """Patterns that choose cases one tensor type at a time, and how many each chooses."""
    groups: Counter[str] = Counter()
    for case in cases:
        found = _FIRST_TYPE.search(case)
        groups[f"(^|,){found[0]}(,|$)" if found else "^"] += 1
    return groups


def _note_end(outcome: Outcome, cases: int, why: str) -> None:
    if outcome.seen < cases:
        outcome.lost += cases - outcome.seen
        outcome.aborted.append(why)


def _count_case(outcome: Outcome, case: str, verdict: str) -> None:
    if verdict == "OK":
        outcome.passed += 1
    elif verdict == "FAIL":
        outcome.failed.append(case)
    else:
        outcome.skipped += 1


def _count_architecture(outcomes: dict[str, Outcome], name: str, config: str, results: str) -> None:
    """A row of the tool's table is one model; it counts if at least one of its checks ran."""
    outcome = outcomes.setdefault(name, Outcome(name))
    if "FAIL" in results:
        outcome.failed.append(f"{config}: {' '.join(results.split())}")
    elif "OK" in results:
        outcome.passed += 1
    else:
        outcome.skipped += 1


def _last_words(errors: str, status: int, worker: Running) -> str:
    """Why a tool died: what it said, and what the worker said last."""
    telling = [line for line in errors.splitlines() if re.search(r"ASSERT|crashed|failed|error|Error", line)]
    said = telling[-1].strip() if telling else f"status {status}"
    last = (worker.output.strip().splitlines() or ["nothing"])[-1]
    return f"{said}; the worker {'said' if worker.alive else 'died:'} {last}"
