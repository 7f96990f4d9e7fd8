"""Rules accept what clients send, and refuse, with the operation's name, all that would lead a kernel astray."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.errors import GraphError
from drover.ggml.ops import FORBIDDEN_OPS, METADATA_OPS, Op, RopeMode, pack_params
from drover.ggml.rules import RULES, check
from drover.ggml.tensor import Shape, contiguous_strides, shape, span
from drover.ggml.types import BF16, F16, F32, F64, I32, I64, Q4_0, Q4_K, Q8_0, TYPES, TensorType


@dataclass(frozen=True)
class Thing:
    """An operand, as rules see it."""

    type: TensorType
    ne: Shape
    nb: Shape


def t(kind: TensorType, *ne: int, nb: Shape | None = None) -> Thing:
    extents = shape(*ne)
    return Thing(kind, extents, nb or contiguous_strides(kind, extents))


def f(*ne: int) -> Thing:
    return t(F32, *ne)


def i(*ne: int) -> Thing:
    return t(I32, *ne)


@dataclass(frozen=True)
class Node:
    op: Op
    dst: Thing
    src: tuple[Thing | None, ...]
    params: bytes = pack_params()

    def check(self) -> None:
        check(self.op, self.params, self.dst, self.src)


def node(op: Op, dst: Thing, *src: Thing | None, **slots: int) -> Node:
    """A node; parameters by slot, as `p1=64`."""
    return Node(op, dst, src, pack_params({int(name[1:]): value for name, value in slots.items()}))


ROPE = {"p1": 64, "p2": 0}
MROPE = {"p1": 64, "p2": 8, "p11": 16, "p12": 8, "p13": 8, "p14": 0}
PERMUTED_K = t(F16, 64, 20, 2, nb=(2, 256, 128, 5120))

GOOD = {
    "mul-mat-grouped": node(Op.MUL_MAT, f(20, 3, 8), PERMUTED_K, f(64, 3, 8)),
    "mul-mat-quantised": node(Op.MUL_MAT, f(10, 3), t(Q4_K, 256, 10), f(256, 3)),
    "mul-mat-broadcast-batch": node(Op.MUL_MAT, f(10, 3, 4, 6), f(8, 10, 2, 3), f(8, 3, 4, 6)),
    "mul-mat-empty-inner": node(Op.MUL_MAT, f(10, 3), f(0, 10), f(0, 3)),
    "mul-mat-no-rows": node(Op.MUL_MAT, f(10, 0), f(8, 10), f(8, 0)),
    "mul-mat-id-shared-row": node(Op.MUL_MAT_ID, f(9, 2, 6), t(Q8_0, 32, 9, 4), f(32, 1, 6), i(2, 6)),
    "mul-mat-id-strided-ids": node(
        Op.MUL_MAT_ID, f(9, 2, 6), f(32, 9, 4), f(32, 2, 6), t(I32, 2, 6, nb=(4, 32, 192, 192))
    ),
    "add-tiles": node(Op.ADD, f(6, 4), f(6, 4), f(3, 2)),
    "add-scalar": node(Op.ADD, f(6, 4, 3, 2), f(6, 4, 3, 2), f(1)),
    "add-half": node(Op.ADD, t(F16, 6), t(F16, 6), f(6)),
    "add-onto-quantised": node(Op.ADD, t(Q8_0, 32, 4), t(Q8_0, 32, 4), f(32, 4)),
    "add-nothing": node(Op.ADD, f(0, 4), f(0, 4), f(0, 4)),
    "get-rows-nothing": node(Op.GET_ROWS, f(8, 0), f(8, 9), i(0)),
    "get-rows-batched": node(Op.GET_ROWS, f(8, 3, 2, 2), t(F16, 8, 9, 2, 2), i(3, 2, 2)),
    "set-rows-transposed-cache": node(Op.SET_ROWS, t(F16, 1, 4096), f(1, 512), t(I64, 512), t(F16, 1, 4096)),
    "set-rows-repeated-ids": node(
        Op.SET_ROWS, t(Q8_0, 32, 9, 4, 2), f(32, 3, 4, 2), t(I64, 3, 2), t(Q8_0, 32, 9, 4, 2)
    ),
    "set-rows-none": node(Op.SET_ROWS, f(8, 5), f(8, 0), t(I64, 0), f(8, 5)),
    "cpy-other-shape": node(Op.CPY, t(Q8_0, 64, 3), f(32, 6), t(Q8_0, 64, 3)),
    "cpy-into-view": node(Op.CPY, t(F32, 4, 3, nb=(4, 64, 192, 192)), f(12), None),
    "cpy-to-itself": node(Op.CPY, f(12), t(F16, 12), f(12)),
    "cont-transposed": node(Op.CONT, f(3, 4), t(F32, 3, 4, nb=(16, 4, 48, 48))),
    "soft-max-more-mask-rows": node(Op.SOFT_MAX, f(64, 5, 8), f(64, 5, 8), t(F16, 64, 32)),
    "soft-max-sinks": node(Op.SOFT_MAX, f(64, 5, 8), f(64, 5, 8), f(64, 5), f(8)),
    "attention": node(
        Op.FLASH_ATTN_EXT, f(64, 8, 5), f(64, 5, 8), t(F16, 64, 256, 2), t(F16, 64, 256, 2), t(F16, 256, 64), f(8)
    ),
    "attention-mixed": node(Op.FLASH_ATTN_EXT, f(512, 16, 1), f(576, 1, 16), t(Q8_0, 576, 32, 1), t(F16, 512, 32, 1)),
    "rope": node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), **ROPE),
    "rope-batch": node(Op.ROPE, f(64, 4, 7, 2), f(64, 4, 7, 2), i(7), f(32), **ROPE),
    "rope-part": node(Op.ROPE, f(128, 4, 7), f(128, 4, 7), i(7), **ROPE, p15=64),
    "rope-axes": node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(28), **MROPE),
    "rope-vision": node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(28), **MROPE | {"p1": 32, "p2": RopeMode.VISION}),
    "rope-empty": node(Op.ROPE, f(64, 4, 0), f(64, 4, 0), i(0), **ROPE),
    "glu-two": node(Op.GLU, f(8, 3), f(8, 3), f(8, 3), p0=2),
    "glu-one": node(Op.GLU, f(4, 3), f(8, 3), p0=2, p1=1),
    "glu-odd": node(Op.GLU, f(2, 3), f(5, 3), p0=2),
    "concat": node(Op.CONCAT, f(3, 9), f(3, 4), f(3, 5), p0=1),
    "concat-with-nothing": node(Op.CONCAT, f(3, 4), f(3, 4), f(3, 0), p0=1),
    "repeat-strided": node(Op.REPEAT, f(6, 4), t(F32, 3, 2, nb=(8, 100, 200, 200))),
    "one-extent-with-odd-stride": node(Op.SCALE, f(8), t(F32, 8, nb=(4, 7, 7, 7))),
    "top-k": node(Op.TOP_K, i(3, 5), f(9, 5)),
    "fill-without-source": node(Op.FILL, f(5)),
    "view": node(Op.VIEW, f(5), f(9)),
}

BAD = {
    "mul-mat-inner": (node(Op.MUL_MAT, f(20, 3), f(64, 20), f(63, 3)), "inner extents"),
    "mul-mat-result": (node(Op.MUL_MAT, f(21, 3), f(64, 20), f(64, 3)), "result"),
    "mul-mat-groups": (node(Op.MUL_MAT, f(20, 3, 7), f(64, 20, 2), f(64, 3, 7)), "pair up"),
    "mul-mat-no-groups": (node(Op.MUL_MAT, f(20, 3, 4), f(64, 20, 0), f(64, 3, 4)), "pair up"),
    "mul-mat-quantised-right": (node(Op.MUL_MAT, f(20, 3), f(64, 20), t(Q8_0, 64, 3)), "src1"),
    "mul-mat-missing": (node(Op.MUL_MAT, f(20, 3), f(64, 20)), "src1 is missing"),
    "mul-mat-integers": (node(Op.MUL_MAT, f(20, 3), i(64, 20), f(64, 3)), "src0"),
    "mul-mat-half-result": (node(Op.MUL_MAT, t(F16, 20, 3), f(64, 20), f(64, 3)), "result"),
    "mul-mat-id-rows": (node(Op.MUL_MAT_ID, f(9, 3, 6), f(32, 9, 4), f(32, 2, 6), i(3, 6)), "indices"),
    "mul-mat-id-zero-rows": (node(Op.MUL_MAT_ID, f(9, 3, 6), f(32, 9, 4), f(32, 0, 6), i(3, 6)), "indices"),
    "mul-mat-id-wide-ids": (node(Op.MUL_MAT_ID, f(9, 2, 6), f(32, 9, 4), f(32, 1, 6), t(I64, 2, 6)), "src2"),
    "add-not-tiles": (node(Op.ADD, f(6, 4), f(6, 4), f(4, 4)), "repeat"),
    "add-zero-tile": (node(Op.ADD, f(6, 4), f(6, 4), f(6, 0)), "repeat"),
    "add-shape": (node(Op.ADD, f(6, 5), f(6, 4), f(6, 4)), "shapes differ"),
    "add-missing": (node(Op.ADD, f(6, 4)), "src0 is missing"),
    "add-absent": (node(Op.ADD, f(6, 4), f(6, 4), None), "src1 is missing"),
    "add-doubles": (node(Op.ADD, f(6), f(6), t(F64, 6)), "src1"),
    "get-rows-planes": (node(Op.GET_ROWS, f(8, 3, 2), f(8, 9, 1), i(3, 2)), "outer extents"),
    "get-rows-result": (node(Op.GET_ROWS, f(8, 4), f(8, 9), i(3)), "one row per index"),
    "get-rows-float-ids": (node(Op.GET_ROWS, f(8, 3), f(8, 9), f(3)), "src1"),
    "get-rows-wide-ids": (node(Op.GET_ROWS, f(8, 3), f(8, 9), t(I64, 3)), "src1"),
    "set-rows-width": (node(Op.SET_ROWS, f(8, 9), f(9, 3), t(I64, 3), f(8, 9)), "do not fit"),
    "set-rows-count": (node(Op.SET_ROWS, f(8, 9), f(8, 3), t(I64, 4), f(8, 9)), "number"),
    "set-rows-zero-planes": (node(Op.SET_ROWS, f(8, 9, 2), f(8, 3, 2), t(I64, 3, 0), f(8, 9, 2)), "repeat"),
    "cpy-count": (node(Op.CPY, f(12), f(13)), "element counts"),
    "soft-max-few-mask-rows": (node(Op.SOFT_MAX, f(64, 5, 8), f(64, 5, 8), t(F16, 64, 4)), "mask"),
    "soft-max-mask-heads": (node(Op.SOFT_MAX, f(64, 5, 8), f(64, 5, 8), t(F16, 64, 5, 3)), "repeat"),
    "soft-max-no-mask-heads": (node(Op.SOFT_MAX, f(64, 5, 8), f(64, 5, 8), t(F16, 64, 5, 0)), "repeat"),
    "soft-max-sinks": (node(Op.SOFT_MAX, f(64, 5, 8), f(64, 5, 8), None, f(7)), "sink"),
    "attention-heads": (
        node(Op.FLASH_ATTN_EXT, f(64, 8, 5), f(64, 5, 8), t(F16, 64, 9, 3), t(F16, 64, 9, 2), t(F16, 9, 5)),
        "evenly",
    ),
    "attention-no-heads": (
        node(Op.FLASH_ATTN_EXT, f(64, 8, 5), f(64, 5, 8), t(F16, 64, 9, 0), t(F16, 64, 9, 0), t(F16, 9, 5)),
        "evenly",
    ),
    "attention-cells": (
        node(Op.FLASH_ATTN_EXT, f(64, 8, 5), f(64, 5, 8), t(F16, 64, 9, 2), t(F16, 64, 8, 2), t(F16, 9, 5)),
        "fit together",
    ),
    "attention-result": (
        node(Op.FLASH_ATTN_EXT, f(64, 5, 8), f(64, 5, 8), t(F16, 64, 9, 2), t(F16, 64, 9, 2), t(F16, 9, 5)),
        "result",
    ),
    "rope-odd": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), p1=63), "n_dims"),
    "rope-none": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7)), "n_dims"),
    "rope-negative": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), p1=-2), "n_dims"),
    "rope-too-many": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), p1=66), "do not fit"),
    "rope-shifted-out": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), p1=32, p15=34), "do not fit"),
    "rope-shifted-before": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), p1=32, p15=-2), "do not fit"),
    "rope-few-positions": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(6), **ROPE), "positions"),
    "rope-few-planes": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), **MROPE), "positions"),
    "rope-no-sections": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(28), p1=64, p2=8), "sections"),
    "rope-vision-width": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(28), **MROPE | {"p2": 24}), "half a row"),
    "rope-mode": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), p1=64, p2=1), "mode"),
    "rope-factors": (node(Op.ROPE, f(64, 4, 7), f(64, 4, 7), i(7), f(31), **ROPE), "factors"),
    "unary-kind": (node(Op.UNARY, f(8), f(8), p0=22), "function"),
    "glu-kind": (node(Op.GLU, f(8), f(8), f(8), p0=7), "gate"),
    "glu-width": (node(Op.GLU, f(5), f(8), p0=2), "half"),
    "concat-axis": (node(Op.CONCAT, f(3, 9), f(3, 4), f(3, 5), p0=4), "dimension 4"),
    "concat-sum": (node(Op.CONCAT, f(3, 8), f(3, 4), f(3, 5), p0=1), "dimension 1"),
    "repeat-zero": (node(Op.REPEAT, f(6), f(0)), "tiles"),
    "argmax-empty": (node(Op.ARGMAX, i(3), f(0, 3)), "empty row"),
    "top-k-more": (node(Op.TOP_K, i(10, 5), f(9, 5)), "part of each row"),
    "group-norm": (node(Op.GROUP_NORM, f(4, 4, 4), f(4, 4, 4), p0=0), "groups"),
    "window-behind": (node(Op.SET, f(12), f(12), f(4), p0=48, p1=48, p2=48, p3=36), "leaves"),
    "window-before": (node(Op.SET, f(12), f(12), f(4), p0=48, p1=48, p2=48, p3=-4), "negative"),
    "window-strides": (node(Op.ACC, f(12), f(12), f(4, 2), p0=44, p1=48, p2=48), "leaves"),
    "pad-negative": (node(Op.PAD, f(4), f(5), p0=-1), "negative"),
    "pad-around-nothing": (node(Op.PAD, f(4), f(0), p0=4, p8=1), "wrap"),
    "reflect-too-far": (node(Op.PAD_REFLECT_1D, f(8), f(4), p0=4), "beyond"),
    "upscale-nothing": (node(Op.UPSCALE, f(4, 4), f(0, 4), p0=0), "nothing"),
    "timestep-period": (node(Op.TIMESTEP_EMBEDDING, f(4, 3), f(3), p0=4, p1=0), "a period of 0"),
    "pool-stride": (node(Op.POOL_1D, f(4), f(8), p1=2, p2=0), "window"),
    "conv-stride": (node(Op.CONV_2D, f(4, 4, 2), f(3, 3, 1, 2), f(6, 6), p4=1, p5=1), "stride"),
    "im2col-result": (node(Op.IM2COL, f(9, 5, 4), f(3, 3, 1, 2), f(6, 6), p0=1, p1=1, p4=1, p5=1, p6=1), "result"),
    "ssm-scan-length": (
        node(Op.SSM_SCAN, f(8), f(2, 1, 1, 4), f(1, 1, 3), f(1, 3), f(1, 1), f(2, 1, 3), f(2, 1, 3), i(1), p0=1),
        "5 numbers",
    ),
    "ssm-conv": (node(Op.SSM_CONV, f(6, 5, 2), f(7, 6, 2), f(4, 6)), "result"),
    "linear-attention-tokens": (node(Op.GATED_LINEAR_ATTN, f(4, 7), *[f(2, 2, 3)] * 4, f(8, 2)), "evenly"),
}


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD.keys())
def test_accepts(good: Node) -> None:
    good.check()


@pytest.mark.parametrize(("bad", "words"), BAD.values(), ids=BAD.keys())
def test_refuses(bad: Node, words: str) -> None:
    with pytest.raises(GraphError, match=words) as caught:
        bad.check()
    assert str(caught.value).startswith(f"{bad.op.name}: ")


SINGLE = {
    "quantised-partial-block": (t(Q4_0, 33, 2, nb=(18, 36, 72, 72)), "blocks per row"),
    "quantised-gaps": (t(Q4_0, 64, 2, nb=(20, 40, 80, 80)), "gaps between blocks"),
    "quantised-split": (t(Q4_0, 64, 2, nb=(18, 40, 80, 80)), "split elements"),
    "split-elements": (t(F32, 4, 3, nb=(4, 18, 54, 54)), "split elements"),
    "negative-extent": (t(F32, 4, -1, nb=(4, 16, 16, 16)), "negative"),
    "negative-stride": (t(F32, 4, 2, nb=(4, -16, 32, 32)), "negative"),
    "too-many": (t(F32, 1 << 31, 1 << 31, 4, nb=(0, 0, 0, 0)), "too large"),
    "too-far": (t(F32, 2, 2, nb=(4, 1 << 62, 0, 0)), "too large"),
}


@pytest.mark.parametrize(("operand", "words"), SINGLE.values(), ids=SINGLE.keys())
def test_refuses_an_operand_whatever_the_operation(operand: Thing, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        check(Op.CPY, pack_params(), operand, [f(4)])
    with pytest.raises(GraphError, match=words):
        check(Op.CPY, pack_params(), f(4), [operand])


def test_refuses_a_result_that_overlaps_itself() -> None:
    with pytest.raises(GraphError, match="overlap"):
        node(Op.FILL, t(F32, 4, 1000, nb=(4, 0, 0, 0))).check()
    node(Op.CPY, f(4, 3), t(F32, 4, 3, nb=(4, 0, 0, 0))).check()


TRAINING = {Op.FLASH_ATTN_BACK, Op.IM2COL_BACK, Op.POOL_2D_BACK}
"""What llama.cpp's own worker refuses or nobody tests."""


@pytest.mark.parametrize("op", sorted(FORBIDDEN_OPS | TRAINING))
def test_refuses_operations_without_a_rule(op: Op) -> None:
    with pytest.raises(GraphError, match=f"{op.name}: unsupported"):
        check(op, pack_params(), f(4), [f(4), f(4)])


def test_a_message_shows_the_operands() -> None:
    with pytest.raises(GraphError, match=r"F32\[6, 4, 1, 1\] <- F32\[6, 4, 1, 1\], Q8_0\[32, 1, 1, 1\]"):
        node(Op.ADD, f(6, 4), f(6, 4), t(Q8_0, 32)).check()


def test_a_type_changes_nothing_about_reading_metadata_operations() -> None:
    for op in METADATA_OPS:
        check(op, pack_params(), t(BF16, 3, 4), [f(99)])


extents = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 24, 32, 64, 256, 1 << 31])
things = st.builds(
    lambda kind, ne, nb: Thing(kind, ne, nb or contiguous_strides(kind, ne)),
    st.sampled_from(sorted(TYPES.values())),
    st.tuples(extents, extents, extents, extents),
    st.none() | st.tuples(*[st.integers(0, 1 << 33)] * 4),
)
parameters = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 24, 64, -1, -(1 << 31), 0x7FFFFFFF, 0x7FC00000]), max_size=16)


@given(st.sampled_from(Op), things, st.lists(st.none() | things, max_size=10), parameters)
@settings(max_examples=400, deadline=None)
def test_noise_is_refused_with_a_graph_error_or_accepted(op: Op, dst: Any, src: Any, numbers: list[int]) -> None:
    try:
        check(op, pack_params(dict(enumerate(numbers))), dst, src)
    except GraphError:
        pass
    else:
        assert op in RULES
        assert dst.ne[0] % dst.type.block_size == 0
        assert span(dst.type, dst.ne, dst.nb) < 1 << 62


@given(st.sampled_from(sorted(GOOD)), st.data())
@settings(max_examples=400, deadline=None)
def test_a_node_with_one_extent_changed_never_raises_anything_else(name: str, data: st.DataObject) -> None:
    kept = GOOD[name]
    whom = data.draw(st.integers(0, len(kept.src)))
    victim = kept.dst if whom == len(kept.src) else kept.src[whom]
    if victim is None:
        return
    ne = list(victim.ne)
    ne[data.draw(st.integers(0, 3))] = data.draw(extents)
    changed = replace(victim, ne=(ne[0], ne[1], ne[2], ne[3]))
    src = tuple(changed if k == whom else s for k, s in enumerate(kept.src))
    with suppress(GraphError):
        replace(kept, dst=changed if whom == len(kept.src) else kept.dst, src=src).check()
