"""llama.cpp's own tests of operations and architectures, through one worker; prints what passed, row by row.

usage: python tests/conformance.py [--stock] [ops|archs] [--ops NAMES] [--archs REGEX] [--threads N] [--cpu-level LEVEL]
The exit status is 0 if nothing failed. A run of everything adds its counts to docs/conformance.md. Not part of the
default test run: it takes half an hour; tests/end_to_end/test_conformance.py is a sample of it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from support import drover
from support.peer import Peer, PeerUnavailableError
from support.processes import Running
from support.suites import Outcome, Suites

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
ROW = "| {:%Y-%m-%d} | {} | {} | {} of {} | {:.0f} | {:.0f} | {:.0f} | {} of {} |"
HEAD = (
    "| date | worker | threads | operations | seconds | processor: tool | worker | architectures |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


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
        level = ("--cpu-level", options.cpu_level) if options.cpu_level else ()
        return drover.start_worker(log, port, "--threads", str(options.threads), *level)

    operations: list[Outcome] = []
    architectures: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, closing(Suites(peer, Path(folder), start)) as suites:
        started = time.monotonic()
        if options.suite in (None, "ops"):
            operations = suites.operations([name for name in options.ops.split(",") if name])
        seconds = (time.monotonic() - started, *suites.processor_seconds)
        if options.suite in (None, "archs"):
            architectures = suites.architectures(options.archs)
    for outcome in operations:
        _print(outcome)
    for outcome in architectures:
        if not outcome.ok:
            _print(outcome)
    print(f"operations: {_passed(operations)} of {_cases(operations)} cases passed in {seconds[0]:.0f} s")
    print(f"processor seconds: {seconds[1]:.0f} of the tool, {seconds[2]:.0f} of the worker")
    print(f"architectures: {_passed(architectures)} of {_cases(architectures)} models passed")
    if not (options.suite or options.ops or options.archs != _options([]).archs):
        worker = "stock" if options.stock else f"Drover {options.cpu_level}".strip()
        counts = _passed(operations), _cases(operations), *seconds, _passed(architectures), _cases(architectures)
        _keep(ROW.format(datetime.now(UTC), f"{worker}, ggml {peer.version}", options.threads, *counts))
    return 0 if all(outcome.ok for outcome in (*operations, *architectures)) else 1


def _passed(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.passed for outcome in outcomes)


def _cases(outcomes: Sequence[Outcome]) -> int:
    """Those that the tools did not leave out themselves."""
    return sum(o.passed + o.lost + len(o.failed) + len(o.aborted) * (not o.lost) for o in outcomes)


def _print(outcome: Outcome) -> None:
    print(outcome, *(f"FAIL {case}" for case in outcome.failed), *outcome.aborted, sep="\n    ", flush=True)


def _keep(row: str) -> None:
    """Add a row to the table of results."""
    text = PAGE.read_text()
    before, head, after = text.partition(HEAD)
    if not head:
        raise SystemExit(f"{PAGE} has no table of results to add a row to")
    PAGE.write_text(f"{before}{head}{row}\n{after}")
    print(f"kept in {PAGE}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=["ops", "archs"], help="default: both")
    parser.add_argument("--stock", action="store_true", help="test the stock worker instead of ours")
    parser.add_argument("--ops", default="", help="names as test-backend-ops spells them; all unless told")
    parser.add_argument("--archs", default=".*", help="regular expression of architecture names")
    parser.add_argument("--threads", type=int, default=2, help="threads of the worker")
    parser.add_argument("--cpu-level", default="", help="instructions that our worker may use")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
