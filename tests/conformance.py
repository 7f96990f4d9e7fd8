"""llama.cpp's own tests of operations and architectures, through one worker; prints what passed, row by row.

usage: python tests/conformance.py [--stock] [ops|archs] [--ops NAMES] [--archs REGEX] [--threads N]
A tool that aborts costs one tensor type of one operation, or one architecture: each runs in a process of its own. The
exit status is 0 if nothing failed. Not part of the default test run: it takes minutes.
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from support import drover, rpc_shim
from support.peer import Peer, PeerUnavailableError
from support.processes import Running, free_port

OPERATIONS = "MUL_MAT,ADD,MUL,RMS_NORM,ROPE,SOFT_MAX,FLASH_ATTN_EXT,GET_ROWS,SET_ROWS,CPY,CONT,SCALE,SILU,SWIGLU"
ARCHITECTURES = ".*"
TOOL_SECONDS = 3600
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CASE = re.compile(r"^ *([A-Z0-9_]+\(.*\)): (?:.*)(OK|FAIL|not supported)\b.*$")
_TYPE = re.compile(r"\b(type_a|type_K|type_src|type)=\w+")
_ARCHITECTURE = re.compile(r"^\| *([^|]+?)\|[^|]*\| *(Dense|MoE) *\|(.*)\|$")
_UNFINISHED = re.compile(r"^\| *([^|]+?)\|")


@dataclass(slots=True)
class Outcome:
    """What one run of a tool said about one operation or architecture."""

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

    def __str__(self) -> str:
        counts = f"{self.passed:6} passed {len(self.failed):6} failed {self.lost:6} not run {self.skipped:6} skipped"
        return f"{self.name:20} {counts}"


class Bench:
    """A worker and the environment in which llama.cpp's tools find it as RPC0; a dead worker is started again."""

    def __init__(self, peer: Peer, folder: Path, start: Callable[[Path, int], Running]) -> None:
        self._peer = peer
        self._log = folder / "worker.log"
        self._start = start
        self._library = rpc_shim.build(folder)
        self._port = free_port()
        self._worker = start(self._log, self._port)

    def run(self, tool: str, *arguments: str) -> tuple[list[str], str]:
        """Lines that a tool prints, and how it died if it did."""
        if not self._worker.alive:
            self._worker = self._start(self._log, self._port)
        environment = rpc_shim.environment(self._peer, self._library, self._port)
        try:
            done = self._peer.run(tool, *arguments, timeout=TOOL_SECONDS, env=environment)
        except subprocess.TimeoutExpired:
            return [], f"no end after {TOOL_SECONDS} s"
        lines = _COLOR.sub("", done.stdout).splitlines()
        if done.returncode in {0, 1}:
            return lines, ""
        return lines, _last_words(_COLOR.sub("", done.stderr), done.returncode, self._worker)

    def close(self) -> None:
        """End the worker."""
        self._worker.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 if all of it passed."""
    options = _options(arguments)
    try:
        peer = Peer.find()
    except PeerUnavailableError as error:
        print(error)
        return 2

    def start(log: Path, port: int) -> Running:
        if options.stock:
            return peer.start_worker(log, port, options.threads)
        return drover.start_worker(log, port, "--threads", str(options.threads))

    with tempfile.TemporaryDirectory() as folder, closing(Bench(peer, Path(folder), start)) as bench:
        suites: dict[str, Callable[[], list[Outcome]]] = {
            "ops": lambda: operations(bench, options.ops.split(","), options.show),
            "archs": lambda: architectures(bench, options.archs),
        }
        outcomes = [outcome for name in options.suites or suites for outcome in suites[name]()]
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def operations(bench: Bench, names: Sequence[str], shown: int) -> list[Outcome]:
    """One run of test-backend-ops per operation and tensor type."""
    outcomes = []
    for name in names:
        outcome = Outcome(name)
        for pattern, cases in _groups(bench, name).items():
            lines, aborted = bench.run("test-backend-ops", "test", "-b", "RPC0", "-o", name, "-p", pattern)
            verdicts = [found for line in lines if (found := _CASE.match(line))]
            for found in verdicts:
                _count_case(outcome, found[1], found[2])
            if aborted or len(verdicts) < cases:
                outcome.lost += cases - len(verdicts)
                outcome.aborted.append(f"{pattern}: {aborted or 'ended early'}")
        outcomes.append(outcome)
        print(outcome, *[f"FAIL {case}" for case in outcome.failed[:shown]], *outcome.aborted, sep="\n    ", flush=True)
    passed, failed = sum(o.passed for o in outcomes), sum(len(o.failed) for o in outcomes)
    print(f"operations: {passed} cases passed, {failed} failed, {sum(o.lost for o in outcomes)} not run\n", flush=True)
    return outcomes


def _groups(bench: Bench, name: str) -> dict[str, int]:
    """Patterns that choose the cases of an operation one tensor type at a time, and how many cases each chooses."""
    lines, aborted = bench.run("test-backend-ops", "support", "-b", "RPC0", "-o", name, "--output", "csv")
    if aborted:
        raise SystemExit(f"the cases of {name} cannot be listed: {aborted}")
    groups: Counter[str] = Counter()
    for row in csv.DictReader(lines):
        found = _TYPE.search(row["op_params"])
        groups[f"(^|,){found[0]}(,|$)" if found else "^"] += 1
    return dict(groups)


def architectures(bench: Bench, pattern: str) -> list[Outcome]:
    """All architectures in one run; when a run dies of one, another run takes those behind it."""
    outcomes: dict[str, Outcome] = {}
    while True:
        others = "|".join(map(re.escape, outcomes)) or "$"
        wanted = f"^(?!(?:{others})$)(?:{pattern})$"
        lines, aborted = bench.run("test-llama-archs", "-b", "RPC0", "-s", "1", "-a", wanted)
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
    for outcome in outcomes.values():
        if not outcome.ok:
            print(outcome, *outcome.failed, *outcome.aborted, sep="\n    ", flush=True)
    passed = sum(o.passed for o in outcomes.values())
    total = passed + sum(len(o.failed) + len(o.aborted) for o in outcomes.values())
    print(f"architectures: {passed} of {total} models passed\n", flush=True)
    return list(outcomes.values())


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


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", choices=["ops", "archs", []], help="default: both")
    parser.add_argument("--stock", action="store_true", help="test the stock worker instead of ours")
    parser.add_argument("--ops", default=OPERATIONS, help="names as test-backend-ops spells them")
    parser.add_argument("--archs", default=ARCHITECTURES, help="regular expression of architecture names")
    parser.add_argument("--threads", type=int, default=2, help="threads of the worker")
    parser.add_argument("--show", type=int, default=5, help="failed cases to list per operation")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
