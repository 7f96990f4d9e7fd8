"""Graph: shapes, strides, operands and parameters of every constructor, and the errors for operands that do not fit."""

from collections.abc import Callable

import pytest

from drover.coordinator.graph import Graph, Rope
from drover.errors import GraphError
from drover.ggml.ops import Glu, Op, Precision, TensorFlag, Unary, float_params, int_params
from drover.ggml.tensor import Tensor
from drover.ggml.types import F16, F32, I32, I64, Q8_0

Make = Callable[[Graph], Tensor]


def given(g: Graph, *extents: int, type_=F32) -> Tensor:  # type: ignore[no-untyped-def]
    return g.input(f"in{len(g.inputs)}", type_, *extents)


# what is made, operation, extents, byte strides, type
SHAPES: dict[str, tuple[Make, Op, tuple[int, ...], tuple[int, ...] | None, object]] = {
    "get_rows": (
        lambda g: g.get_rows(given(g, 32, 9, type_=Q8_0), given(g, 4, type_=I32)),
        Op.GET_ROWS, (32, 4, 1, 1), None, F32,
    ),
    "set_rows": (
        lambda g: g.set_rows(given(g, 32, 9, type_=F16), given(g, 32, 2), given(g, 2, type_=I64)),
        Op.SET_ROWS, (32, 9, 1, 1), (2, 64, 576, 576), F16,
    ),
    "cpy": (lambda g: g.cpy(given(g, 6, 2), given(g, 4, 3, type_=F16)), Op.CPY, (4, 3, 1, 1), None, F16),
    "cont": (lambda g: g.cont(g.transpose(given(g, 6, 2))), Op.CONT, (2, 6, 1, 1), None, F32),
    "cont into": (lambda g: g.cont(g.permute(given(g, 2, 3, 4), 0, 2, 1, 3), 8, 3), Op.CONT, (8, 3, 1, 1), None, F32),
    "add": (lambda g: g.add(given(g, 6, 4), given(g, 6)), Op.ADD, (6, 4, 1, 1), None, F32),
    "mul": (lambda g: g.mul(given(g, 6, 4), given(g, 2, 4)), Op.MUL, (6, 4, 1, 1), None, F32),
    "scale": (lambda g: g.scale(given(g, 6), 0.5), Op.SCALE, (6, 1, 1, 1), None, F32),
    "unary": (lambda g: g.unary(Unary.SILU, given(g, 6)), Op.UNARY, (6, 1, 1, 1), None, F32),
    "glu": (lambda g: g.glu(Glu.SWIGLU, given(g, 6, 2), given(g, 6, 2)), Op.GLU, (6, 2, 1, 1), None, F32),
    "rms_norm": (lambda g: g.rms_norm(given(g, 6, 2), 1e-5), Op.RMS_NORM, (6, 2, 1, 1), None, F32),
    "norm": (lambda g: g.norm(given(g, 6, 2), 1e-5), Op.NORM, (6, 2, 1, 1), None, F32),
    "soft_max": (lambda g: g.soft_max(given(g, 8, 2, 3), given(g, 8, 2)), Op.SOFT_MAX, (8, 2, 3, 1), None, F32),
    "rope": (lambda g: g.rope(given(g, 8, 3, 5), given(g, 5, type_=I32), Rope(8)), Op.ROPE, (8, 3, 5, 1), None, F32),
    "mul_mat": (lambda g: g.mul_mat(given(g, 32, 7, 2), given(g, 32, 5, 6)), Op.MUL_MAT, (7, 5, 6, 1), None, F32),
    "flash_attn_ext": (
        lambda g: g.flash_attn_ext(
            given(g, 16, 5, 8), given(g, 16, 256, 2), given(g, 24, 256, 2), given(g, 256, 5, type_=F16), 0.25
        ),
        Op.FLASH_ATTN_EXT, (24, 8, 5, 1), None, F32,
    ),
    "view": (lambda g: g.view(given(g, 8, 4), (4, 2), (4, 32), 16), Op.VIEW, (4, 2, 1, 1), (4, 32, 1, 1), F32),
    "reshape": (lambda g: g.reshape(given(g, 8, 4), 4, 4, 2), Op.RESHAPE, (4, 4, 2, 1), (4, 16, 64, 128), F32),
    "permute": (lambda g: g.permute(given(g, 2, 3, 5), 0, 2, 1, 3), Op.PERMUTE, (2, 5, 3, 1), (4, 24, 8, 120), F32),
    "permute round": (
        lambda g: g.permute(given(g, 2, 3, 5), 1, 2, 0, 3), Op.PERMUTE, (5, 2, 3, 1), (24, 4, 8, 120), F32
    ),
    "transpose": (lambda g: g.transpose(given(g, 2, 3)), Op.TRANSPOSE, (3, 2, 1, 1), (8, 4, 24, 24), F32),
}  # fmt: skip


@pytest.mark.parametrize(("make", "op", "ne", "nb", "type_"), SHAPES.values(), ids=SHAPES)
def test_shape(make: Make, op: Op, ne: tuple[int, ...], nb: tuple[int, ...] | None, type_: object) -> None:
    made = make(Graph())
    assert (made.op, made.ne, made.type) == (op, ne, type_)
    assert made.flags == TensorFlag.COMPUTE
    assert made.nb == nb if nb else made.contiguous


WRONG: dict[str, Make] = {
    "get_rows by floats": lambda g: g.get_rows(given(g, 4, 4), given(g, 2)),
    "set_rows of another width": lambda g: g.set_rows(given(g, 8, 9), given(g, 4, 2), given(g, 2, type_=I64)),
    "set_rows with too few ids": lambda g: g.set_rows(given(g, 8, 9), given(g, 8, 2), given(g, 1, type_=I64)),
    "cpy of another size": lambda g: g.cpy(given(g, 6), given(g, 5)),
    "cont into another size": lambda g: g.cont(given(g, 6), 5),
    "add of uneven rows": lambda g: g.add(given(g, 6, 4), given(g, 4)),
    "glu of unequal halves": lambda g: g.glu(Glu.SWIGLU, given(g, 6), given(g, 5)),
    "soft_max with a short mask": lambda g: g.soft_max(given(g, 8, 2), given(g, 8, 1)),
    "rope of too many channels": lambda g: g.rope(given(g, 8, 3, 5), given(g, 5, type_=I32), Rope(10)),
    "rope with too few positions": lambda g: g.rope(given(g, 8, 3, 5), given(g, 4, type_=I32), Rope(8)),
    "rope with too few factors": lambda g: g.rope(given(g, 8, 3, 5), given(g, 5, type_=I32), Rope(8), given(g, 3)),
    "mul_mat of unequal rows": lambda g: g.mul_mat(given(g, 32, 7), given(g, 31, 5)),
    "mul_mat of uneven groups": lambda g: g.mul_mat(given(g, 32, 7, 2), given(g, 32, 5, 3)),
    "attention without enough mask": lambda g: g.flash_attn_ext(
        given(g, 16, 5, 8), given(g, 16, 256, 2), given(g, 16, 256, 2), given(g, 256, 4, type_=F16), 1
    ),
    "reshape of a permuted tensor": lambda g: g.reshape(g.transpose(given(g, 2, 3)), 6),
    "reshape into another size": lambda g: g.reshape(given(g, 6), 7),
    "permute onto itself": lambda g: g.permute(given(g, 6), 0, 0, 1, 2),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit(make: Make) -> None:
    with pytest.raises(GraphError, match=r"cannot take in0|cannot take .*in0|cannot take transpose"):
        make(Graph())


def test_views_of_views_point_at_the_root() -> None:
    g = Graph()
    root = given(g, 8, 8)
    inner = g.view(g.reshape(g.view(root, (8, 4), offset=64), 4, 8), (4, 2), offset=32)
    assert (inner.view_src, inner.view_offs) == (root.id, 96)


def test_set_rows_and_cpy_write_into_their_target() -> None:
    g = Graph()
    target, rows, ids = given(g, 8, 8), given(g, 8, 2), given(g, 2, type_=I64)
    assert g.set_rows(target, rows, ids).src == (rows.id, ids.id, target.id)
    assert g.set_rows(target, rows, ids).view_src == target.id
    assert g.cpy(rows, g.view(target, (8, 2))).view_src == target.id


def test_metadata_is_no_node() -> None:
    g = Graph()
    x = given(g, 4, 4)
    added = g.add(g.transpose(x), g.view(x, (4, 4)))
    assert g.nodes == [added]


def test_uses_are_counted_over_all_operands() -> None:
    g = Graph()
    x = given(g, 4)
    y = g.add(x, x)
    g.mul(y, g.reshape(y, 4))
    g.count_uses()
    assert [tensor.use_count for tensor in g.tensors] == [2, 2, 1, 0]


def test_leaves_and_inputs_appear_once() -> None:
    g = Graph()
    weight = Tensor(id=9, ne=(4, 1, 1, 1), nb=(4, 16, 16, 16), buffer=3, data=77, name="w")
    assert g.leaf(weight) is g.leaf(weight)
    assert g.leaf(weight) is not weight
    assert g.input("x", F32, 4) is g.input("x", F32, 4)
    assert [tensor.id for tensor in g.tensors] == [1, 2]


def test_parameters() -> None:
    g = Graph()
    x = given(g, 8, 3, 5)
    how = Rope(6, original_context=99, freq_base=5e5, freq_scale=0.25, ext_factor=1.0, attn_factor=1.5)
    rope = g.rope(x, given(g, 5, type_=I32), how).params
    assert int_params(rope)[1:5] == (6, 0, 0, 99)
    assert float_params(rope)[5:11] == (5e5, 0.25, 1.0, 1.5, 32.0, 1.0)
    assert float_params(g.scale(x, 2.0, 3.0).params)[:2] == (2.0, 3.0)
    assert int_params(g.mul_mat(x, x, Precision.F32).params)[0] == 10
    attention = g.flash_attn_ext(x, x, x, given(g, 3, 3, type_=F16), 0.5).params
    assert (float_params(attention)[0], int_params(attention)[3]) == (0.5, 10)
    assert int_params(g.view(x, (1,), offset=(5 << 32) + 4).params)[:2] == (4, 5)
