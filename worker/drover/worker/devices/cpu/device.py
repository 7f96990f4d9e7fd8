"""The device itself: host memory, a set of threads, and programs of compiled kernels.

What has no kernel runs on the reference device, over the same memory, and is logged once for each operation.
"""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path

import numpy as np
import structlog
from numba.core import config

from drover.errors import DeviceError
from drover.ggml.ops import Op
from drover.worker.devices.cpu import record
from drover.worker.devices.cpu.ceilings import measure
from drover.worker.devices.cpu.kernel_cache import compiling
from drover.worker.devices.cpu.program import CpuProgram, compile_nodes, describe
from drover.worker.devices.cpu.threads import Threads
from drover.worker.devices.device import Ceiling, Node, Timing
from drover.worker.devices.host import HostMemory
from drover.worker.devices.reference.device import execute, timed

_CALIBRATION_SECONDS = 0.05

_log = structlog.get_logger()

_INDEXED: dict[Op, tuple[int, int]] = {
    Op.GET_ROWS: (0, 1),
    Op.ADD_ID: (1, 1),
    Op.SSM_SCAN: (0, 3),
    Op.MUL_MAT_ID: (0, 2),
}
"""Which operand index values point into, and along which of its dimensions; along the rows of the result otherwise."""


class CpuDevice(HostMemory):
    """The processors of this machine; creating it compiles the kernels, or loads them from numba's cache."""

    name = "CPU"

    def __init__(self, threads: int, limit: int) -> None:
        super().__init__(limit)
        self.description = _processor()
        folder: str = config.CACHE_DIR  # type: ignore[attr-defined]  # numba sets it when it is imported
        with compiling(Path(folder)) if folder else nullcontext():
            self._threads = Threads(threads)
        self._fallbacks: set[str] = set()

    def compile(self, nodes: Sequence[Node]) -> CpuProgram:
        """Turn nodes into a program; raises DeviceError for an operation that no device of the host has."""
        program = compile_nodes(nodes, self._threads.count)
        for step in program.steps:
            if isinstance(step, Node) and step.op.name not in self._fallbacks:
                self._fallbacks.add(step.op.name)
                _log.info("no fast kernel, running on the reference device", operation=describe(step))
        return program

    def run(self, program: CpuProgram) -> None:
        """Execute a program; raises DeviceError if an index tensor points out of range."""
        with self._threads.room(program.scratch, program.shared):
            for step in program.steps:
                if isinstance(step, Node):
                    execute(step)
                else:
                    self._run(program, *step)

    def run_timed(self, program: CpuProgram) -> list[Timing]:
        """Execute a program; what was fused counts as the first of its nodes."""
        timings = []
        with self._threads.room(program.scratch, program.shared):
            for step in program.steps:
                if isinstance(step, Node):
                    timings.append(Timing(step, timed(execute, step)))
                    continue
                first, count = step
                ticks = np.zeros(count + 1, np.int64)
                self._run(program, first, count, int(ticks.ctypes.data))
                seconds = np.diff(ticks) * self._seconds_per_tick
                timings += map(Timing, program.nodes[first : first + count], seconds.tolist())
        return timings

    def limits(self) -> list[Ceiling]:
        """Memory read, and what the units for floats and for tiles can do, with our threads."""
        return measure(self._threads.count)

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def _run(self, program: CpuProgram, first: int, count: int, ticks: int = 0) -> None:
        if bad := self._threads.run(program.start + first * record.RECORD_BYTES, count, ticks):
            self._raise(program, (bad - program.start) // record.RECORD_BYTES)

    @cached_property
    def _seconds_per_tick(self) -> float:
        """Of the counter that programs are timed with."""
        ticks, start = np.zeros(2, np.int64), time.perf_counter()
        self._threads.run(0, 0, int(ticks.ctypes.data))
        time.sleep(_CALIBRATION_SECONDS)
        self._threads.run(0, 0, int(ticks[1:].ctypes.data))
        return float((time.perf_counter() - start) / (ticks[1] - ticks[0]))

    @staticmethod
    def _raise(program: CpuProgram, index: int) -> None:
        value = int(program.records[index, record.ERROR_VALUE])
        node = program.nodes[index]
        slot, dimension = _INDEXED.get(node.op, (None, 1))
        rows = node.dst if slot is None else node.src[slot]
        limit = rows.ne[dimension] if rows is not None else 0
        raise DeviceError(f"{describe(node)}: index {value} is not in 0..{limit - 1}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine
