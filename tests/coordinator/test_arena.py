"""Arena: nothing that is still needed is overwritten, memory of dead tensors is used again, addresses are aligned."""

import random

import pytest

from drover.coordinator import arena
from drover.coordinator.graph import Graph
from drover.ggml.tensor import Tensor
from drover.ggml.types import F32


def chain(length: int, width: int = 16) -> tuple[Graph, Tensor]:
    g = Graph()
    x = g.input("x", F32, width)
    for _ in range(length):
        x = g.scale(x, 1.0)
    return g, x


def test_a_chain_needs_two_rooms_however_long() -> None:
    g, out = chain(20)
    placed = arena.place(g, out, 64)
    assert placed.input_bytes == 64
    assert placed.size == 3 * 64


def test_inputs_lie_first_and_side_by_side() -> None:
    g = Graph()
    a, b = g.input("a", F32, 3), g.input("b", F32, 20)
    placed = arena.place(g, g.scale(g.add(b, b), 1.0), 32)
    assert (placed.offsets[a.id], placed.offsets[b.id], placed.input_bytes) == (0, 32, 128)


def test_inputs_used_late_come_first_too() -> None:
    g = Graph()
    y = g.scale(g.input("a", F32, 8), 1.0)
    late = g.input("late", F32, 8)
    placed = arena.place(g, g.add(y, late), 32)
    assert placed.offsets[late.id] == 32
    assert placed.offsets[y.id] == 64


@pytest.mark.parametrize("alignment", [1, 32, 4096])
@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_never_overwrite_what_is_needed(seed: int, alignment: int) -> None:
    g, out = random_graph(seed)
    placed = arena.place(g, out, alignment)
    arena.bind(g, placed, 7, 1 << 20)
    kept = {out.view_src or out.id, *(tensor.id for tensor in g.inputs.values())}
    last = {}
    for step, tensor in enumerate(g.tensors):
        for id_ in (tensor.id, *tensor.src):
            last[g.tensor(id_).view_src or id_] = step
    roots = [(step, tensor) for step, tensor in enumerate(g.tensors) if not tensor.view_src]
    for born, one in roots:
        assert one.data % alignment == 0
        assert one.data + one.nbytes <= (1 << 20) + placed.size
        for other_born, other in roots:
            together = one.id in g.inputs or born <= other_born <= (len(g.tensors) if one.id in kept else last[one.id])
            if one is not other and together:
                assert one.data + one.nbytes <= other.data or other.data + other.nbytes <= one.data


def random_graph(seed: int) -> tuple[Graph, Tensor]:
    rng = random.Random(seed)
    g = Graph()
    made = [g.input("x", F32, 8, rng.randint(1, 9))]
    for _ in range(40):
        a = rng.choice(made)
        kind = rng.randrange(4)
        if kind == 0:
            made.append(g.add(a, rng.choice([t for t in made if t.ne == a.ne])))
        elif kind == 1:
            made.append(g.view(a, (8, 1), offset=a.nb[1] * rng.randrange(a.ne[1])))
        elif kind == 2:
            made.append(g.cont(g.transpose(a), a.ne[0] * a.ne[1] // 8, 8) if a.ne[0] == 8 else a)
            made[-1] = g.cont(made[-1], 8, made[-1].elements // 8)
        else:
            made.append(g.mul(a, a))
    return g, made[-1]


def test_views_are_bound_inside_their_root() -> None:
    g = Graph()
    x = g.input("x", F32, 8, 4)
    row = g.view(x, (8,), offset=64)
    cached = g.leaf(Tensor(id=1, ne=(8, 1, 1, 1), nb=(4, 32, 32, 32), buffer=3, data=999, name="w"))
    tail = g.view(cached, (4,), offset=16)
    out = g.add(row, cached)
    arena.bind(g, arena.place(g, out, 64), 7, 4096)
    assert (row.buffer, row.data) == (7, 4096 + 64)
    assert (cached.buffer, cached.data) == (3, 999)
    assert (tail.buffer, tail.data) == (3, 1015)


def test_a_worker_may_ask_for_more_room() -> None:
    g, out = chain(3)
    asked = []

    def reserved(tensor: Tensor, sources: object) -> int:
        asked.append((tensor.name, sources))
        return tensor.nbytes + 1000

    placed = arena.place(g, out, 64, reserved)
    assert placed.size == 3 * arena.align(1064, 64)
    assert asked[1][1] == [g.inputs["x"]]


@pytest.mark.parametrize(("offset", "alignment", "expected"), [(0, 32, 0), (1, 32, 32), (32, 32, 32), (33, 1, 33)])
def test_align(offset: int, alignment: int, expected: int) -> None:
    assert arena.align(offset, alignment) == expected
