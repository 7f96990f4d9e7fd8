"""`make fuzz`: frames by the million, right and wrong, at a worker process; whatever it must not do ends the run.

make fuzz N=1000000 SEED=1                            frames of a seed, from the first on
make fuzz SEED=1 FIRST=30592 N=16                     the session of one frame alone, with the worker's log
make fuzz SEED=1 PROTOCOL=5.1 ALSO=2.0                clients of other versions
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from drover.rpc.versions import pair
from support.fuzz_drive import Drive
from support.fuzz_sessions import FRAMES, Sessions
from support.fuzz_worker import FindingError, Footprint, Target

WARM_SESSIONS = 500
"""Enough that every operation has run, and what numpy, the allocator and the log take for good is taken."""
ROOM = 64 << 20
"""What resident memory may have grown by once everybody has left, whatever the number of frames: heaps of threads that
have ended are kept by the allocator, up to eight for a processor, and each has held some MiB of a session's arrays."""
PORTION = 2500
"""Sessions between two lines of progress."""


def main() -> int:
    """Run; the exit status says whether something was found."""
    options = _options()
    also = options.also or None
    versions = pair(options.protocol, also)
    sessions = Sessions(options.seed, *versions)
    begin, count = options.first // FRAMES, -(-options.n // FRAMES)
    words = ["--protocol", options.protocol, *(["--also", also] if also else []), *(["-v"] if count == 1 else [])]
    with tempfile.TemporaryDirectory() as folder, Target(Path(folder), *words) as target:
        try:
            _run(target, Drive(target, sessions, versions), begin, count)
        except FindingError as finding:
            again = f"make fuzz SEED={options.seed} PROTOCOL={options.protocol} ALSO={also or ''} FIRST=… N={FRAMES}"
            print(f"FOUND: {finding}\nagain: {again}", file=sys.stderr)
            return 1
        finally:
            if count == 1:
                print(target.running.output)
    return 0


def _run(target: Target, drive: Drive, begin: int, count: int) -> None:
    warm = min(WARM_SESSIONS, count // 2)
    drive.run(range(begin, begin + warm))
    before, started = target.rest(), time.monotonic()
    theirs, ours = target.running.processor_seconds, time.process_time()
    for first in range(begin + warm, begin + count, PORTION):
        last = min(begin + count, first + PORTION)
        drive.run(range(first, last))
        seconds = time.monotonic() - started
        rate = (last - begin - warm) * FRAMES / seconds
        print(f"{(last - begin) * FRAMES} frames, {rate:.0f}/s", file=sys.stderr, flush=True)
    theirs, ours = target.running.processor_seconds - theirs, time.process_time() - ours
    after = target.rest()
    require_same(before, after)
    refused = {reason: number for reason, number in target.refused().items() if number}
    print(f"{count * FRAMES} frames sent, {target.served()} served (the honest client's too), refused: {refused}")
    memory = f"resident {before.resident >> 20} MiB, then {after.resident >> 20} MiB"
    print(f"processor time a frame: {_micro(theirs, count - warm)} the worker's, {_micro(ours, count - warm)} ours")
    print(f"{memory}; {after.files} files, {after.threads} threads")


def _micro(seconds: float, sessions: int) -> str:
    return f"{seconds / (sessions * FRAMES) * 1e6:.0f} µs"


def require_same(before: Footprint, after: Footprint) -> None:
    """FindingError if the worker takes more than before all that."""
    if after.files > before.files or after.threads > before.threads:
        raise FindingError(f"files or threads are left: {before}, then {after}")
    if after.resident > before.resident + ROOM:
        raise FindingError(f"memory is left: {before.resident >> 20} MiB, then {after.resident >> 20} MiB")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=100_000, help="how many frames")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="a frame of the session to begin with")
    parser.add_argument("--protocol", default="8.0")
    parser.add_argument("--also", default="3.6")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
