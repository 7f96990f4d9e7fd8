"""Products with weights of each type on a Drover worker and on a stock one, by turns: one column, a prompt, experts.

usage: python tests/bench_types.py [--threads N] [--rounds N] [--shapes NAMES] [--types NAMES]
Prints, for each type and shape, how many milliseconds both workers took for one graph, by the clock and of their
processors (medians), both ratios, and how far the results are apart. Where others use the machine, one thread and
processor time say more than the clock: threads that wait for one another take it too. Not part of any test run.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drover.ggml import types
from drover.ggml.ops import Op, pack_params
from drover.ggml.tensor import contiguous_strides, shape
from drover.ggml.types import F32, I32, TensorType
from drover.worker.devices.device import Node, Operand
from support import drover
from support.peer import Peer
from support.processes import free_port
from worker.devices import cases
from worker.devices.stock import StockDevice

_DIFFERENT_ROWS = 64
"""Rows of random weights; the others repeat them."""
_ALL = [t.name for t in (*cases.WEIGHTS, *cases.GRIDS)]


@dataclass(frozen=True)
class Shape:
    """A product: so many columns, rows and elements of a row, and in one graph so many copies of the weights."""

    columns: int
    rows: int
    k: int
    copies: int
    experts: int = 0
    used: int = 0


SHAPES = {
    "decode": Shape(1, 4096, 2048, 24),
    "prompt": Shape(512, 2048, 2048, 1),
    "experts-decode": Shape(1, 768, 2048, 8, 64, 8),
    "experts-prompt": Shape(512, 768, 2048, 1, 64, 8),
}


class Side:
    """One worker with the operands of a shape on it, and the graph that uses them."""

    def __init__(self, port: int, process: int, kind: TensorType, form: Shape) -> None:
        self._device: Any = StockDevice(f"127.0.0.1:{port}")
        self._tasks = Path(f"/proc/{process}/task")
        rng = np.random.default_rng(1)
        stored = cases.stored(kind, cases.normal, rng, (_DIFFERENT_ROWS, form.k)).reshape(_DIFFERENT_ROWS, -1)
        weights = np.tile(stored, (form.rows * max(1, form.experts) // _DIFFERENT_ROWS, 1))
        columns = rng.standard_normal((form.columns, form.k)).astype(np.float32)
        chosen = np.array([rng.permutation(form.experts)[: form.used] for _ in range(form.columns)], np.int32)
        nodes = [self._node(kind, form, weights, columns, chosen) for _ in range(form.copies)]
        self._result = nodes[-1].dst
        self._program = self._device.compile(nodes)
        self.times: list[tuple[float, float]] = []

    def run(self) -> npt.NDArray[np.float32]:
        """Compute the graph once and note how long it took; the result of its last node."""
        raw = bytearray(self._result.nbytes)
        start, busy = time.perf_counter(), self._busy()
        self._device.run(self._program)
        self._device.read(self._result.buffer, 0, memoryview(raw))
        self.times.append((time.perf_counter() - start, self._busy() - busy))
        return np.frombuffer(raw, np.float32)

    def _busy(self) -> float:
        """Processor seconds of the worker so far."""
        return sum(int((task / "schedstat").read_text().split()[0]) for task in self._tasks.iterdir()) / 1e9

    def close(self) -> None:
        """Free the operands."""
        self._device.close()

    def _node(
        self, kind: TensorType, form: Shape, weights: cases.Array, columns: cases.Array, chosen: cases.Array
    ) -> Node:
        if not form.experts:
            a, b = self._place(kind, weights, form.k, form.rows), self._place(F32, columns, form.k, form.columns)
            return Node(Op.MUL_MAT, pack_params(), self._place(F32, None, form.rows, form.columns), (a, b))
        a = self._place(kind, weights, form.k, form.rows, form.experts)
        b = self._place(F32, columns, form.k, 1, form.columns)
        ids = self._place(I32, chosen, form.used, form.columns)
        dst = self._place(F32, None, form.rows, form.used, form.columns)
        return Node(Op.MUL_MAT_ID, pack_params(), dst, (a, b, ids))

    def _place(self, kind: TensorType, values: cases.Array | None, *ne: int) -> Operand:
        extents = shape(*ne)
        strides = contiguous_strides(kind, extents)
        size = strides[3] * extents[3]
        buffer = self._device.alloc(size)
        data = np.zeros(size, np.uint8) if values is None else np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._device.write(buffer, 0, data.data)
        return Operand(kind, extents, strides, buffer, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Start both workers and print a line for each shape and type."""
    options = _options(arguments)
    peer, ports = Peer.find(), (free_port(), free_port())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        threads = str(options.threads)
        ours = drover.start_worker(Path(folder, "drover.log"), ports[0], "--threads", threads)
        stack.callback(ours.stop)
        stock = peer.start_worker(Path(folder, "stock.log"), ports[1], options.threads)
        stack.callback(stock.stop)
        workers = list(zip(ports, (ours.popen.pid, stock.popen.pid), strict=True))
        for name in options.shapes.split(","):
            for kind in options.types.split(","):
                sides = [Side(port, process, types.BY_NAME[kind], SHAPES[name]) for port, process in workers]
                print(f"{name:15} {kind:8} {_compare(sides, options.rounds)}", flush=True)
                for side in sides:
                    side.close()


def _compare(sides: list[Side], rounds: int) -> str:
    results = [side.run().astype(np.float64) for side in sides]
    for side in sides:
        side.times.clear()
    for i in range(rounds):
        for side in sides if i % 2 == 0 else sides[::-1]:
            side.run()
    clock, busy = ([1e3 * statistics.median(time[which] for time in side.times) for side in sides] for which in (0, 1))
    apart = ((results[0] - results[1]) ** 2).mean() / (results[1] ** 2).mean()
    return (
        f"clock {clock[0]:8.2f} and {clock[1]:8.2f} ms: {clock[1] / clock[0]:5.2f}   "
        f"processor {busy[0]:8.2f} and {busy[1]:8.2f} ms: {busy[1] / busy[0]:5.2f}   apart {apart:.0e}"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="any of " + ", ".join(SHAPES))
    parser.add_argument("--types", default=",".join(_ALL), help="names of weight types")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
