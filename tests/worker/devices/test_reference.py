"""The reference device against plain formulas: loops over single elements, handwritten numbers, the gguf package."""

import math
import sys
import tracemalloc
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import quants

from drover.errors import DeviceError
from drover.ggml.ops import Glu, Op, RopeMode, Unary
from drover.ggml.rules import RULES
from drover.ggml.types import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    MXFP4,
    Q1_0,
    Q2_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    TQ1_0,
    TQ2_0,
    TensorType,
)
from drover.worker.devices import host
from drover.worker.devices.device import Device
from drover.worker.devices.reference import attention
from drover.worker.devices.reference.arrays import decode, encode, to_bf16
from drover.worker.devices.reference.device import OPERATIONS, ReferenceDevice, execute
from drover.worker.devices.reference.packing import QUANTIZE
from drover.worker.devices.reference.quants import DEQUANTIZE
from worker.devices.cases import CANARY, CASES, LEAD, TAIL, Case, Spec, case, place, result, run, stored, tensor

Array = npt.NDArray[Any]
MEMORY = 1 << 26


@pytest.fixture
def device() -> ReferenceDevice:
    return ReferenceDevice(MEMORY)


def given(values: Any, kind: TensorType = F32) -> Spec:
    """An operand holding these values, given in numpy's order of dimensions."""
    array = np.asarray(values)
    return tensor(kind, *array.shape[::-1], values=lambda rng, size: array.reshape(size))


def compute(op: Op, dst: Spec, *src: Spec | None, **params: Any) -> Array:
    """The result of one node on a fresh device, without leading dimensions of one."""
    values = run(ReferenceDevice(MEMORY), case("under-test", op, dst, *src, **params)).values
    first = next((i for i, n in enumerate(values.shape) if n != 1), 3)
    return values.reshape(values.shape[first:])


def random(*size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


# --- the device -----------------------------------------------------------------------------------------------------


def test_is_a_device(device: ReferenceDevice) -> None:
    assert isinstance(device, Device)


def test_every_rule_has_a_function_and_every_function_a_rule() -> None:
    assert set(RULES) == OPERATIONS


@pytest.mark.parametrize("kept", CASES, ids=lambda kept: kept.id)
def test_a_case_changes_nothing_around_its_result(device: ReferenceDevice, kept: Case) -> None:
    placed = place(device, kept)
    before = result(device, placed.node.dst).around
    device.run(device.compile([placed.node]))
    assert result(device, placed.node.dst).around == before
    assert before[:LEAD] == bytes([CANARY]) * LEAD
    assert before[-TAIL:] == bytes([CANARY]) * TAIL


def test_an_operation_nobody_has_is_named(device: ReferenceDevice) -> None:
    node = place(device, case("x", Op.ADD, tensor(F32, 4), tensor(F32, 4), tensor(F32, 4))).node
    lost = type(node)(Op.FLASH_ATTN_BACK, node.params, node.dst, node.src)
    with pytest.raises(DeviceError, match="FLASH_ATTN_BACK"):
        device.compile([lost])
    with pytest.raises(DeviceError, match="FLASH_ATTN_BACK"):
        execute(lost)


@pytest.mark.parametrize(
    ("op", "specs", "onto"),
    [
        (Op.GET_ROWS, (tensor(F32, 4, 2), tensor(F32, 4, 3), given([0, 3], I32)), None),
        (Op.GET_ROWS, (tensor(F32, 4, 2), tensor(F32, 4, 3), given([0, -1], I32)), None),
        (Op.SET_ROWS, (tensor(F32, 4, 3), tensor(F32, 4, 2), given([0, 3], I64), tensor(F32, 4, 3)), 2),
        (Op.SET_ROWS, (tensor(F32, 4, 3), tensor(F32, 4, 2), given([1 << 40, 0], I64), tensor(F32, 4, 3)), 2),
        (
            Op.MUL_MAT_ID,
            (tensor(F32, 5, 1, 2), tensor(F32, 4, 5, 3), tensor(F32, 4, 1, 2), given([[3], [0]], I32)),
            None,
        ),
        (Op.ADD_ID, (tensor(F32, 4, 1, 2), tensor(F32, 4, 1, 2), tensor(F32, 4, 3), given([[3], [0]], I32)), None),
    ],
)
def test_index_out_of_range_names_operation_and_value(op: Op, specs: tuple[Spec, ...], onto: int | None) -> None:
    with pytest.raises(DeviceError, match=rf"{op.name}: index (3|-1|1099511627776) "):
        run(ReferenceDevice(MEMORY), case("bad", op, *specs, onto=onto))


def test_a_type_nobody_can_write_is_named() -> None:
    with pytest.raises(DeviceError, match="Q8_1"):
        compute(Op.CPY, tensor(Q8_1, 32), tensor(F32, 32))


def test_empty_results_are_skipped() -> None:
    assert compute(Op.ADD, tensor(F32, 4, 0), tensor(F32, 4, 0), tensor(F32, 4, 1)).size == 0


FAR, WIDE = 1 << 29, (1 << 31) - 1
LINE, SPOT = given(np.arange(1.0, 6)), given([[[[2.0]]]])
HUGE: dict[str, tuple[Op, tuple[Spec, ...], dict[int, int], float]] = {
    "maximum": (Op.POOL_1D, (tensor(F32, 1), LINE), {0: 0, 1: 2 * FAR, 2: WIDE, 3: FAR}, 5),
    "average": (Op.POOL_1D, (tensor(F32, 1), LINE), {0: 1, 1: 2 * FAR, 2: WIDE, 3: FAR}, 3),
    "plane": (
        Op.POOL_2D,
        (tensor(F32, 1), LINE),
        {0: 0, 1: 2 * FAR, 2: 2 * FAR, 3: WIDE, 4: WIDE, 5: FAR, 6: FAR},
        5,
    ),
    "far off": (Op.CONV_2D, (tensor(F32, 1), SPOT, given([[[[3.0]]]])), {0: WIDE, 1: WIDE, 2: FAR, 4: 1, 5: 1}, 0),
    "columns": (Op.IM2COL, (tensor(F32, 1), SPOT, given([3.0])), {0: WIDE, 2: FAR, 4: 1}, 0),
    "folded": (Op.COL2IM_1D, (tensor(F32, 1), given([[1.0], [2.0]])), {0: 2 * FAR, 1: 1, 2: FAR}, 0),
}
"""Parameters that are allowed, reach far beyond the operands, and change nothing there."""


@pytest.mark.parametrize("name", HUGE)
def test_no_parameter_takes_memory(name: str) -> None:
    op, (dst, *src), ints, value = HUGE[name]
    made = case("far", op, dst, *src, ints=ints)
    placed = place(device := ReferenceDevice(MEMORY), made)
    tracemalloc.start()
    device.run(device.compile([placed.node]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result(device, placed.node.dst).values.ravel().tolist() == [value]
    assert peak < 1 << 20


def test_large_planes_are_resized_in_little_memory() -> None:
    for mode in (1, 2, 513):
        made = case("far", Op.UPSCALE, tensor(F32, 50_000), tensor(F32, 40_000), ints={0: mode})
        placed = place(device := ReferenceDevice(MEMORY), made)
        tracemalloc.start()
        device.run(device.compile([placed.node]))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 32 << 20


def test_attention_takes_memory_for_tokens_and_for_cells_and_not_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (tensor(F32, 8, n, 2, values=lambda rng, size: random(*size)) for n in (9, 7, 7))
    mask = tensor(F16, 7, 9, values=lambda rng, size: random(*size))
    whole = compute(Op.FLASH_ATTN_EXT, tensor(F32, 8, 2, 9), q, k, v, mask, floats={0: 0.5})
    monkeypatch.setattr(attention, "LOGITS", 30)
    parts = compute(Op.FLASH_ATTN_EXT, tensor(F32, 8, 2, 9), q, k, v, mask, floats={0: 0.5})
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


def test_attention_to_nothing_is_nothing() -> None:
    q, none = tensor(F32, 8, 3, 2), tensor(F32, 8, 0, 2)
    assert not compute(Op.FLASH_ATTN_EXT, tensor(F32, 8, 2, 3), q, none, none, floats={0: 0.5}).any()


def test_what_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 29)
    wide = tensor(F32, 1 << 25, nb=(0, 0, 0, 0))
    with pytest.raises(
        DeviceError, match=f"no memory to compute with: {24 * ((1 << 25) + 1)} bytes needed, {1 << 29} are"
    ):
        compute(Op.SUM, tensor(F32, 1), wide)


# --- types ----------------------------------------------------------------------------------------------------------

KNOWN_TO_GGUF = [kind for kind in DEQUANTIZE if kind not in (Q1_0, Q2_0, Q8_1) and kind.name != "Q8_K"]


@pytest.mark.parametrize("kind", KNOWN_TO_GGUF, ids=lambda kind: kind.name)
def test_blocks_read_as_the_gguf_package_reads_them(kind: TensorType) -> None:
    blocks = stored(kind, random, np.random.default_rng(1), (1, 1, 7, 1024))
    ours = decode(kind, blocks)
    rows = blocks.reshape(7, -1)
    theirs = quants.dequantize(rows, gguf.GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(ours.reshape(7, 1024), theirs)


def test_one_bit_and_two_bit_blocks() -> None:
    d = np.array([0.5], np.float16).view(np.uint8)
    bits = np.concatenate((d, np.full(16, 0b00000101, np.uint8)))
    assert decode(Q1_0, bits.reshape(1, 1, 1, 1, -1))[0, 0, 0, :9].tolist() == [0.5, -0.5, 0.5] + [-0.5] * 5 + [0.5]
    crumbs = np.concatenate((d, np.full(16, 0b11100100, np.uint8)))
    assert decode(Q2_0, crumbs.reshape(1, 1, 1, 1, -1))[0, 0, 0, :5].tolist() == [-0.5, 0, 0.5, 1, -0.5]


MIXED, SHIFTED = [-31.0, *[31.0] * 6, -31.0], [-16.875] * 8
FIRST_POINTS: list[tuple[TensorType, dict[int, int], list[float], float]] = [
    (IQ2_XXS, {1: 0x3C, 6: 0x01, 9: 0xF0}, MIXED, 1.0),
    (IQ2_XS, {1: 0x3C, 3: 0x02, 66: 0x0F}, MIXED, 1.0),
    (IQ2_S, {1: 0x3C, 34: 0x81, 74: 0x0F}, MIXED, 1.0),
    (IQ3_XXS, {1: 0x3C, 66: 0x01, 69: 0xF0}, MIXED, 1.0),
    (IQ3_S, {1: 0x3C, 74: 0x81, 106: 0x0F}, MIXED, 1.0),
    (IQ1_S, {1: 0x3C, 35: 0xF0}, SHIFTED, -0.875),
    (IQ1_M, {53: 0xC0, 55: 0x30, 32: 0x08, 48: 0x07}, SHIFTED, -0.875),
]
"""Bytes of a block of scale 1 and of first points of the grid, whose first group has the greatest factor and signs."""


@pytest.mark.parametrize(("kind", "edits", "first", "last"), FIRST_POINTS, ids=lambda x: getattr(x, "name", None))
def test_blocks_of_grid_points(kind: TensorType, edits: dict[int, int], first: list[float], last: float) -> None:
    block = np.zeros((1, 1, 1, 2, kind.type_size), np.uint8)
    for at, byte in edits.items():
        block[..., 1, at] = byte
    values = decode(kind, block)
    assert values.shape == (1, 1, 1, 512)
    assert not values[..., :256].any()
    assert values[0, 0, 0, 256:264].tolist() == first
    assert values[0, 0, 0, -1] == last


def test_grids_without_the_package_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DeviceError, match=r"IQ2_S cannot be read without the gguf package: install drover\[worker\]"):
        compute(Op.CPY, tensor(F32, 256), tensor(IQ2_S, 256))


WRITTEN_BY_GGUF = (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, TQ1_0, TQ2_0, MXFP4)


@pytest.mark.parametrize("kind", WRITTEN_BY_GGUF, ids=lambda kind: kind.name)
def test_blocks_are_written_as_the_gguf_package_writes_them(kind: TensorType) -> None:
    rows = random(9, 256) * np.logspace(-4, 4, 9, dtype=np.float32)[:, None]
    rows[0] = 0
    theirs = quants.quantize(rows, gguf.GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(encode(kind, rows).reshape(9, -1), theirs)


@pytest.mark.parametrize("kind", QUANTIZE, ids=lambda kind: kind.name)
def test_what_is_written_can_be_read_back(kind: TensorType) -> None:
    levels = {"Q8": 127, "Q6": 32, "Q5": 16, "Q4": 8, "Q3": 4, "Q2": 1.5, "Q1": 0.7}
    rows = random(64, 256)
    again = decode(kind, encode(kind, rows))
    step = np.abs(rows).max() / levels.get(kind.name[:2], 3)
    assert np.sqrt(np.mean((again - rows) ** 2)) < 0.6 * step


@pytest.mark.parametrize("kind", QUANTIZE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_constant_rows_come_back(kind: TensorType, value: float) -> None:
    with np.errstate(all="ignore"):
        again = decode(kind, encode(kind, np.full((1, 256), value, np.float32)))
    np.testing.assert_allclose(again, value, rtol=0.13 if kind.name in ("MXFP4", "NVFP4") else 2e-3)


def test_bf16_rounds_to_even_and_keeps_nan() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7F800001, 0x7FFFFFFF], np.uint32)
    assert to_bf16(ties.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0x7FFF]


# --- movement -------------------------------------------------------------------------------------------------------


def test_cpy_keeps_row_major_order_across_shapes() -> None:
    source = Spec(F32, (3, 2, 1, 1), lambda rng, size: np.array([[1, 3, 5], [2, 4, 6]]).reshape(size), (8, 4, 24, 24))
    assert compute(Op.CPY, tensor(F32, 2, 3), source).tolist() == [[1, 3], [5, 2], [4, 6]]


def test_cpy_to_integers_truncates() -> None:
    assert compute(Op.CPY, tensor(I32, 4), given([1.9, -1.9, 0.5, -7])).tolist() == [1, -1, 0, -7]


def test_get_rows_takes_each_plane_by_its_own_indices() -> None:
    a, ids = random(2, 5, 3), np.array([[4, 0], [1, 1]])
    got = compute(Op.GET_ROWS, tensor(F32, 3, 2, 2), given(a), given(ids, I32))
    for plane in range(2):
        for i in range(2):
            np.testing.assert_array_equal(got[plane, i], a[plane, ids[plane, i]])


def test_set_rows_repeats_indices_by_modulo_and_leaves_other_rows() -> None:
    old, rows, ids = random(4, 6, 2), random(4, 3, 2, seed=1), np.array([[5, 0, 2], [1, 3, 4]])
    got = compute(Op.SET_ROWS, given(old), given(rows), given(ids, I64), given(old), onto=2)
    want = old.copy()
    for plane in range(4):
        for i in range(3):
            want[plane, ids[plane % 2, i]] = rows[plane, i]
    np.testing.assert_array_equal(got, want)


def test_concat_pad_roll_repeat_on_small_numbers() -> None:
    one, two = given([[1, 2], [3, 4]]), given([[5, 6]])
    assert compute(Op.CONCAT, tensor(F32, 2, 3), one, two, ints={0: 1}).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert compute(Op.REPEAT, tensor(F32, 4), given([1, 2])).tolist() == [1, 2, 1, 2]
    assert compute(Op.REPEAT_BACK, tensor(F32, 2), given([1, 2, 30, 40])).tolist() == [31, 42]
    assert compute(Op.ROLL, tensor(F32, 4), given([1, 2, 3, 4]), ints={0: 1}).tolist() == [4, 1, 2, 3]
    assert compute(Op.PAD, tensor(F32, 5), given([1, 2]), ints={0: 1, 1: 2}).tolist() == [0, 1, 2, 0, 0]
    assert compute(Op.PAD, tensor(F32, 5), given([1, 2]), ints={0: 1, 1: 2, 8: 1}).tolist() == [2, 1, 2, 1, 2]
    assert compute(Op.PAD_REFLECT_1D, tensor(F32, 5), given([1, 2, 3]), ints={0: 1, 1: 1}).tolist() == [2, 1, 2, 3, 2]
    assert compute(Op.ARANGE, tensor(F32, 3), floats={0: 1, 1: 2.5, 2: 0.5}).tolist() == [1, 1.5, 2]


def test_windows_are_set_and_added_with_their_own_strides() -> None:
    a, b = np.zeros((3, 4)), np.array([[1, 2], [3, 4]])
    window = {0: 16, 1: 48, 2: 48, 3: 4}
    want = [[0, 1, 2, 0], [0, 3, 4, 0], [0, 0, 0, 0]]
    assert compute(Op.SET, given(a), given(a), given(b), ints=window).tolist() == want
    assert compute(Op.ACC, given(a), given(a + 1), given(b), ints=window)[1].tolist() == [1, 4, 5, 1]


def test_triangles_and_diagonals() -> None:
    ones = given(np.ones((3, 3)))
    kept = [compute(Op.TRI, ones, ones, ints={0: part}).sum() for part in range(4)]
    assert kept == [6, 3, 6, 3]
    assert compute(Op.TRI, ones, ones, ints={0: 3}).tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert compute(Op.DIAG, tensor(F32, 2, 2), given([[3, 4]])).tolist() == [[3, 0], [0, 4]]
    masked = compute(Op.DIAG_MASK_ZERO, tensor(F32, 3, 2), given(np.ones((2, 3))), ints={0: 1})
    assert masked.tolist() == [[1, 1, 0], [1, 1, 1]]


# --- arithmetic -----------------------------------------------------------------------------------------------------


def test_src1_repeats_by_modulo() -> None:
    a, b = random(4, 6), random(2, 3, seed=1)
    got = compute(Op.MUL, given(a), given(a), given(b))
    for i, j in np.ndindex(4, 6):
        assert got[i, j] == a[i, j] * b[i % 2, j % 3]


def test_in_place_over_either_operand() -> None:
    a, b = given([1.0, 2.0]), given([10.0, 20.0])
    assert compute(Op.SUB, a, a, b, onto=0).tolist() == [-9, -18]
    assert compute(Op.SUB, a, a, b, onto=1).tolist() == [-9, -18]


def plain_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain_sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


PLAIN = {
    Unary.ABS: abs,
    Unary.SGN: lambda x: (x > 0) - (x < 0),
    Unary.NEG: lambda x: -x,
    Unary.STEP: lambda x: float(x > 0),
    Unary.TANH: math.tanh,
    Unary.ELU: lambda x: x if x > 0 else math.expm1(x),
    Unary.RELU: lambda x: max(x, 0),
    Unary.SIGMOID: plain_sigmoid,
    Unary.GELU: plain_gelu,
    Unary.GELU_QUICK: lambda x: x * plain_sigmoid(1.702 * x),
    Unary.SILU: lambda x: x * plain_sigmoid(x),
    Unary.HARDSWISH: lambda x: x * min(1, max(0, (x + 3) / 6)),
    Unary.HARDSIGMOID: lambda x: min(1, max(0, (x + 3) / 6)),
    Unary.EXP: math.exp,
    Unary.EXPM1: math.expm1,
    Unary.SOFTPLUS: lambda x: x if x > 20 else math.log1p(math.exp(x)),
    Unary.GELU_ERF: lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    Unary.XIELU: lambda x: 0.3 * x * x + 0.5 * x if x > 0 else (math.expm1(min(x, -0.1)) - x) * 0.7 + 0.5 * x,
    Unary.FLOOR: math.floor,
    Unary.CEIL: math.ceil,
    Unary.ROUND: lambda x: math.copysign(math.floor(abs(x) + 0.5), x),
    Unary.TRUNC: math.trunc,
}


@pytest.mark.parametrize("function", Unary)
def test_unary(function: Unary) -> None:
    x = np.array([-30, -5, -2.5, -1, -0.5, -0.05, 0, 0.25, 0.5, 1.5, 2.5, 7, 25], np.float32)
    got = compute(Op.UNARY, given(x), given(x), ints={0: function}, floats={1: 0.7, 2: 0.3, 3: 0.5, 4: -0.1})
    np.testing.assert_allclose(got, [PLAIN[function](float(n)) for n in x], rtol=1e-6, atol=1e-12)


def test_gates_over_halves_and_swapped() -> None:
    row = given([1.0, 2.0, 10.0, 20.0])
    half = tensor(F32, 2)
    assert compute(Op.GLU, half, row, ints={0: Glu.REGLU}).tolist() == [10, 40]
    swapped = compute(Op.GLU, half, row, ints={0: Glu.SWIGLU, 1: 1})
    np.testing.assert_allclose(swapped, [10 * plain_sigmoid(10), 2 * 20 * plain_sigmoid(20)], rtol=1e-6)
    odd = compute(Op.GLU, half, given([1.0, 2.0, 3.0, 4.0, 5.0]), ints={0: Glu.REGLU})
    assert odd.tolist() == [3, 8]


def test_gates_with_limits() -> None:
    x, y = 9.0, -9.0
    got = compute(Op.GLU, tensor(F32, 1), given([x]), given([y]), ints={0: Glu.SWIGLU_OAI}, floats={2: 1.702, 3: 7.0})
    assert float(got.item()) == pytest.approx(7 * plain_sigmoid(1.702 * 7) * (-7 + 1), rel=1e-6)
    got = compute(Op.GLU, tensor(F32, 1), given([x]), given([y]), ints={0: Glu.SWIGLU_CLAMP}, floats={3: 7.0})
    assert float(got.item()) == pytest.approx(7 * plain_sigmoid(7) * -7, rel=1e-6)


def test_norms() -> None:
    x = np.array([1.0, 2, 3, 6], np.float32)
    np.testing.assert_allclose(compute(Op.RMS_NORM, given(x), given(x), floats={0: 0.5}), x / math.sqrt(12.5 + 0.5))
    np.testing.assert_allclose(compute(Op.NORM, given(x), given(x), floats={0: 0.5}), (x - 3) / 2, rtol=1e-6)
    np.testing.assert_allclose(compute(Op.L2_NORM, given(x), given(x)), x / math.sqrt(50), rtol=1e-6)
    np.testing.assert_allclose(compute(Op.L2_NORM, given(x), given(x), floats={0: 100}), x / 100, rtol=1e-6)


def test_reductions_and_orders() -> None:
    rows = np.array([[3, 1, 2], [5, 9, -1]], np.float32)
    assert compute(Op.SUM, tensor(F32, 1), given(rows)).item() == 19
    assert compute(Op.SUM_ROWS, tensor(F32, 1, 2), given(rows)).ravel().tolist() == [6, 13]
    assert compute(Op.MEAN, tensor(F32, 1, 2), given(rows)).ravel().tolist() == pytest.approx([2, 13 / 3])
    assert compute(Op.CUMSUM, given(rows), given(rows)).tolist() == [[3, 4, 6], [5, 14, 13]]
    assert compute(Op.ARGMAX, tensor(I32, 2), given(rows)).tolist() == [0, 1]
    assert compute(Op.ARGSORT, tensor(I32, 3, 2), given(rows)).tolist() == [[1, 2, 0], [2, 0, 1]]
    assert compute(Op.ARGSORT, tensor(I32, 3, 2), given(rows), ints={0: 1}).tolist() == [[0, 2, 1], [1, 0, 2]]
    assert sorted(compute(Op.TOP_K, tensor(I32, 2, 1), given(rows[:1])).tolist()) == [0, 2]
    same = compute(Op.COUNT_EQUAL, tensor(I64, 1), given([1, 2, 3], I32), given([1, 0, 3], I32))
    assert same.item() == 2


# --- products -------------------------------------------------------------------------------------------------------


def test_mul_mat_groups_heads_by_division() -> None:
    a, b = random(2, 3, 5), random(6, 4, 5, seed=1)
    got = compute(Op.MUL_MAT, tensor(F32, 3, 4, 6), given(a), given(b))
    for head, m, n in np.ndindex(6, 4, 3):
        want = sum(float(a[head // 3, n, k]) * float(b[head, m, k]) for k in range(5))
        assert float(got[head, m, n]) == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_mul_mat_id_picks_an_expert_per_row() -> None:
    experts, b, ids = random(3, 4, 5), random(2, 1, 5, seed=1), np.array([[2, 0], [1, 2]])
    got = compute(Op.MUL_MAT_ID, tensor(F32, 4, 2, 2), given(experts), given(b), given(ids, I32))
    for t, u in np.ndindex(2, 2):
        np.testing.assert_allclose(got[t, u], experts[ids[t, u]] @ b[t, 0], rtol=1e-4, atol=1e-6)


def test_solve_tri_solves() -> None:
    a = np.tril(random(2, 4, 4)) + 3 * np.eye(4, dtype=np.float32)
    b = random(2, 4, 3, seed=1)
    x = compute(Op.SOLVE_TRI, given(b), given(a), given(b))
    np.testing.assert_allclose(a @ x, b, rtol=1e-5, atol=1e-6)


# --- attention ------------------------------------------------------------------------------------------------------


def plain_softmax(logits: list[float], sink: float | None = None) -> list[float]:
    everything = [*logits, *([] if sink is None else [sink])]
    top = max(everything)
    if top == -math.inf:
        return [0.0] * len(logits)
    total = sum(math.exp(z - top) for z in everything)
    return [math.exp(z - top) / total for z in logits]


def plain_slope(head: int, heads: int, max_bias: float) -> float:
    power = 2 ** int(math.log2(heads))
    if head < power:
        return (2 ** (-max_bias / power)) ** (head + 1)
    return (2 ** (-max_bias / 2 / power)) ** (2 * (head - power) + 1)


@pytest.mark.parametrize("heads", [4, 6])
def test_soft_max_with_mask_bias_and_sinks(heads: int) -> None:
    x, mask, sinks = random(heads, 2, 5), random(3, 5, seed=1), random(heads, seed=2)
    mask[0, 3] = -np.inf
    got = compute(Op.SOFT_MAX, given(x), given(x), given(mask, F32), given(sinks), floats={0: 0.5, 1: 8.0})
    for h, n in np.ndindex(heads, 2):
        logits = [0.5 * float(x[h, n, c]) + plain_slope(h, heads, 8.0) * float(mask[n, c]) for c in range(5)]
        np.testing.assert_allclose(got[h, n], plain_softmax(logits, float(sinks[h])), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_flash_attention_cell_by_cell(cap: float) -> None:
    q, k, v = random(4, 2, 3), random(2, 5, 3, seed=1), random(2, 5, 6, seed=2)
    mask = np.where(np.arange(5) > [[2], [3]], -np.inf, 0.25).astype(np.float32)
    k[:, 4], v[:, 4] = np.nan, np.nan
    sources = (given(q), given(k), given(v), given(mask, F16))
    got = compute(Op.FLASH_ATTN_EXT, tensor(F32, 6, 4, 2), *sources, floats={0: 0.3, 2: cap})
    for h, n in np.ndindex(4, 2):
        seen = range(3 + n)
        logits = [0.3 * float(q[h, n] @ k[h // 2, c]) for c in seen]
        logits = [(cap * math.tanh(z / cap) if cap else z) + 0.25 for z in logits]
        weights = plain_softmax(logits)
        want = sum(w * v[h // 2, c] for w, c in zip(weights, seen, strict=True))
        np.testing.assert_allclose(got[n, h], want, rtol=1e-4, atol=1e-6)


def test_flash_attention_of_nothing_is_zero() -> None:
    q, k, mask = random(1, 1, 4), random(1, 3, 4), np.full((1, 3), -np.inf)
    got = compute(Op.FLASH_ATTN_EXT, tensor(F32, 4), given(q), given(k), given(k), given(mask, F16), floats={0: 1.0})
    assert got.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("mode", "pair"), [(RopeMode.NORMAL, lambda k: (2 * k, 2 * k + 1)), (RopeMode.NEOX, lambda k: (k, k + 3))]
)
def test_rope_turns_pairs(mode: RopeMode, pair: Any) -> None:
    x, positions = random(4, 2, 8), [0, 1, 5, 300]
    params = {"ints": {1: 6, 2: mode, 4: 4096}, "floats": {5: 1000.0, 6: 0.5, 8: 1.5}}
    got = compute(Op.ROPE, given(x), given(x), given(positions, I32), **params)
    back = compute(Op.ROPE_BACK, given(x), given(got), given(positions, I32), **params)
    for t, h, k in np.ndindex(4, 2, 3):
        angle = 0.5 * positions[t] * 1000.0 ** (-2 * k / 6)
        i, j = pair(k)
        turned = complex(x[t, h, i], x[t, h, j]) * complex(math.cos(angle), math.sin(angle)) * 1.5
        assert complex(got[t, h, i], got[t, h, j]) == pytest.approx(turned, rel=1e-4, abs=1e-5)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])
    np.testing.assert_allclose(back[..., :6], 2.25 * x[..., :6], rtol=1e-4, atol=1e-5)


def test_rope_over_several_axes_takes_each_pair_from_its_plane() -> None:
    x, planes = np.tile([1.0, 1, 1, 1, 0, 0, 0, 0], (1, 1, 1)), [1, 2, 3, 4]
    floats = {5: 1.0, 6: 1.0, 8: 1.0}
    sections = {1: 8, 2: RopeMode.MROPE, 11: 1, 12: 2, 13: 1, 14: 0}
    got = compute(Op.ROPE, given(x), given(x), given(planes, I32), ints=sections, floats=floats)
    np.testing.assert_allclose(got[:4], np.cos([1, 2, 2, 3]), rtol=1e-6)
    mixed = sections | {2: RopeMode.IMROPE, 11: 2, 12: 1, 13: 1}
    got = compute(Op.ROPE, given(x), given(x), given(planes, I32), ints=mixed, floats=floats)
    np.testing.assert_allclose(got[:4], np.cos([1, 2, 3, 1]), rtol=1e-6)


# --- recurrent ------------------------------------------------------------------------------------------------------


def test_ssm_conv_is_a_sliding_sum() -> None:
    x, w = random(2, 5), random(2, 3, seed=1)
    got = compute(Op.SSM_CONV, tensor(F32, 2, 3), given(x), given(w))
    for t, c in np.ndindex(3, 2):
        assert float(got[t, c]) == pytest.approx(sum(float(x[c, t + j] * w[c, j]) for j in range(3)), abs=1e-5)


def test_ssm_scan_carries_a_state() -> None:
    n, d, tokens = 2, 1, 3
    states, x, dt = random(4, 1, d, n), random(1, tokens, 1, d, seed=1), random(tokens, 1, seed=2)
    decay, b, c = -np.ones((1, 1)), random(tokens, 1, n, seed=3), random(tokens, 1, n, seed=4)
    sources = (states, x[0], dt, decay, b, c)
    dst = tensor(F32, tokens * d + 2 * n * d)
    specs = [given(s) for s in sources]
    got = compute(Op.SSM_SCAN, dst, *specs, given([3], I32), ints={0: 2})
    h, outputs, kept = states[3, 0, 0].astype(float), [], []
    for t in range(tokens):
        step = math.log1p(math.exp(dt[t, 0]))
        h = h * math.exp(-step) + step * float(x[0, t, 0, 0]) * b[t, 0]
        outputs.append(float(h @ c[t, 0]))
        kept.append(h)
    np.testing.assert_allclose(got, [*outputs, *kept[2], *kept[1]], rtol=1e-5, atol=1e-6)


def test_gated_delta_net_by_single_elements() -> None:
    size, tokens = 2, 2
    q, k, v = (random(tokens, 1, size, seed=s) for s in range(3))
    g, beta, state = -np.ones((tokens, 1, 1)), np.full((tokens, 1, 1), 0.5), random(1, size, size, seed=3)
    specs = [given(a) for a in (q, k, v, g, beta, state)]
    got = compute(Op.GATED_DELTA_NET, tensor(F32, size, tokens + size), *specs, ints={0: 1})
    m = state[0].astype(float)
    for t in range(tokens):
        m = m * math.exp(-1)
        for i in range(size):
            seen = sum(m[i, j] * k[t, 0, j] for j in range(size))
            m[i] += 0.5 * (v[t, 0, i] - seen) * k[t, 0]
        np.testing.assert_allclose(got[t], m @ q[t, 0] / math.sqrt(size), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got[tokens:], m, rtol=1e-4, atol=1e-6)


# --- images ---------------------------------------------------------------------------------------------------------


def test_convolution_is_im2col_times_kernel() -> None:
    image, kernel = random(2, 5, 6), random(3, 2, 2, 3, seed=1)
    ints = {0: 2, 1: 1, 2: 1, 3: 0, 4: 1, 5: 2}
    got = compute(Op.CONV_2D, tensor(F32, 3, 3, 3), given(kernel), given(image), ints=ints)
    padded = np.pad(image, ((0, 0), (0, 0), (1, 1)))
    for o, y, x in np.ndindex(3, 3, 3):
        window = padded[:, y : y + 3 : 2, 2 * x : 2 * x + 3]
        assert float(got[o, y, x]) == pytest.approx(float((window * kernel[o]).sum()), rel=1e-4, abs=1e-5)
    columns = compute(Op.IM2COL, tensor(F32, 12, 3, 3), given(kernel), given(image), ints=ints | {6: 1})
    np.testing.assert_allclose(np.einsum("yxk,ok->oyx", columns, kernel.reshape(3, -1)), got, rtol=1e-4, atol=1e-5)


def test_the_padding_of_a_convolution_takes_no_room() -> None:
    far = 1 << 29
    got = compute(
        Op.CONV_2D,
        tensor(F32, 3, 3),
        given(np.full((1, 1, 1, 1), 2.0)),
        given(random(1, 1, 3, 3)),
        ints={0: far, 1: far, 2: far, 3: far, 4: 1, 5: 1},
    )
    assert np.count_nonzero(got) == 1
    assert float(got[1, 1]) == pytest.approx(2 * float(random(1, 1, 3, 3)[0, 0, 0, 0]))


def test_transposed_convolution_spreads_each_input() -> None:
    x, kernel = np.array([[1.0, 10.0]]), np.array([[[1.0, 2.0, 3.0]]])
    got = compute(Op.CONV_TRANSPOSE_1D, tensor(F32, 5), given(kernel), given(x), ints={0: 2})
    assert got.tolist() == [1, 2, 13, 20, 30]
    columns = given([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    assert compute(Op.COL2IM_1D, tensor(F32, 5), columns, ints={0: 2, 1: 1}).tolist() == [1, 2, 13, 20, 30]


def test_upscale_small() -> None:
    row = given([0.0, 4.0])
    assert compute(Op.UPSCALE, tensor(F32, 4), row, ints={0: 0}).tolist() == [0, 0, 4, 4]
    assert compute(Op.UPSCALE, tensor(F32, 4), row, ints={0: 1}).tolist() == [0, 1, 3, 4]
    assert compute(Op.UPSCALE, tensor(F32, 5), row, ints={0: 257}).tolist() == [0, 1, 2, 3, 4]


def test_windows_come_apart_and_together() -> None:
    image = random(3, 5, 2)
    parts = compute(Op.WIN_PART, tensor(F32, 2, 2, 2, 6), given(image), ints={0: 3, 1: 2, 2: 2})
    np.testing.assert_array_equal(parts[0], image[:2, :2])
    np.testing.assert_array_equal(parts[5, 0, 0], image[2, 4])
    assert not parts[5, 1].any()
    whole = compute(Op.WIN_UNPART, tensor(F32, 2, 5, 3), given(parts), ints={0: 2})
    np.testing.assert_array_equal(whole, image)


def test_half_results_round_to_nearest_even() -> None:
    x = given([1.0, 2049.0, 2051.0], F32)
    assert compute(Op.CPY, tensor(F16, 3), x).tolist() == [1, 2048, 2052]
    assert compute(Op.CPY, tensor(BF16, 3), given([1.0, 257.0, 259.0])).tolist() == [1, 256, 260]


def test_quantised_copies_move_blocks_untouched(device: ReferenceDevice) -> None:
    source = tensor(Q8_0, 64, 2)
    moved = case("moved", Op.CPY, source, source)
    placed = place(device, moved)
    device.run(device.compile([placed.node]))
    first = placed.node.src[0]
    assert first is not None
    np.testing.assert_array_equal(result(device, placed.node.dst).values, result(device, first).values)
    assert compute(Op.CPY, tensor(F32, 32), tensor(Q4_0, 32)).shape == (32,)
