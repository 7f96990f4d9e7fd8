"""Speed of our worker beside the stock one and beside llama.cpp without any: same client, model and threads, by turns.

usage: python tests/bench_cpu.py [GROUP …] [--rounds 5] [--threads 2] [--only stock,drover,local] [--match TEXT]
Prints one table in Markdown. Models are made once, in the cache folder beside the peer. Nothing else should run on the
machine meanwhile; whatever is measured is measured in the same run. All groups take hours.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf

from drover.worker.devices.cpu.kernel_cache import cache_directory
from support import drover
from support.models import model_file
from support.peer import Peer, PeerUnavailableError
from support.processes import Running, free_port

TOOL_SECONDS = 3600
NAMES = ("stock", "drover", "local")

Goals = dict[str, tuple[float, float | None]]
"""By measurement: our speed in proportion to the stock worker's, and to llama.cpp's without a worker."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One command that is run in turn with every kind of worker."""

    name: str
    kind: str
    arguments: str
    goals: Goals
    shape: str = "1b"
    tool: str = "llama-bench"
    workers: int = 1
    level: str = ""
    """Instructions that our worker may use, and"""
    variant: str = ""
    """the variant of ggml's processor backend that has the same."""


def _plain(kind: str, tg: tuple[float, float], pp: tuple[float, float], **fields: str) -> Scenario:
    return Scenario(fields.pop("name", kind), kind, "-p 512 -n 32", {"pp512": pp, "tg32": tg}, **fields)


BATCHES = (2, 4, 8, 16, 32)
DEPTHS = (4096, 16384)
GROUPS: dict[str, list[Scenario]] = {
    "main": [_plain("Q4_K_M", (1.6, 1.0), (4, 2)), _plain("Q8_0", (1.6, 1.05), (8, 2))],
    "types": [
        _plain(kind, (1.3, 1.0), (1.3, 1.0)) for kind in ("F16", "BF16", "Q4_0", "Q5_K_M", "Q6_K", "IQ4_XS", "IQ3_S")
    ]
    + [_plain("MXFP4_MOE", (1.3, 1.0), (1.3, 1.0), shape="moe", name="MXFP4, 64 experts")],
    "batches": [
        Scenario(
            "at once",
            "Q4_K_M",
            f"-c 4096 -npp 32 -ntg 32 -npl {','.join(map(str, BATCHES))} --output-format jsonl",
            {f"tg, {n} at once": (1.5, 1.0) for n in BATCHES},
            tool="llama-batched-bench",
        )
    ],
    "depth": [
        Scenario(
            f"cache of {kind}",
            "Q4_K_M",
            f"-p 0 -n 32 -r 1 -fa on -ctk {kind} -ctv {kind} -d {','.join(map(str, DEPTHS))}",
            {f"tg32 @ {depth}": (2, 1.3) for depth in DEPTHS},
        )
        for kind in ("f16", "q8_0")
    ],
    "experts": [_plain("Q4_K_M", (1.5, 1.0), (1.5, 1.0), shape="moe", name="64 experts, 8 used")],
    "levels": [
        _plain(kind, (1.2, 1.0), (1.2, 1.0), level=level, variant=variant, name=f"{kind}, {level}")
        for level, variant in (("avx512", "icelake"), ("avx2", "haswell"))
        for kind in ("Q4_K_M", "Q8_0")
    ],
    "small": [Scenario("17 M, two workers", "Q8_0", "-p 0 -n 32", {"tg32": (1.2, None)}, shape="small", workers=2)],
}


@dataclass(slots=True)
class Row:
    """What was measured of one scenario, by contender: tokens per second of every round."""

    scenario: Scenario
    measurement: str
    speeds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, name: str) -> float | None:
        """The middle speed of a contender, if it ran."""
        return statistics.median(self.speeds[name]) if self.speeds.get(name) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    options = _options(arguments)
    try:
        peer = Peer.find()
    except PeerUnavailableError as error:
        print(error)
        return 2
    rows: list[Row] = []
    for group in options.groups or GROUPS:
        for scenario in GROUPS[group]:
            if options.match in scenario.name:
                rows += measured(peer, scenario, options)
    reads = bandwidth(options.threads)
    print(
        f"\nthreads: {options.threads}; rounds: {options.rounds}; memory read by all threads: {reads / 1e9:.1f} GB/s\n"
    )
    print("| model | test | stock worker | Drover | local | to stock (goal) | to local (goal) | of bandwidth |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(cells(peer, row, reads))} |")
    return 0


def measured(peer: Peer, scenario: Scenario, options: argparse.Namespace) -> list[Row]:
    """All rounds of one scenario."""
    model = model_file(peer, scenario.shape, scenario.kind)
    peer = replace(peer, variant=scenario.variant)
    rows = {measurement: Row(scenario, measurement) for measurement in scenario.goals}
    for turn in range(options.rounds):
        for name in options.only.split(","):
            if name == "local" and scenario.workers > 1:
                continue
            for measurement, speed in once(peer, scenario, model, name, options.threads).items():
                rows[measurement].speeds[name].append(speed)
                print(f"{scenario.name}, {measurement}, round {turn + 1}, {name}: {speed:.1f} tokens/s", flush=True)
    return list(rows.values())


def once(peer: Peer, scenario: Scenario, model: Path, name: str, threads: int) -> dict[str, float]:
    """One run of the tool on fresh workers: measurement -> tokens per second."""
    asked = ("-m", model, *scenario.arguments.split(), "-t", str(threads))
    if scenario.tool == "llama-bench":
        asked += ("-o", "json", *(() if "-r" in asked else ("-r", "2")))
    with workers(peer, scenario, name, threads) as ports:
        placed = ("-ngl", "99", "--rpc", ",".join(f"127.0.0.1:{port}" for port in ports)) if ports else ("-ngl", "0")
        done = peer.run(scenario.tool, *asked, *placed, timeout=TOOL_SECONDS)
    if done.returncode != 0:
        raise SystemExit(f"{scenario.tool} ended with {done.returncode}\n{done.stderr[-2000:]}")
    if scenario.tool == "llama-bench":
        return {_test(row): row["avg_ts"] for row in json.loads(done.stdout)}
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {f"tg, {row['pl']} at once": row["speed_tg"] for row in found}


def _test(row: dict[str, int]) -> str:
    test = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    return f"{test} @ {row['n_depth']}" if row["n_depth"] else test


@contextmanager
def workers(peer: Peer, scenario: Scenario, name: str, threads: int) -> Iterator[list[int]]:
    """Their ports; none for llama.cpp alone."""
    level = ("--cpu-level", scenario.level) if scenario.level else ()
    starts: dict[str, Callable[[Path, int], Running]] = {
        "stock": lambda log, port: peer.start_worker(log, port, threads),
        "drover": lambda log, port: drover.start_worker(log, port, "--threads", str(threads), *level),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = [free_port() for _ in range(scenario.workers)] if name in starts else []
        for port in ports:
            stack.enter_context(starts[name](Path(folder, f"worker-{port}.log"), port))
        yield ports


def cells(peer: Peer, row: Row, reads: float) -> list[str]:
    """A row of the table."""
    goals = row.scenario.goals[row.measurement]
    ours = row.median("drover")
    ratios = []
    for name, goal in zip(("stock", "local"), goals, strict=True):
        theirs = row.median(name)
        met = f" ({goal:g})" if goal is not None else ""
        ratios.append(f"{ours / theirs:.2f}{met}" if ours and theirs else "–")
    share = "–"
    if ours and row.measurement == "tg32":
        share = f"{ours * weight_bytes(model_file(peer, row.scenario.shape, row.scenario.kind)) / reads:.0%}"
    speeds = [_speed(row.speeds.get(name)) for name in NAMES]
    return [row.scenario.name, row.measurement, *speeds, *ratios, share]


def _speed(values: Sequence[float] | None) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def bandwidth(threads: int) -> float:
    """Bytes per second that so many threads read from memory."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory(Path(tempfile.gettempdir(), "drover-bench-kernels"))))
    from drover.worker.devices.cpu.ceilings import measure

    return next(found.rate for found in measure(threads) if found.unit == "B/s")


def weight_bytes(model: Path) -> int:
    """Bytes of weights read for a token: all but the embeddings of other tokens, and experts that are not chosen."""
    reader = gguf.GGUFReader(model)

    def number(name: str) -> int:
        found = next((value for key, value in reader.fields.items() if key.endswith(name)), None)
        return int(found.contents()) if found else 0

    experts, used = number(".expert_count"), number(".expert_used_count")
    total = 0
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            continue
        total += int(tensor.n_bytes) * used // experts if "_exps" in tensor.name else int(tensor.n_bytes)
    return total


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all unless told")
    parser.add_argument("--rounds", type=int, default=5, help="how often the contenders take turns")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of worker and client")
    parser.add_argument("--only", default=",".join(NAMES), help="which contenders, in this order")
    parser.add_argument("--match", default="", help="only scenarios whose name has this in it")
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
