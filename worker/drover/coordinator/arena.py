"""Addresses for a graph's intermediates in one compute buffer: memory of dead tensors is used again.

Pure: `place` decides offsets, `bind` writes addresses into the tensors. Inputs lie first, side by side, and live as
long as the graph, so that one message can write them all; the output is never overwritten.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drover.coordinator.graph import Graph
from drover.ggml.tensor import Tensor

Reserved = Callable[[Tensor, Sequence[Tensor]], int]
"""Bytes to set aside for a tensor, given its operands."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets by tensor id; the first `input_bytes` are the inputs; `size` bytes are needed in all."""

    offsets: dict[int, int]
    input_bytes: int
    size: int


def plain(tensor: Tensor, _sources: Sequence[Tensor]) -> int:
    """The bytes of the tensor alone."""
    return tensor.nbytes


def place(graph: Graph, output: Tensor, alignment: int, reserved: Reserved = plain) -> Placement:
    """Offsets for every tensor that has no memory of its own yet."""
    offsets: dict[int, int] = {}
    cursor = 0
    for tensor in graph.inputs.values():
        offsets[tensor.id] = cursor
        cursor = align(cursor + reserved(tensor, ()), alignment)
    space = _Space(cursor, alignment)
    last_use = _last_uses(graph, output)
    for step, tensor in enumerate(graph.tensors):
        if _needs_memory(tensor) and tensor.id not in offsets:
            sources = [graph.tensor(source) for source in tensor.src]
            offsets[tensor.id] = space.take(tensor.id, reserved(tensor, sources))
        for dead in last_use.get(step, ()):
            space.give_back(dead)
    return Placement(offsets, cursor, space.end)


def bind(graph: Graph, placement: Placement, buffer: int, base: int) -> None:
    """Give every tensor its address: placed ones in `buffer`, views inside what they are views of."""
    for tensor in graph.tensors:
        if tensor.view_src:
            root = graph.tensor(tensor.view_src)
            tensor.buffer, tensor.data = root.buffer, root.data + tensor.view_offs
        elif tensor.id in placement.offsets:
            tensor.buffer, tensor.data = buffer, base + placement.offsets[tensor.id]


def align(offset: int, alignment: int) -> int:
    """The next multiple of a power of two."""
    return (offset + alignment - 1) & -alignment


def _needs_memory(tensor: Tensor) -> bool:
    return not tensor.view_src and not tensor.buffer


def _last_uses(graph: Graph, output: Tensor) -> dict[int, list[int]]:
    """For each step, the tensors nobody needs after it; a view keeps what it is a view of."""
    last: dict[int, int] = {}
    for step, tensor in enumerate(graph.tensors):
        for id_ in (tensor.id, *tensor.src):
            last[graph.tensor(id_).view_src or id_] = step
    keep = {output.view_src or output.id, *(tensor.id for tensor in graph.inputs.values())}
    ends: dict[int, list[int]] = {}
    for id_, step in last.items():
        if id_ not in keep and _needs_memory(graph.tensor(id_)):
            ends.setdefault(step, []).append(id_)
    return ends


class _Space:
    """A range that grows at its end; gaps are kept sorted by offset and merged."""

    def __init__(self, start: int, alignment: int) -> None:
        self.end = start
        self._alignment = alignment
        self._gaps: list[tuple[int, int]] = []
        self._taken: dict[int, tuple[int, int]] = {}

    def take(self, id_: int, size: int) -> int:
        """The smallest gap that is large enough, or new room at the end."""
        size = align(max(size, 1), self._alignment)
        fitting = [gap for gap in self._gaps if gap[1] >= size]
        if fitting:
            gap = min(fitting, key=lambda found: found[1])
            self._gaps.remove(gap)
            if gap[1] > size:
                insort(self._gaps, (gap[0] + size, gap[1] - size))
            offset = gap[0]
        else:
            offset = self._grow(size)
        self._taken[id_] = (offset, size)
        return offset

    def give_back(self, id_: int) -> None:
        """Make a gap of what a tensor had."""
        insort(self._gaps, self._taken.pop(id_))
        merged: list[tuple[int, int]] = []
        for offset, size in self._gaps:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._gaps = merged

    def _grow(self, size: int) -> int:
        """New room; a gap at the very end becomes part of it."""
        offset = self.end
        if self._gaps and sum(self._gaps[-1]) == self.end:
            offset = self._gaps.pop()[0]
        self.end = offset + size
        return offset
