"""What a profile adds up, and what it prints."""

import re

import pytest

from drover.ggml.ops import Glu, Op, pack_params
from drover.ggml.tensor import contiguous_strides, shape
from drover.ggml.types import F16, F32, I32, Q4_K, Q8_0, TensorType
from drover.rpc import messages as m
from drover.worker.devices.device import Ceiling, Node, Operand, Timing
from drover.worker.devices.host import HostBuffer
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.memory import SharedDevice
from drover.worker.profile import Profile, kind_of, moved, operations
from drover.worker.session import Session
from support.client import Bench

EMPTY = HostBuffer(64)


def operand(kind: TensorType, *ne: int) -> Operand:
    return Operand(kind, shape(*ne), contiguous_strides(kind, shape(*ne)), EMPTY, 0)


def node(op: Op, dst: Operand, *src: Operand, ints: dict[int, int] | None = None) -> Node:
    return Node(op, pack_params(ints), dst, src)


PRODUCT = node(Op.MUL_MAT, operand(F32, 5632, 3), operand(Q4_K, 2048, 5632), operand(F32, 2048, 3))


def test_a_product_reads_its_weights_once() -> None:
    assert operations(PRODUCT) == 2 * 2048 * 5632 * 3
    assert moved(PRODUCT) == 2048 * 5632 // 256 * 144 + 4 * 2048 * 3 + 4 * 5632 * 3


def test_a_product_with_experts_reads_those_that_are_used() -> None:
    experts, ids = operand(Q8_0, 256, 128, 64), operand(I32, 8, 1)
    found = node(Op.MUL_MAT_ID, operand(F32, 128, 8, 1), experts, operand(F32, 256, 1, 1), ids)
    assert operations(found) == 2 * 256 * 128 * 8
    assert moved(found) == 8 * 128 * 256 // 32 * 34 + 4 * 256 + 4 * 8 + 4 * 128 * 8


def test_attention_multiplies_with_keys_and_values() -> None:
    q, k, v = operand(F32, 64, 3, 8), operand(F16, 64, 100, 2), operand(F16, 96, 100, 2)
    found = node(Op.FLASH_ATTN_EXT, operand(F32, 96, 8, 3), q, k, v)
    assert operations(found) == 2 * 3 * 8 * 100 * (64 + 96)


def test_rows_that_are_not_taken_count_for_nothing() -> None:
    table, ids = operand(F16, 64, 32000), operand(I32, 2)
    assert moved(node(Op.GET_ROWS, operand(F32, 64, 2), table, ids)) == 2 * 4 * 64 * 2
    cache = operand(F16, 64, 32000)
    assert moved(node(Op.SET_ROWS, cache, operand(F32, 64, 2), ids, cache)) == 2 * 4 * 64 * 2


def test_a_kind_names_the_function() -> None:
    x = operand(F32, 32, 1, 2)
    assert kind_of(node(Op.GLU, x, x, x, ints={0: Glu.SWIGLU})) == (
        "SWIGLU",
        "F32 F32 -> F32",
        "32x1x2 32x1x2 -> 32x1x2",
    )


def test_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profile([Ceiling("memory read", 20e9, "B/s")])
    profile.report("nobody")
    assert capsys.readouterr().out == ""
    for _ in range(2):
        profile.add([Timing(PRODUCT, 0.003), Timing(node(Op.SQR, operand(F32, 4), operand(F32, 4)), 0.001)])
    profile.report("10.0.0.1:5")
    head, limit, *rows = capsys.readouterr().out.splitlines()
    assert head == "client 10.0.0.1:5: 2 graphs, 0.008 s"
    assert limit == "  the device at most: memory read 20.0 GB/s"
    product = next(row for row in rows if "MUL_MAT" in row)
    assert product.split()[:4] == ["0.0060", "75.0", "2", "3000.0"]
    assert product.split()[-2:] == [f"{moved(PRODUCT) / 3e6:.1f}", f"{operations(PRODUCT) / 3e6:.1f}"]
    assert re.search(r"25\.0 +2 +1000\.0 +SQR", "\n".join(rows))


def test_kinds_beyond_the_longest_are_summed(capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profile([])
    for n in range(1, 61):
        profile.add([Timing(node(Op.SQR, operand(F32, n), operand(F32, n)), 0.001 * n)])
    profile.report("10.0.0.1:5")
    assert "20 more kinds" in capsys.readouterr().out


def test_a_session_notes_what_it_computes() -> None:
    profile = Profile([])
    session = Session([SharedDevice(ReferenceDevice(1 << 20))], profile=profile)
    handle = session.alloc_buffer(m.AllocBuffer(0, 4096)).remote_ptr
    bench = Bench(handle, session.buffer_get_base(m.BufferGetBase(handle)).base, 0)
    session.graph_compute(bench.graph(bench.node(Op.SQR, bench.tensor(4)), uid=7))
    session.graph_recompute(m.GraphRecompute(0, 7))
    session.close()
    assert [(kind[0], spent.calls) for kind, spent in profile.spent.items()] == [("SQR", 2)]
