"""MUL_MAT on the cpu: every weight type, batch and odd shape against float64, and ggml's integer arithmetic exactly.

Weights are random blocks, their values what the `gguf` package makes of them. Run as a program this file checks the
kernels that the processor named by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES gets.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from drover.ggml import types
from drover.ggml.tensor import Shape
from drover.worker.devices.cpu import callees, gemm_k, kinds, levels, matmul, quantize, record, rows
from drover.worker.devices.cpu.callees import compiled
from drover.worker.devices.cpu.calls import ENTRIES
from drover.worker.devices.cpu.simd import jit
from drover.worker.devices.cpu.sync import CALLEES, SYNC_BYTES
from drover.worker.devices.reference.arrays import decode
from worker.devices import cases

Array = npt.NDArray[Any]

FLOATS = ("F32", "F16", "BF16")
TYPES = (*FLOATS, *(kind.type.name for kind in kinds.KINDS if kind.type.quantized))


def aligned(size: int, fill: int = 0xA5) -> Array:
    """Bytes on a cache line; garbage by default, as scratch memory is."""
    raw = np.full(size + 64, fill, np.uint8)
    start = -int(raw.ctypes.data) % 64
    return raw[start : start + size]


def meeting_point() -> Array:
    """A synchronisation block."""
    block = aligned(SYNC_BYTES, 0)
    block[CALLEES:][:8] = np.array([callees.table()]).view(np.uint8)
    return block


def random_weights(rng: np.random.Generator, name: str, count: int, k: int) -> tuple[Array, Array]:
    """`count` rows of k elements: their bytes [count, row] and their values in float64 [count, k]."""
    kind = types.BY_NAME[name]
    floats = rng.standard_normal((count, k)).astype(np.float32)
    if name == "F32":
        return floats.view(np.uint8), floats.astype(np.float64)
    if name == "F16":
        half = floats.astype(np.float16)
        return half.view(np.uint8), half.astype(np.float64)
    if name == "BF16":
        bits = floats.view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8), (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    blocks = cases.stored(kind, cases.normal, rng, (count, k))
    return blocks.reshape(count, -1), decode(kind, blocks).astype(np.float64)


@dataclass
class Product:
    """A record for `mul_mat` and the memory it points to."""

    record: Array
    memory: tuple[Array, ...]
    dst: Array
    ne0: Shape
    ne1: Shape

    def run(self, threads: int = 1) -> Array:
        """Execute the record; the result as [q, p, m, n]."""
        self.record[record.COUNTER] = 0
        shared, sync = aligned(matmul.shared_bytes(int(self.record[record.TYPE0]), self.ne0, self.ne1)), meeting_point()
        scratch = [aligned(matmul.scratch_bytes(int(self.record[record.TYPE0]), self.ne0)) for _ in range(threads)]

        def one(thread: int) -> None:
            matmul.mul_mat(
                int(self.record.ctypes.data),
                thread,
                threads,
                int(scratch[thread].ctypes.data),
                int(shared.ctypes.data),
                int(sync.ctypes.data),
            )

        others = [threading.Thread(target=one, args=(i,)) for i in range(1, threads)]
        for other in others:
            other.start()
        one(0)
        for other in others:
            other.join()
        return self.dst


def strides(array: Array) -> Shape:
    """Byte strides of a four-dimensional array, in ggml's order."""
    return array.strides[3], array.strides[2], array.strides[1], array.strides[0]


def product(name: str, w: Array, k: int, x: Array, dst: Array | None = None, precision: int = 0) -> Product:
    """A product of rows w [q, p, n, bytes] with columns x [q', p', m, k]; outer strides may be anything."""
    kind = types.BY_NAME[name]
    ne0 = (k, w.shape[2], w.shape[1], w.shape[0])
    ne1 = (k, x.shape[2], x.shape[1], x.shape[0])
    if dst is None:
        dst = np.full((ne1[3], ne1[2], ne1[1], ne0[1]), np.nan, np.float32)
    words = aligned(record.RECORD_BYTES, 0).view(np.int64)
    words[record.SRC] = w.ctypes.data
    words[record.SRC + 1] = x.ctypes.data
    words[record.DST] = dst.ctypes.data
    words[record.TYPE0] = kind.id
    words[record.TYPE1] = types.F16.id if x.dtype == np.float16 else types.F32.id
    words[record.PARAMS] = precision
    rows_ = strides(w)
    fields = {
        record.NE0: ne0,
        record.NB0: (kind.type_size, *rows_[1:]),
        record.NE1: ne1,
        record.NB1: strides(x),
        record.NE_DST: (ne0[1], *ne1[1:]),
        record.NB_DST: strides(dst),
    }
    for at, values in fields.items():
        words[at : at + 4] = values
    return Product(words, (w, x), dst, ne0, ne1)


def plain(name: str, w: Array, x: Array, precision: int = 0) -> Array:
    """The product of w [n, bytes] with x [m, k] as [m, n]."""
    result: Array = product(name, w[None, None], x.shape[1], x[None, None], precision=precision).run()[0, 0]
    return result


def error(result: Array, expected: Array) -> float:
    """Mean square of the difference, relative to that of the expected values."""
    return float(((result - expected) ** 2).mean() / (expected**2).mean())


def as_ggml_sees(name: str, x: Array) -> Array:
    """Activations [m, k] after ggml's rounding for weights of a type, in float64."""
    if name == "F32":
        return x.astype(np.float64)
    if name == "F16":
        return x.astype(np.float16).astype(np.float64)
    if name == "BF16":
        bits = x.view(np.uint32).astype(np.uint64)
        kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        return kept.astype(np.uint32).view(np.float32).astype(np.float64)
    size = 256 if types.BY_NAME[name].block_size == 256 else 32
    blocks = x.reshape(-1, size)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    factor = np.float32(127) / largest
    scale = np.float32(1) / factor if size == 256 else (largest / np.float32(127)).astype(np.float16)
    q = np.rint(blocks * factor)
    rounded: Array = (q.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)
    return rounded


# Sums of weights with a constant use a rounded sum of activations in ggml; the model above does not.
EXACT = dict.fromkeys(TYPES, 1e-11) | {"Q4_1": 1e-6, "Q5_1": 1e-6}


def shapes(name: str) -> Sequence[tuple[int, int]]:
    """(rows, k): the smallest, an ordinary one, a ragged one, and one that is taken in parts."""
    size = types.BY_NAME[name].block_size
    ragged = {1: 77, 32: 32 * 13, 64: 64 * 7, 128: 128 * 5, 256: 768}[size]
    return ((1, size), (37, 512), (7, ragged), (3, 256 * 13))


@pytest.mark.parametrize("name", TYPES)
def test_few_columns_follow_ggmls_arithmetic(name: str) -> None:
    rng = np.random.default_rng(1)
    for count, k in shapes(name):
        w, values = random_weights(rng, name, count, k)
        for m in (1, 2, 5, 8, 15):
            x = rng.standard_normal((m, k)).astype(np.float32)
            expected = as_ggml_sees(name, x) @ values.T
            # A single sum may cancel to nothing: measure against the size of its terms.
            size = (np.abs(as_ggml_sees(name, x)) @ np.abs(values.T)) ** 2 / k
            wrong = ((plain(name, w, x) - expected) ** 2).mean() / size.mean()
            assert wrong < EXACT[name], (count, k, m, wrong)


@pytest.mark.parametrize("name", TYPES)
def test_many_columns(name: str) -> None:
    rng = np.random.default_rng(2)
    for count, k in shapes(name):
        w, values = random_weights(rng, name, count, k)
        for m in (16, 33, 48, 100):
            x = rng.standard_normal((m, k)).astype(np.float32)
            # Without tiles, activations are rounded to eight bits here too.
            limit = {"F32": 1e-11}.get(name, 2e-4)
            assert error(plain(name, w, x), x.astype(np.float64) @ values.T) < limit, (count, k, m)


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_batches_share_weights_by_division_and_strides_are_free(name: str, m: int) -> None:
    rng = np.random.default_rng(3)
    k, n, p, q = 256, 19, 2, 3
    raw, values = random_weights(rng, name, q * n * p, k)
    # Rows of one head lie between those of others, as in a permuted cache.
    w = raw.reshape(q, n, p, -1).transpose(0, 2, 1, 3)
    rows_of = values.reshape(q, n, p, k).transpose(0, 2, 1, 3)
    x = rng.standard_normal((q, m, 3 * p, k)).astype(np.float32).transpose(0, 2, 1, 3)
    wide = np.full((q, 3 * p, m, n + 5), np.nan, np.float32)
    for out in (None, wide[..., :n]):
        result = product(name, w, k, x, out).run(threads=2)
        expected = np.einsum("qpmk,qpnk->qpmn", x.astype(np.float64), np.repeat(rows_of, 3, axis=1))
        assert error(result, expected) < (1e-11 if name == "F32" else 2e-4)
    assert np.isnan(wide[..., n:]).all()


def test_several_batches_of_columns_use_one_of_weights() -> None:
    rng = np.random.default_rng(4)
    w, values = random_weights(rng, "Q6_K", 10, 256)
    x = rng.standard_normal((4, 6, 2, 256)).astype(np.float32)
    result = product("Q6_K", w[None, None], 256, x).run()
    assert error(result, x.astype(np.float64) @ values.T) < 2e-4


@pytest.mark.parametrize("m", [1, 7, 35])
@pytest.mark.parametrize("name", ["F16", "F32", "Q5_K", "Q5_0"])
def test_activations_may_be_half_precision(name: str, m: int) -> None:
    rng = np.random.default_rng(5)
    k = 96 if name != "Q5_K" else 256
    w, values = random_weights(rng, name, 21, k)
    x = rng.standard_normal((m, k)).astype(np.float16)
    assert error(plain(name, w, x), x.astype(np.float64) @ values.T) < 2e-4


def test_asking_for_f32_keeps_half_precision_weights_exact() -> None:
    rng = np.random.default_rng(6)
    w, values = random_weights(rng, "F16", 33, 128)
    x = rng.standard_normal((64, 128)).astype(np.float32)
    assert error(plain("F16", w, x, precision=10), x.astype(np.float64) @ values.T) < 2e-7


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_halves_are_rounded_to_even_and_zeros_are_zero(name: str) -> None:
    rng = np.random.default_rng(7)
    w, values = random_weights(rng, name, 9, 512)
    x = np.zeros((1, 512), np.float32)
    x[0, :256] = np.arange(256) % 64 - 31.5
    x[0, :256:32] = 127.0  # makes the factor 1, so that every other element lies between two integers
    expected = as_ggml_sees(name, np.where(x == 0, np.float32(1e-30), x)) @ values.T
    assert error(plain(name, w, x), expected) < 1e-11
    assert not plain(name, w, np.zeros((2, 512), np.float32)).any()


def test_nothing_outside_the_result_is_written() -> None:
    rng = np.random.default_rng(8)
    for m in (1, 33):
        w, _ = random_weights(rng, "Q4_0", 17, 64)
        x = rng.standard_normal((1, 1, m, 64)).astype(np.float32)
        whole = np.full((m + 2, 17), 7.0, np.float32)
        product("Q4_0", w[None, None], 64, x, whole[None, None, 1:-1]).run()
        assert (whole[0] == 7).all()
        assert (whole[-1] == 7).all()


def test_half_precision_weights_keep_their_digits_in_tiles() -> None:
    rng = np.random.default_rng(8)
    w, values = random_weights(rng, "F16", 50, 200)
    x = rng.standard_normal((70, 200)).astype(np.float32)
    assert error(plain("F16", w, x), as_ggml_sees("F16", x) @ values.T) < 1e-9


# ---- the order of sums: ggml's, to the last bit


def in_single(x: Array) -> Array:
    """Rounded to single precision."""
    return x.astype(np.float32)


def step(a: Array, b: Array, c: Array) -> Array:
    """a · b + c rounded once; a · b of two floats is exact in double precision."""
    return in_single(a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64))


WITHOUT_MINIMA = ("Q6_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS")


def k_parts(name: str, raw: Array) -> tuple[Array, ...]:
    """d, dm [n, blocks], whole weights (scale · q) [n, blocks, 256] and minima [n, blocks, 8] of rows of K blocks."""
    kind = types.BY_NAME[name]
    n = len(raw)
    ends = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 208)}.get(name, (0, 0))
    parts = {"IQ3_XXS": 4, "IQ2_S": 8, "IQ2_XS": 8, "IQ2_XXS": 8}.get(name, 1)
    blocks = raw.reshape(n, -1, kind.type_size)
    d, dm = (in_single(blocks[..., at : at + 2].copy().view(np.float16)[..., 0]) for at in ends)
    ones, zeros = np.float16(1).tobytes(), np.float16(0).tobytes()

    def values(*replaced: bytes) -> Array:
        unit = blocks.copy()
        for at, half in zip(ends, replaced, strict=True):
            unit[..., at : at + 2] = np.frombuffer(half, np.uint8)
        flat = gguf.quants.dequantize(unit.reshape(-1, kind.type_size), gguf.GGMLQuantizationType[name])
        return np.rint(flat * parts).astype(np.int64).reshape(n, -1, 256)

    if name in WITHOUT_MINIMA:
        return d / np.float32(parts), dm, values(ones, ones), np.zeros((*d.shape, 8), np.int64)
    return d, dm, values(ones, zeros), -values(zeros, ones)[..., ::32]


def k_columns(x: Array) -> tuple[Array, Array]:
    """Scales [m, blocks] and bytes [m, blocks, 256] of activations."""
    blocks = x.reshape(len(x), -1, 256)
    factor = np.float32(127) / np.abs(blocks).max(axis=2)
    return np.float32(1) / factor, np.rint(blocks * factor[..., None]).astype(np.int64)


def few_in_order(name: str, raw: Array, x: Array) -> Array:
    """ggml's sums for fewer than 8 columns: eight lanes of integers over a block, then one step in floats for each."""
    d, dm, weights_, minima = k_parts(name, raw)
    y, q = k_columns(x)
    if name == "Q6_K":  # q counts from 0, and what it should count from is taken away elsewhere
        sixteenths = raw.reshape(*d.shape, -1)[..., 192:208].view(np.int8).astype(np.int64) * 32
        weights_ = weights_ + np.repeat(sixteenths, 16, axis=2)
    lanes = (weights_[None] * q[:, None]).reshape(len(x), *d.shape, 8, 8, 4).sum(axis=(3, 5))
    if name == "Q6_K":
        lanes -= (
            (sixteenths[None] * q.reshape(*q.shape[:2], 16, 16).sum(axis=3)[:, None])
            .reshape((*lanes.shape[:-1], 8, 2))
            .sum(4)
        )
    pairs = (minima[None] * q.reshape(*q.shape[:2], 8, 32).sum(axis=3)[:, None]).reshape(*lanes.shape[:3], 4, 2).sum(4)
    if name == "Q5_K":
        pairs = np.concatenate([pairs.sum(axis=3, keepdims=True), np.zeros_like(pairs[..., 1:])], axis=3)
    total, more = np.zeros((*lanes.shape[:2], 8), np.float32), np.zeros((*lanes.shape[:2], 4), np.float32)
    for i in range(d.shape[1]):
        scale = y[:, None, i, None]
        total = step((scale * d[None, :, i, None]), in_single(lanes[:, :, i]), total)
        more = step(-(scale * dm[None, :, i, None]), in_single(pairs[:, :, i]), more)
    while total.shape[2] > 1:
        half = total.shape[2] // 2
        total = total[..., :half] + total[..., half:]
    more = more[..., :2] + more[..., 2:]
    result: Array = total[..., 0] + (more[..., 0] + more[..., 1])
    return result


def many_in_order(name: str, raw: Array, x: Array) -> Array:
    """ggml's sums for 8 columns and more: whole integers over a block, then total += y · (d · sum − dm · minima)."""
    d, dm, weights_, minima = k_parts(name, raw)
    y, q = k_columns(x)
    total = np.zeros((len(x), len(raw)), np.float32)
    for i in range(d.shape[1]):
        whole = in_single(q[:, i] @ weights_[:, i].T)
        taken = in_single(q[:, i].reshape(-1, 8, 32).sum(axis=2) @ minima[:, i].T)
        value = step(-dm[None, :, i], taken, d[None, :, i] * whole)
        total = step(y[:, i, None], value, total)
    return total


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", *WITHOUT_MINIMA])
def test_sums_of_k_types_are_ggmls_to_the_last_bit(name: str) -> None:
    rng = np.random.default_rng(11)
    for count, k in ((37, 512), (7, 768), (130, 256 * 5)):
        w, _ = random_weights(rng, name, count, k)
        for m in (1, 2, 3, 7, 8, 31, 32, 50):
            x = rng.standard_normal((m, k)).astype(np.float32)
            if m < matmul.K_TILE_COLUMNS:
                assert (plain(name, w, x) == few_in_order(name, w, x)).all(), (count, k, m)
            elif gemm_k.COMPILED:
                assert (plain(name, w, x) == many_in_order(name, w, x)).all(), (count, k, m)


# ---- another processor's kernels, in a process of their own


def check_one_column() -> None:
    """Every type through the row kernels of this process, bit by bit in its integers."""
    rng = np.random.default_rng(9)
    tail, room = aligned(rows.scratch_bytes(kinds.IQ3_S, 512)), aligned(8192)
    times, prepare, look_up = single_column(), jit(quantize.prepare), compiled(levels.look_up, 5)
    table = np.zeros(len(ENTRIES), np.int64)
    table[ENTRIES.index(("look_up", 5))] = look_up.address
    for name in TYPES:
        count, k = 5, {1: 77, 32: 416, 64: 448, 128: 640, 256: 512}[types.BY_NAME[name].block_size]
        kind = types.BY_NAME[name].id
        w, values = random_weights(rng, name, count, k)
        form = quantize.form_of(kind)
        stride = quantize.stride_of(form, k)
        x = rng.standard_normal((1, k)).astype(np.float32)
        y, out = aligned(stride), np.zeros(count, np.float32)
        x_at, y_at = int(x.ctypes.data), int(y.ctypes.data)
        prepare(0, kind, form, x_at, types.F32.id, k, y_at, int(room.ctypes.data))
        rest = (int(w.ctypes.data), w.strides[0], count, k, y_at, stride, int(out.ctypes.data), 4, 0)
        times(int(table.ctypes.data), form, kind, *rest, int(tail.ctypes.data))
        wrong = error(out, as_ggml_sees(name, x)[0] @ values.T)
        assert wrong < max(EXACT[name], 1e-10), (name, wrong)
        assert kinds.block_bytes(kind) == types.BY_NAME[name].type_size


def single_column() -> Any:
    """One column only, so that a test does not compile the kernels for more."""

    @jit
    def times(
        table: int,
        form: int,
        kind: int,
        w: int,
        row: int,
        n: int,
        k: int,
        y: int,
        stride: int,
        out: int,
        step: int,
        more: int,
        tail: int,
    ) -> None:
        if form == quantize.KS:
            rows.rows_k(table, kind, w, row, n, k, y, stride, out, step, more, rows.one(), tail)
        elif form == quantize.FOURS:
            rows.rows_fours(kind, w, row, n, k, y, stride, out, step, more, rows.one(), tail)
        elif form == quantize.FLOATS:
            rows.rows_floats(kind, w, row, n, k, y, stride, out, step, more, rows.one(), tail)
        else:
            rows.rows_bfloats(w, row, n, k, y, stride, out, step, more, rows.one(), tail)

    return times


@pytest.mark.timeout(600)  # they are compiled anew
@pytest.mark.parametrize(
    ("processor", "features"),
    [("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"), ("generic", "")],
    ids=["avx2", "plain"],
)
def test_kernels_of_other_processors(processor: str, features: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    check_one_column()
