"""Nodes that a worker must compute, of every operation: the cases of the device tests, and the same in other sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np

from drover.errors import GraphError
from drover.ggml.ops import Op, TensorFlag
from drover.ggml.rules import check
from drover.ggml.tensor import Shape, Tensor, contiguous_strides, span
from drover.ggml.types import I32, I64, TensorType
from worker.devices.cases import CASES, Case, Spec, stored

VARIANTS = 3
TRIES = 12
LARGEST = 40 << 10
"""Bytes of a node's operands; larger ones are used only as cases have them, where an operation has no smaller."""
EXTENTS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 96, 128, 255, 256, 257)


@dataclass(frozen=True)
class Laid:
    """An operand's shape, and its content where that has to be row numbers."""

    type: TensorType
    ne: Shape
    nb: Shape
    content: bytes | None = None

    @cached_property
    def size(self) -> int:
        """Bytes from its first to its last."""
        return span(self.type, self.ne, self.nb)


@dataclass(frozen=True)
class Pattern:
    """A node to be: `operands` are its result and its sources, `onto` the source whose memory the result shares."""

    name: str
    op: Op
    params: bytes
    operands: tuple[Laid | None, ...]
    onto: int | None

    @cached_property
    def size(self) -> int:
        """Bytes that its operands take, each with what its alignment may cost."""
        return sum(operand.size + operand.type.type_size for operand in self.operands if operand is not None)


def patterns(rng: Random) -> list[Pattern]:
    """Every case that is small, and variants; of each operation at least one."""
    made = [pattern for case in CASES for pattern in _of(case, rng)]
    small = [pattern for pattern in made if pattern.size <= LARGEST]
    there = {pattern.op for pattern in small}
    return small + [pattern for pattern in made if pattern.op not in there and pattern.name.endswith(".0")]


@dataclass
class Room:
    """A buffer of a session: its end is used first, so that who leaves an operand leaves the buffer."""

    handle: int
    size: int
    device: int = 0
    cursor: int = field(init=False)

    def __post_init__(self) -> None:
        self.cursor = self.size

    @property
    def base(self) -> int:
        """Where the worker lets it start."""
        return self.handle << 40

    def take(self, operand: Laid) -> int | None:
        """Where the operand goes, as low as it must; None where it has no room."""
        start = self.cursor - operand.size
        start -= 0 if operand.type.quantized else start % operand.type.type_size
        if start < 0:
            return None
        self.cursor = start
        return self.base + start


@dataclass
class Table:
    """The tensors of a graph in the making, and those among them that are computed."""

    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[Tensor] = field(default_factory=list)
    contents: list[tuple[Tensor, bytes]] = field(default_factory=list)
    """What has to lie in an operand before."""

    def add(self, pattern: Pattern, rooms: Sequence[Room], rng: Random) -> bool:
        """Put a node and its operands into the rooms; False where they do not fit."""
        order = list(range(len(pattern.operands)))
        rng.shuffle(order)
        placed: dict[int, Tensor] = {}
        for index in order:
            operand = pattern.operands[index]
            if operand is None or (index == 0 and pattern.onto is not None):
                continue
            room = rng.choice(rooms)
            address = room.take(operand)
            if address is None:
                return False
            placed[index] = self._tensor(operand, room.handle, address)
        if pattern.onto is not None:
            under, shape = placed[pattern.onto + 1], pattern.operands[0]
            assert shape is not None
            placed[0] = self._tensor(shape, under.buffer, under.data)
        node = placed[0]
        node.op, node.params, node.flags, node.name = pattern.op, pattern.params, int(TensorFlag.COMPUTE), pattern.name
        sources = (placed.get(index) for index in range(1, len(pattern.operands)))
        node.src = tuple(0 if source is None else source.id for source in sources)
        self.nodes.append(node)
        return True

    def _tensor(self, operand: Laid, buffer: int, address: int) -> Tensor:
        made = Tensor(len(self.tensors) + 1, operand.ne, operand.nb, operand.type, buffer=buffer, data=address)
        self.tensors.append(made)
        if operand.content:
            self.contents.append((made, operand.content))
        return made


def _of(case: Case, rng: Random) -> Iterator[Pattern]:
    yield _pattern(case, case.dst, case.src, rng, 0)
    found = 0
    for _ in range(TRIES):
        dst, *src = _varied((case.dst, *case.src), rng)
        assert dst is not None
        try:
            check(case.op, case.params, _Shape(dst), [None if spec is None else _Shape(spec) for spec in src])
        except GraphError:
            continue
        found += 1
        yield _pattern(case, dst, tuple(src), rng, found)
        if found == VARIANTS:
            return


class _Shape:
    """A spec as the rules look at operands."""

    def __init__(self, spec: Spec) -> None:
        self.type, self.ne, self.nb = spec.type, spec.ne, spec.strides


def _varied(specs: Sequence[Spec | None], rng: Random) -> list[Spec | None]:
    """The same with up to three extents replaced, wherever they occur."""
    extents = sorted({n for spec in specs if spec is not None for n in spec.ne if n > 1})
    some = rng.sample(extents, min(len(extents), rng.randint(1, 3)))
    swaps = {n: n + rng.choice((-1, 1)) if rng.random() < 0.2 else rng.choice(EXTENTS) for n in some}
    gap = rng.random() < 0.3
    return [None if spec is None else _relaid(spec, swaps, gap) for spec in specs]


def _relaid(spec: Spec, swaps: dict[int, int], gap: bool) -> Spec:
    a, b, c, d = (swaps.get(n, n) for n in spec.ne)
    ne = (a, b, c, d)
    if spec.nb is None:
        return Spec(spec.type, ne, spec.values, contiguous_strides(spec.type, ne))
    order = sorted(range(4), key=lambda axis: (spec.strides[axis], axis))
    nb, stride = [0, 0, 0, 0], spec.type.type_size
    for axis in order:
        nb[axis] = stride
        stride *= max(1, ne[axis] // spec.type.block_size if axis == 0 else ne[axis])
        stride += spec.type.type_size if gap and axis != order[-1] else 0
    return Spec(spec.type, ne, spec.values, (nb[0], nb[1], nb[2], nb[3]))


def _pattern(case: Case, dst: Spec, src: tuple[Spec | None, ...], rng: Random, variant: int) -> Pattern:
    operands = tuple(None if spec is None else _laid(spec, rng, variant) for spec in (dst, *src))
    return Pattern(f"{case.name}.{variant}", case.op, case.params, operands, case.onto)


def _laid(spec: Spec, rng: Random, variant: int) -> Laid:
    content = None
    if spec.type in (I32, I64) and 0 not in spec.ne:
        content = _row_numbers(spec, rng, variant)
    return Laid(spec.type, spec.ne, spec.strides, content)


def _row_numbers(spec: Spec, rng: Random, variant: int) -> bytes:
    """Of the case itself what it says, of variants what should be there in any size."""
    width = spec.type.type_size
    image = np.zeros(spec.size - spec.shift, np.uint8)
    try:
        values = stored(spec.type, spec.values, np.random.default_rng(rng.getrandbits(32)), spec.ne[::-1])
    except ValueError:  # as many numbers as the case has, and no others
        return bytes(len(image))
    if variant:
        values = values % rng.choice((1, 2, 3))
    strides = (spec.strides[3], spec.strides[2], spec.strides[1], spec.strides[0])
    np.ndarray(spec.ne[::-1], f"<i{width}", image.data, 0, strides)[...] = values.reshape(spec.ne[::-1])
    return image.tobytes()
