"""The device itself: host memory, and nodes executed one after another, straight from the table of operations.

Other devices call `execute` for single nodes they have no kernel for; it works on any host memory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from drover.errors import DeviceError
from drover.ggml.ops import METADATA_OPS, Op
from drover.worker.devices.device import Ceiling, Node, Timing
from drover.worker.devices.host import HostMemory
from drover.worker.devices.reference import arithmetic, attention, images, movement, products, recurrent, training
from drover.worker.devices.reference.arrays import Result, Work, require_room, store

FUNCTIONS: dict[Op, Callable[[Work], Result]] = {
    **movement.FUNCTIONS,
    **arithmetic.FUNCTIONS,
    **products.FUNCTIONS,
    **attention.FUNCTIONS,
    **recurrent.FUNCTIONS,
    **images.FUNCTIONS,
    **training.FUNCTIONS,
}
OPERATIONS: frozenset[Op] = frozenset(FUNCTIONS) | METADATA_OPS


@dataclass(frozen=True, slots=True)
class ReferenceProgram:
    """The nodes as they came."""

    nodes: tuple[Node, ...]


class ReferenceDevice(HostMemory):
    """A device that looks every node up and computes it in numpy."""

    name = "REFERENCE"
    description = "numpy reference"

    def compile(self, nodes: Sequence[Node]) -> ReferenceProgram:
        """Keep the nodes; raises DeviceError naming an operation nobody has."""
        for node in nodes:
            if node.op not in OPERATIONS:
                raise DeviceError(f"{node.op.name}: the reference device lacks this operation")
        return ReferenceProgram(tuple(nodes))

    def run(self, program: ReferenceProgram) -> None:
        """Execute the nodes in order; raises DeviceError on index values out of range and unknown types."""
        for node in program.nodes:
            execute(node)

    def run_timed(self, program: ReferenceProgram) -> list[Timing]:
        """Execute the nodes in order, each timed."""
        return [Timing(node, timed(execute, node)) for node in program.nodes]

    def limits(self) -> list[Ceiling]:
        """None: numpy is far below whatever they are."""
        return []

    def close(self) -> None:
        """Nothing to stop."""


def timed(function: Callable[..., object], *arguments: object) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def execute(node: Node) -> None:
    """Compute one node on host memory; its shapes have passed `ggml.rules.check`."""
    if node.dst.elements == 0 or node.op in METADATA_OPS:
        return
    function = FUNCTIONS.get(node.op)
    if function is None:
        raise DeviceError(f"{node.op.name}: the reference device lacks this operation")
    require_room(sum(operand.elements for operand in (node.dst, *node.src) if operand is not None))
    try:
        with np.errstate(all="ignore"):
            result = function(Work(node))
            if result is not None:
                store(node.dst, result)
    except MemoryError as error:
        raise DeviceError(f"{node.op.name}: out of memory: {error}") from error
