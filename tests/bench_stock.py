"""Speed of our worker beside the stock one: the same client, the same model, the same number of threads, by turns.

usage: python tests/bench_stock.py [--shape 1b|wide|small] [--types Q4_K_M,Q8_0] [--rounds 3] [--threads 2]
[--prompt 512] [--generate 32] [--only stock,drover]. Model files are made once, in the cache folder of the peer.
Nothing else should run on the machine meanwhile; medians are printed with the range.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from support import drover, make_gguf
from support.peer import Peer, PeerUnavailableError, configured_root
from support.processes import Running, free_port

SHAPES = {
    "1b": make_gguf.Shape(),
    "wide": make_gguf.Shape(layers=2, embd=4096, ff=14336, heads=32, kv=8, vocab=23400),
    "small": make_gguf.Shape(layers=8, embd=512, ff=1536, heads=8, kv=4, vocab=8000),
}
TOOL_SECONDS = 1800
Start = Callable[[Path, int], Running]
Speeds = dict[tuple[str, str, str], list[float]]
"""(model type, measurement, worker) -> tokens per second of every round."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    options = _options(arguments)
    try:
        peer = Peer.find()
    except PeerUnavailableError as error:
        print(error)
        return 2
    threads = str(options.threads)
    starts: dict[str, Start] = {
        "stock": lambda log, port: peer.start_worker(log, port, options.threads),
        "drover": lambda log, port: drover.start_worker(log, port, "--threads", threads),
    }
    speeds: Speeds = defaultdict(list)
    for kind in options.types.split(","):
        model = model_file(peer, options.shape, kind)
        for turn in range(options.rounds):
            for name in options.only.split(","):
                for measurement, speed in measure(peer, starts[name], model, options).items():
                    speeds[kind, measurement, name].append(speed)
                    print(f"{kind} round {turn + 1} {name:6} {measurement:6} {speed:9.1f} tokens/s", flush=True)
    Console().print(table(speeds, options))
    return 0


def measure(peer: Peer, start: Start, model: Path, options: argparse.Namespace) -> dict[str, float]:
    """One llama-bench on one fresh worker: measurement -> tokens per second."""
    port = free_port()
    asked = ("-p", str(options.prompt), "-n", str(options.generate), "-r", str(options.repeat), "-o", "json")
    placed = ("-ngl", "99", "-t", str(options.threads), "-fa", options.flash_attention, "--rpc", f"127.0.0.1:{port}")
    with tempfile.TemporaryDirectory() as folder, start(Path(folder) / "worker.log", port) as worker:
        done = peer.run("llama-bench", "-m", model, *asked, *placed, timeout=TOOL_SECONDS)
        if done.returncode != 0:
            raise SystemExit(f"llama-bench ended with {done.returncode}\n{done.stderr[-2000:]}\n{worker.describe()}")
    rows = json.loads(done.stdout)
    return {(f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"): row["avg_ts"] for row in rows}


def model_file(peer: Peer, shape: str, kind: str) -> Path:
    """The model of this shape and type, made if it is not there yet."""
    folder = configured_root().parent / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{shape}.{kind}.gguf"
    if made.exists():
        return made
    source, partial = folder / f"{shape}.F16.gguf", made.with_suffix(".partial")
    if not source.exists():
        print(f"writing {source}", flush=True)
        make_gguf.write(partial, SHAPES[shape])
        partial.rename(source)
    print(f"writing {made}", flush=True)
    done = peer.run("llama-quantize", source, partial, kind, timeout=TOOL_SECONDS)
    if done.returncode != 0:
        raise SystemExit(f"llama-quantize ended with {done.returncode}: {done.stderr[-2000:]}")
    partial.rename(made)
    return made


def table(speeds: Speeds, options: argparse.Namespace) -> Table:
    """Medians and ranges, and ours in proportion to the stock worker's."""
    shown = Table(
        title=f"{options.shape}, {options.threads} threads, {options.rounds} rounds, tokens/s (median, range)"
    )
    names = options.only.split(",")
    for heading in ("model", "test", *names, "ratio"):
        shown.add_column(heading, justify="left" if heading in {"model", "test"} else "right")
    for kind, measurement in dict.fromkeys((kind, measurement) for kind, measurement, _ in speeds):
        rounds = [speeds[kind, measurement, name] for name in names]
        medians = [statistics.median(values) for values in rounds]
        cells = [
            f"{middle:.1f} ({min(values):.1f} to {max(values):.1f})"
            for middle, values in zip(medians, rounds, strict=True)
        ]
        shown.add_row(kind, measurement, *cells, f"{medians[-1] / medians[0]:.2f}")
    return shown


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--types", default="Q4_K_M,Q8_0", help="as llama-quantize spells them")
    parser.add_argument("--rounds", type=int, default=3, help="how often the workers take turns")
    parser.add_argument("--repeat", type=int, default=2, help="repetitions within one llama-bench")
    parser.add_argument("--threads", type=int, default=2, help="of worker and client")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--flash-attention", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--only", default="stock,drover", help="which workers, in this order")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
