"""The cpu device: every case of the table and more against the reference device; then what is its own.

Its own are threads, programs of many nodes, nodes without a kernel, and index values out of range.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from drover.errors import DeviceError
from drover.ggml.ops import Op, RopeMode, pack_params
from drover.ggml.tensor import contiguous_strides, shape
from drover.ggml.types import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q8_0,
    TensorType,
)
from drover.worker.devices import Wanted, choose, host
from drover.worker.devices.cpu import matmul, threads
from drover.worker.devices.cpu.device import CpuDevice
from drover.worker.devices.cpu.kernel_cache import cache_directory
from drover.worker.devices.device import Device, Node, Operand
from drover.worker.devices.offer import Offer
from drover.worker.devices.reference.device import ReferenceDevice
from worker.devices import cases, kernel_cases
from worker.devices.cases import Case, case, gapped, permuted, tensor

pytestmark = pytest.mark.timeout(600)
"""The first device of a run may have to compile the kernels."""


@pytest.fixture(scope="module", params=[1, 3], ids=["1-thread", "3-threads"])
def cpu(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    device = CpuDevice(request.param, 1 << 30)
    yield device
    device.close()


# ---- one node


def _long_rows() -> Iterator[Case]:
    """Sizes that leave every possible rest after vectors of 16, and enough rows for every thread."""
    for n in (1, 2, 15, 16, 17, 31, 33, 63, 100):
        a, b, dst = tensor(F32, n, 40, 3), tensor(F32, n, 1, 3), tensor(F32, n, 40, 3)
        yield case(f"rest-{n}", Op.MUL, dst, a, b)
        yield case(f"rest-{n}", Op.RMS_NORM, dst, a, floats={0: 1e-5})
        yield case(f"rest-{n}", Op.NORM, dst, a, floats={0: 1e-5})
        yield case(f"rest-{n}", Op.SOFT_MAX, dst, a, tensor(F32, n, 40), floats={0: 0.3})
        yield case(f"rest-{n}", Op.GLU, dst, a, a, ints={0: 2})
        yield case(f"rest-{n}-half", Op.CPY, tensor(F16, n, 40, 3), a, tensor(F16, n, 40, 3))
    rows, places = tensor(F32, 1, 5000), tensor(I64, 5000, values=cases.below(6000))
    cache = tensor(F16, 1, 6000)
    yield case("scatter", Op.SET_ROWS, cache, rows, places, cache, onto=2)
    turned = {5: 10000.0, 6: 1.0, 8: 1.0, 9: 32.0, 10: 1.0}
    far = tensor(I32, 40, values=cases.below(3000))
    for mode in (RopeMode.NORMAL, RopeMode.NEOX):
        for dims in (6, 40, 64):
            x = tensor(F32, 64, 5, 40)
            yield case(f"{mode.name}-{dims}-of-64", Op.ROPE, x, x, far, ints={1: dims, 2: mode}, floats=turned)


def _attentions() -> Iterator[Case]:
    """Tiles and blocks that end in the middle, groups of heads, cells split over threads."""
    for kind in (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL):
        for heads, kv_heads, tokens, cells in ((8, 1, 1, 1500), (8, 2, 1, 70), (8, 4, 150, 200), (12, 4, 30, 129)):
            q = permuted(F32, 64, tokens, heads)
            k, v = permuted(kind, 64, cells, kv_heads), permuted(kind, 96, cells, kv_heads)
            mask, dst = tensor(F16, cells, tokens, values=cases.causal), tensor(F32, 96, heads, tokens)
            name = f"{kind.name}-{heads}-over-{kv_heads}-{tokens}x{cells}"
            yield case(name, Op.FLASH_ATTN_EXT, dst, q, k, v, mask, floats={0: 0.2})
            yield case(name + "-bias", Op.FLASH_ATTN_EXT, dst, q, k, v, mask, floats={0: 0.2, 1: 8.0})
    for width in (16, 32, 80, 96, 128, 256, 576):
        k, v = tensor(F16, width, 90, 2), tensor(F16, width, 90, 2)
        dst, q = tensor(F32, width, 6, 9), tensor(F32, width, 9, 6)
        yield case(f"width-{width}", Op.FLASH_ATTN_EXT, dst, q, k, v, floats={0: 0.1})
    k, v, q = tensor(F16, 64, 1100, 1), tensor(F16, 64, 1100, 1), tensor(F32, 64, 2, 4)
    dst, per_head, sinks = tensor(F32, 64, 4, 2), tensor(F16, 1100, 2, 4, values=cases.causal), tensor(F32, 4)
    yield case("split-mask-by-head-sinks", Op.FLASH_ATTN_EXT, dst, q, k, v, per_head, sinks, floats={0: 0.1, 2: 9.0})
    hidden = tensor(F16, 1100, 2, values=lambda rng, size: np.where(np.arange(1100) < 300, 0, -np.inf) + np.zeros(size))
    poison = tensor(F16, 64, 1100, 1, values=lambda rng, size: np.where(_cell(size) < 300, 0.5, np.nan))
    yield case("split-unwritten", Op.FLASH_ATTN_EXT, dst, q, poison, poison, hidden, floats={0: 0.1})
    blind = tensor(F16, 1100, 2, values=lambda rng, size: np.full(size, -np.inf))
    yield case("split-all-masked", Op.FLASH_ATTN_EXT, dst, q, k, v, blind, floats={0: 0.1})
    yield case(
        "split-gaps", Op.FLASH_ATTN_EXT, dst, gapped(F32, 64, 2, 4), gapped(F16, 64, 1100, 1), v, floats={0: 0.1}
    )


def _mixtures() -> Iterator[Case]:
    """Few and many tokens over 12 experts, of which some have nothing to do and some all tokens."""
    for kind in (F32, F16, BF16, Q4_0, Q4_K, IQ3_S, IQ4_XS, MXFP4, NVFP4):
        for rows, used, tokens in ((1, 1, 1), (1, 8, 1), (8, 8, 1), (2, 4, 3), (1, 3, 70), (3, 3, 40)):
            experts, b = tensor(kind, 512, 70, 12), gapped(F32, 512, rows, tokens)
            ids, dst = gapped(I32, used, tokens, values=_unevenly), tensor(F32, 70, used, tokens)
            yield case(f"{kind.name}-{used}-of-{rows}x{tokens}", Op.MUL_MAT_ID, dst, experts, b, ids)
    experts, b, ids = (
        tensor(F16, 40, 5, 3),
        tensor(F16, 40, 2, 60),
        tensor(I32, 2, 60, values=lambda *_: np.ones((60, 2))),
    )
    yield case("all-one", Op.MUL_MAT_ID, gapped(F32, 5, 2, 60), experts, b, ids)
    yield case("all-one-precise", Op.MUL_MAT_ID, gapped(F32, 5, 2, 60), experts, b, ids, ints={0: 10})


def _unevenly(rng: np.random.Generator, size: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Numbers of experts: the last two are never wanted, the first by half of the pairs."""
    return np.where(rng.random(size) < 0.5, 0, rng.integers(0, 10, size))


def _cell(size: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(size[-2])[:, None], size)


OWN_CASES = [*_long_rows(), *_attentions(), *_mixtures(), *kernel_cases.CASES, *kernel_cases.REFUSED]


@pytest.mark.parametrize("case", [*cases.CASES, *OWN_CASES], ids=lambda case: case.id)
def test_cpu_agrees_with_the_reference(cpu: CpuDevice, case: Case) -> None:
    expected = cases.run(ReferenceDevice(1 << 30), case)
    wrong = cases.differences(case, cases.run(cpu, case), expected)
    assert wrong is None, wrong


@pytest.mark.parametrize("case", [*kernel_cases.CASES, *kernel_cases.REFUSED], ids=lambda case: case.id)
def test_what_has_a_kernel(cpu: CpuDevice, case: Case) -> None:
    placed = cases.place(cpu, case)
    try:
        by_reference = [step for step in cpu.compile([placed.node]).steps if isinstance(step, Node)]
        assert bool(by_reference) == (case in kernel_cases.REFUSED)
    finally:
        for buffer in placed.buffers:
            cpu.free(buffer)


# ---- programs


def _place(device: Device, kind: TensorType, *ne: int, values: npt.ArrayLike | None = None) -> Operand:
    extents = shape(*ne)
    strides = contiguous_strides(kind, extents)
    buffer = device.alloc(strides[3] * extents[3])
    if values is not None:
        data = np.ascontiguousarray(values)
        device.write(buffer, 0, data.data.cast("B"))
    return Operand(kind, extents, strides, buffer, 0)


def _read(device: Device, operand: Operand) -> npt.NDArray[np.float32]:
    raw = bytearray(operand.nbytes)
    device.read(operand.buffer, operand.offset, memoryview(raw))
    return np.frombuffer(raw, np.float32).copy()


def _chain(device: Device, rows: int, fallback: bool) -> tuple[list[Node], Operand]:
    """Nodes that each need the one before, small and large ones in turn; `fallback` adds some without a kernel."""
    x = _place(device, F32, 200, rows, values=np.linspace(-1, 1, 200 * rows, dtype=np.float32))
    weight = _place(device, F32, 200, values=np.linspace(0.5, 1.5, 200, dtype=np.float32))
    total, nodes = _place(device, F32, 200, rows), []
    for i in range(30):
        y = _place(device, F32, 200, rows)
        nodes.append(Node(Op.RMS_NORM, pack_params(floats={0: 1e-5}), y, (x,)))
        nodes.append(Node(Op.MUL, pack_params(), y, (y, weight)))
        nodes.append(Node(Op.ADD, pack_params(), total, (y, x)))
        if fallback and i % 10 == 3:
            nodes.append(Node(Op.ROLL, pack_params({0: 3}), y, (total,)))
            nodes.append(Node(Op.SCALE, pack_params(floats={0: 0.1}), total, (y,)))
        x = total
    return nodes, total


@pytest.mark.parametrize("rows", [1, 300], ids=["alone", "shared"])
@pytest.mark.parametrize("fallback", [False, True], ids=["kernels", "mixed"])
def test_a_chain_of_nodes_runs_in_order(cpu: CpuDevice, rows: int, fallback: bool) -> None:
    devices: list[Device] = [ReferenceDevice(1 << 30), cpu]
    results = []
    for device in devices:
        nodes, result = _chain(device, rows, fallback)
        device.run(device.compile(nodes))
        results.append(_read(device, result))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fallback", [False, True], ids=["kernels", "mixed"])
def test_a_timed_run_does_the_same_and_times_every_node_once(cpu: CpuDevice, fallback: bool) -> None:
    results = []
    for run in (cpu.run, cpu.run_timed):
        nodes, result = _chain(cpu, 300, fallback)
        program = cpu.compile(nodes)
        start = time.perf_counter()
        timings = run(program)
        seconds = time.perf_counter() - start
        results.append(_read(cpu, result))
    assert np.array_equal(*results)
    assert timings is not None
    kept = [node for node in nodes if node.op is not Op.MUL]  # which the norms before them do too
    assert [timing.node for timing in timings] == kept
    assert min(timing.seconds for timing in timings) > 0
    assert sum(timing.seconds for timing in timings) <= seconds * 1.1


def test_what_the_processor_can_do_at_most(cpu: CpuDevice) -> None:
    ceilings = cpu.limits()
    assert {"B/s", "FLOP/s"} == {ceiling.unit for ceiling in ceilings}
    assert min(ceiling.rate for ceiling in ceilings) > 1e8


def test_a_program_reads_its_operands_anew_each_time(cpu: CpuDevice) -> None:
    a, b = _place(cpu, F32, 5000), _place(cpu, F32, 5000)
    program = cpu.compile([Node(Op.SQR, pack_params(), b, (a,))])
    for value in (2.0, 3.0):
        cpu.write(a.buffer, 0, np.full(5000, value, np.float32).data.cast("B"))
        cpu.run(program)
        assert set(_read(cpu, b)) == {value * value}


def test_a_norm_and_its_weights_become_one_record(cpu: CpuDevice) -> None:
    nodes, _ = _chain(cpu, 3, fallback=False)
    program = cpu.compile(nodes)
    assert [node.op for node in program.nodes] == [Op.RMS_NORM, Op.ADD] * 30


@pytest.mark.parametrize("base", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_senseless_parameters_are_computed_somehow(cpu: CpuDevice, base: float) -> None:
    x, positions = _place(cpu, F32, 64, 2, 3), _place(cpu, I32, 3)
    floats = {5: base, 6: 0.0, 7: 1.0, 8: 3e38, 9: 0.0, 10: float("nan")}
    cpu.run(cpu.compile([Node(Op.ROPE, pack_params({1: 64}, floats), x, (x, positions))]))


def test_a_second_operand_too_many_is_ignored(cpu: CpuDevice) -> None:
    x, small = _place(cpu, F32, 64, values=np.full(64, 2, np.float32)), _place(cpu, F32, 1)
    cpu.run(cpu.compile([Node(Op.RMS_NORM, pack_params(), x, (x, small))]))
    np.testing.assert_allclose(_read(cpu, x), 1)


def test_an_empty_program_runs(cpu: CpuDevice) -> None:
    cpu.run(cpu.compile([]))


def test_nodes_without_elements_are_left_out(cpu: CpuDevice) -> None:
    nothing = _place(cpu, F32, 4, 0)
    cpu.run(cpu.compile([Node(Op.SQR, pack_params(), nothing, (nothing,))]))


# ---- index values


def _get(device: Device, *ids: int) -> tuple[Node, Operand]:
    table = _place(device, F32, 4, 3, values=np.arange(12, dtype=np.float32))
    index, dst = _place(device, I32, len(ids), values=np.array(ids, np.int32)), _place(device, F32, 4, len(ids))
    return Node(Op.GET_ROWS, pack_params(), dst, (table, index), "inp_embd"), dst


@pytest.mark.parametrize("bad", [3, -1, 2**31 - 1, -(2**31)])
def test_get_rows_refuses_an_index_out_of_range(cpu: CpuDevice, bad: int) -> None:
    node, dst = _get(cpu, 2, bad, 1)
    program = cpu.compile([node])
    with pytest.raises(DeviceError, match=rf"GET_ROWS 'inp_embd'.*index {bad} is not in 0\.\.2"):
        cpu.run(program)
    assert list(_read(cpu, dst)) == [8, 9, 10, 11, 0, 0, 0, 0, 4, 5, 6, 7]
    index = node.src[1]
    assert index is not None
    cpu.write(index.buffer, 4, np.zeros(1, np.int32).data.cast("B"))
    cpu.run(program)
    assert list(_read(cpu, dst))[4:8] == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [3, -1, 2**40, -(2**63)])
@pytest.mark.parametrize(("kind", "width"), [(F32, 32), (F16, 32), (Q8_0, 32), (F32, 1), (Q4_1, 32)])
def test_set_rows_refuses_an_index_out_of_range(cpu: CpuDevice, kind: TensorType, width: int, bad: int) -> None:
    rows = _place(cpu, F32, width, 2, values=np.ones(2 * width, np.float32))
    index, cache = _place(cpu, I64, 2, values=np.array([1, bad])), _place(cpu, kind, width, 3)
    node = Node(Op.SET_ROWS, pack_params(), cache, (rows, index, cache), "cache_k_l0")
    with pytest.raises(DeviceError, match=rf"SET_ROWS.*{bad}"):
        cpu.run(cpu.compile([node]))


@pytest.mark.parametrize("kind", [F32, Q8_0, IQ3_S], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("bad", [3, -1, 2**31 - 1])
def test_experts_out_of_range_are_refused_and_left_out(cpu: CpuDevice, kind: TensorType, tokens: int, bad: int) -> None:
    experts, b = _place(cpu, kind, 256, 2, 3), _place(cpu, F32, 256, 1, tokens)
    chosen = np.tile(np.array([2, bad, 0], np.int32), tokens)
    ids = _place(cpu, I32, 3, tokens, values=chosen)
    dst = _place(cpu, F32, 2, 3, tokens, values=np.full(6 * tokens, 7, np.float32))
    program = cpu.compile([Node(Op.MUL_MAT_ID, pack_params(), dst, (experts, b, ids), "ffn_moe_up-0")])
    with pytest.raises(DeviceError, match=rf"MUL_MAT_ID 'ffn_moe_up-0'.*index {bad} is not in 0\.\.2"):
        cpu.run(program)
    assert (_read(cpu, dst).reshape(tokens, 3, 2) == [[0, 0], [7, 7], [0, 0]]).all()


@pytest.mark.parametrize("bad", [3, -1])
def test_add_id_refuses_an_index_out_of_range(cpu: CpuDevice, bad: int) -> None:
    rows, table = _place(cpu, F32, 20, 2, 3), _place(cpu, F32, 20, 3)
    ids = _place(cpu, I32, 2, 3, values=np.array([0, 1, 2, bad, 0, 1], np.int32))
    with pytest.raises(DeviceError, match=rf"ADD_ID.*index {bad} is not in 0\.\.2"):
        cpu.run(cpu.compile([Node(Op.ADD_ID, pack_params(), rows, (rows, table, ids))]))


@pytest.mark.parametrize("bad", [3, -1])
def test_ssm_scan_refuses_the_number_of_no_state(cpu: CpuDevice, bad: int) -> None:
    shapes = ((16, 4, 2, 3), (4, 2, 1, 1), (2, 1, 1), (1, 2), (16, 1, 1, 1), (16, 1, 1, 1))
    sources = [_place(cpu, F32, *ne) for ne in shapes]
    ids, dst = _place(cpu, I32, 1, values=np.array([bad], np.int32)), _place(cpu, F32, 8 + 128)
    with pytest.raises(DeviceError, match=rf"SSM_SCAN.*index {bad} is not in 0\.\.2"):
        cpu.run(cpu.compile([Node(Op.SSM_SCAN, pack_params({0: 1}), dst, (*sources, ids))]))


def _wide_product(device: Device, columns: int) -> Node:
    a, b, dst = (_place(device, F32, *ne) for ne in ((32, 2), (32, columns), (2, columns)))
    return Node(Op.MUL_MAT, pack_params(), dst, (a, b))


def test_a_product_with_very_many_columns_is_computed_in_parts(cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_MOST_SHARED", 1 << 20)
    monkeypatch.setattr(matmul, "_LEAST_COLUMNS", 100)
    sources = tensor(Q8_0, 64, 3, 2), gapped(F32, 64, 2345, 4, 1)
    wide = case("wide", Op.MUL_MAT, gapped(F32, 3, 2345, 4, 1), *sources)
    assert len(cpu.compile([cases.place(cpu, wide).node]).records) > 2
    wrong = cases.differences(wide, cases.run(cpu, wide), cases.run(ReferenceDevice(1 << 30), wide))
    assert wrong is None, wrong


def test_memory_to_compute_with_is_given_back_where_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice(2, 1 << 30)
    program = device.compile([_wide_product(device, 3000)])
    for most, kept in ((1 << 27, program.shared), (1 << 20, 0)):
        monkeypatch.setattr(threads, "_KEPT_BYTES", most)
        device.run(program)
        assert kept <= device._threads._shared.nbytes <= max(kept, 64)
    device.close()


def test_more_memory_to_compute_with_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice(2, 1 << 30)
    monkeypatch.setattr(host, "ALWAYS_THERE", 1 << 20)
    monkeypatch.setattr(host, "available_memory", lambda: 2 << 20)
    few, many = (device.compile([_wide_product(device, columns)]) for columns in (300, 3000))
    device.run(few)
    with pytest.raises(DeviceError, match=r"no memory to compute with: \d+ bytes needed, 2097152 are free"):
        device.run(many)
    device.run(few)
    device.close()


# ---- the registry and the cache of kernels


def test_an_operation_that_nobody_knows_is_named() -> None:
    device = CpuDevice(1, 1 << 20)
    x = _place(device, F32, 4)
    with pytest.raises(DeviceError, match=r"CUSTOM 'strange' \(F32\[4,1,1,1\]\)"):
        device.compile([Node(Op.CUSTOM, pack_params(), x, (x,), "strange")])
    device.close()


def test_devices_are_opened_by_name() -> None:
    reference, cpu = (place.open(Wanted(place.number, 2, Offer(1 << 20), 0)) for place in choose(["reference", "Cpu"]))
    assert isinstance(reference, ReferenceDevice)
    assert isinstance(cpu, CpuDevice)
    assert isinstance(cpu, Device)
    assert cpu.memory() == (1 << 20, 1 << 20)
    cpu.close()


def test_the_kernel_cache_is_named_for_its_sources(tmp_path: Path) -> None:
    folder = cache_directory(tmp_path)
    assert folder == cache_directory(tmp_path)
    assert folder.parent == tmp_path / "kernels"


@pytest.mark.parametrize("module", ["reference.device", "cpu.kernel_cache"])
def test_numba_is_not_imported_before_it_is_wanted(module: str) -> None:
    code = f"import sys, drover.worker.devices, drover.worker.devices.{module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
