"""Prediction: what one step of a graph reads, by hand counted, and the sum that becomes tokens a second."""

import pytest

from drover.coordinator.graph import Graph
from drover.coordinator.prediction import Pace, Work, matrices, seconds, tokens_per_second, work_of
from drover.ggml.ops import Op
from drover.ggml.tensor import Tensor, contiguous_strides, shape
from drover.ggml.types import F16, F32, I32, I64, Q4_K, Q8_0, TensorType

WIDTH, FF, VOCABULARY, CELLS = 64, 96, 80, 256


def placed(place: int, type_: TensorType, *extents: int) -> Tensor:
    ne = shape(*extents)
    return Tensor(id=1, ne=ne, nb=contiguous_strides(type_, ne), type=type_, buffer=1, data=place)


def test_a_lookup_reads_rows_and_a_product_its_matrix() -> None:
    g = Graph()
    table = g.leaf(placed(1, Q8_0, WIDTH, VOCABULARY))
    x = g.get_rows(table, g.input("tokens", I32, 1))
    x = g.mul(g.rms_norm(x, 1e-5), g.leaf(placed(2, F32, WIDTH)))
    x = g.mul_mat(g.leaf(placed(3, F16, WIDTH, FF)), x)
    work = work_of(g, x)
    assert work == Work({Q8_0: 2 * 34, F32: WIDTH * 4, F16: WIDTH * FF * 2}, 0, others=3, sent=4, fetched=FF * 4)


def test_a_tied_head_reads_the_whole_embedding() -> None:
    g = Graph()
    table = g.leaf(placed(1, Q8_0, WIDTH, VOCABULARY))
    x = g.mul_mat(table, g.get_rows(table, g.input("tokens", I32, 1)))
    assert work_of(g, x).weights == {Q8_0: 2 * 34 + VOCABULARY * 2 * 34}
    assert [matrix.ne for matrix in matrices(g)[Q8_0]] == [(WIDTH, VOCABULARY, 1, 1)]


def test_attention_reads_the_cells_it_looks_at_and_writing_a_cell_reads_none() -> None:
    g = Graph()
    heads, kv_heads, width, cells = 4, 2, 16, 512
    keys, values = (g.leaf(placed(place, F16, kv_heads * width, cells)) for place in (1, 2))
    new = g.input("hidden", F32, kv_heads * width, 1)
    for half in (keys, values):
        g.set_rows(half, new, g.input("cells", I64, 1))
    k, v = (
        g.view(half, (width, CELLS, kv_heads), (half.nb[0], half.nb[1], width * 2, half.nb[2]))
        for half in (keys, values)
    )
    q = g.reshape(g.input("q", F32, heads * width), width, 1, heads)
    out = g.flash_attn_ext(q, k, v, g.input("mask", F16, CELLS, 1), 0.25)
    work = work_of(g, out)
    assert (work.weights, work.cache, work.others) == ({}, 2 * CELLS * kv_heads * width * 2, 2)
    assert work.sent == sum(tensor.nbytes for tensor in g.inputs.values())


@pytest.mark.parametrize(("used", "read"), [(2, 2), (8, 8), (20, 8)])
def test_a_product_by_experts_reads_those_that_are_used(used: int, read: int) -> None:
    g = Graph()
    experts = g.leaf(placed(1, Q8_0, WIDTH, FF, 8))
    out = g.add(g.input("hidden", F32, WIDTH, 1), g.input("hidden", F32, WIDTH, 1))
    chosen = g.input("chosen", I32, used, 1)
    out.op, out.src = Op.MUL_MAT_ID, (experts.id, g.inputs["hidden"].id, chosen.id)
    assert work_of(g, out).weights == {Q8_0: read * FF * 2 * 34}


def test_the_parts_of_a_token_add_up() -> None:
    work = Work({Q4_K: 1000, F32: 10}, cache=100, others=5, sent=1, fetched=1)
    pace = Pace({Q4_K: 0.002}, cache=0.01, operation=0.1, exchange=0.25)
    assert seconds(work, pace) == pytest.approx(0.25 + 1010 * 0.002 + 100 * 0.01 + 5 * 0.1)


def test_each_type_counts_at_its_own_rate_and_one_without_a_product_like_the_largest() -> None:
    work = Work({Q4_K: 100, Q8_0: 10, F32: 1}, cache=0, others=0, sent=0, fetched=0)
    pace = Pace({Q8_0: 1.0, Q4_K: 0.5}, cache=0, operation=0, exchange=0)
    assert seconds(work, pace) == pytest.approx(100 * 0.5 + 10 * 1.0 + 1 * 0.5)


def test_stages_follow_one_another() -> None:
    work = Work({}, cache=0, others=0, sent=0, fetched=0)
    stages = [(work, Pace({}, 0, 0, exchange)) for exchange in (0.01, 0.03)]
    assert tokens_per_second(stages) == pytest.approx(25)
    assert tokens_per_second([]) is None
