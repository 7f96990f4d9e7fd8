"""MUL_MAT: dst(n, m, p, q) = sum over k of a(k, n, p / r2, q / r3) b(k, m, p, q); docs/protocol.md section 6.5.

Few columns go through the row kernels, many through tiles, where the processor has them. With K types both add up in
ggml's order, and results are equal to the last bit; the tiles of the other types multiply with unrounded activations.
Every thread of a program calls `mul_mat` with the same record; a barrier follows it, and one stands inside it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from drover.ggml.ops import Op
from drover.ggml.tensor import Shape
from drover.worker.devices.cpu import calls, gemm, gemm_k
from drover.worker.devices.cpu.kinds import F16_ID, F32_ID, TYPES, is_k
from drover.worker.devices.cpu.quantize import column_bytes, form_of, stride_of
from drover.worker.devices.cpu.record import DST, NB0, NB1, NB_DST, NE0, NE1, PARAMS, SRC, TYPE0, TYPE1
from drover.worker.devices.cpu.rows import WIDEST
from drover.worker.devices.cpu.rows import scratch_bytes as row_scratch
from drover.worker.devices.cpu.simd import jit
from drover.worker.devices.cpu.sync import barrier, each_item, each_stretch
from drover.worker.devices.cpu.tiles import configure, permitted, release
from drover.worker.devices.cpu.vector import word
from drover.worker.devices.device import Node, Operand

TILE_COLUMNS: Final = 32
"""From this many columns on, tiles: about where they overtake the row kernels."""
K_TILE_COLUMNS: Final = 8
"""The same for K types: where ggml forms whole sums of blocks, as the tiles do."""
LEAST_ROWS: Final = 16
"""Rows that a thread claims at least, and"""
_MOST_ROWS: Final = 64
"""at most where they pass more than once, so that they stay in the second-level cache."""
_PRECISION_F32: Final = 10
_MOST_SHARED: Final = 256 << 20
"""Bytes that the columns of one record share, unless it has few of them."""
_LEAST_COLUMNS: Final = 512


def supported(node: Node) -> bool:
    """Whether the kernels of products can execute a node whose shapes have been checked."""
    a, b = node.src[0], node.src[1]
    if a is None or b is None:
        return False
    return (
        min(*a.ne, *b.ne) > 0
        and a.type.id in TYPES
        and b.type.id in (F32_ID, F16_ID)
        and node.dst.type.id == F32_ID
        and a.nb[0] == a.type.type_size
        and b.nb[0] == b.type.type_size
        and node.dst.nb[0] == 4
    )


def scratch_bytes(kind: int, ne0: Shape) -> int:
    """Bytes that each thread needs for operands of these shapes."""
    return max(row_scratch(kind, ne0[0]) + 2 * column_bytes(ne0[0]), panel_scratch(kind, ne0[0]))


def shared_bytes(kind: int, ne0: Shape, ne1: Shape) -> int:
    """Bytes that all threads share for operands of these shapes."""
    batches = ne1[2] * ne1[3]
    return int(batches * max(column_bytes(ne0[0]) * ne1[1], packed_bytes(kind, ne0[0], ne1[1])))


def parts(node: Node) -> Iterator[Node]:
    """A node, or if its columns would share too much memory, nodes for some of them each."""
    a, b = node.src[:2] if node.op is Op.MUL_MAT else (None, None)
    if a is None or b is None or b.ne[1] <= _LEAST_COLUMNS or not supported(node):
        yield node
        return
    some = shared_bytes(a.type.id, a.ne, (b.ne[0], _LEAST_COLUMNS, *b.ne[2:]))
    most = _LEAST_COLUMNS * max(1, _MOST_SHARED // some)
    for first in range(0, b.ne[1], most):
        count = min(most, b.ne[1] - first)
        yield replace(node, dst=_some(node.dst, first, count), src=(a, _some(b, first, count), *node.src[2:]))


def _some(operand: Operand, first: int, count: int) -> Operand:
    """Some columns of an operand."""
    ne = (operand.ne[0], count, *operand.ne[2:])
    return replace(operand, ne=ne, offset=operand.offset + first * operand.nb[1])


@jit
def mul_mat(record: int, tid: int, nth: int, scratch: int, shared: int, sync: int) -> None:
    """Execute one record; `scratch` is this thread's alone, `shared` all threads', sized by the functions above."""
    columns = word(record, NE1 + 1)
    if columns >= least_for_tiles(record, columns):
        _by_tiles(record, tid, nth, scratch, shared, sync)
    else:
        _by_rows(record, tid, nth, scratch, shared, sync)


@jit
def least_for_tiles(record: int, columns: int) -> int:
    """From how many columns on weights go through tiles; more than these where none do."""
    kind = word(record, TYPE0)
    exact = kind == F32_ID or (kind == F16_ID and word(record, PARAMS) == _PRECISION_F32)
    compiled = gemm_k.COMPILED if is_k(kind) else gemm.COMPILED
    least = K_TILE_COLUMNS if is_k(kind) else TILE_COLUMNS
    return least if compiled and not exact and columns >= least and permitted() else columns + 1


# ---- tiles, for weights of K types or of others


def panel_scratch(kind: int, k: int) -> int:
    """Bytes that each thread needs for rows of k elements."""
    return gemm_k.panel_scratch(k) if is_k(kind) else gemm.panel_scratch(kind, k)


@jit
def packed_bytes(kind: int, k: int, columns: int) -> int:
    """Bytes that packed columns take."""
    return gemm_k.packed_bytes(k, columns) if is_k(kind) else gemm.packed_bytes(kind, k, columns)


@jit
def panel_rows(kind: int, k: int, rows: int, threads: int) -> int:
    """How many rows a thread takes at a time."""
    return gemm_k.panel_rows(k, rows, threads) if is_k(kind) else gemm.panel_rows(kind, k, rows, threads)


@jit
def pack(
    table: int,
    kind: int,
    tid: int,
    nth: int,
    x: int,
    x_kind: int,
    step: int,
    columns: int,
    places: int,
    k: int,
    out: int,
    scratch: int,
) -> None:
    """The columns of thread `tid` of `nth` in the form that tiles want."""
    if is_k(kind):
        calls.pack_k(table, kind, tid, nth, x, x_kind, step, columns, places, k, out, scratch)
    else:
        calls.pack(table, kind, tid, nth, x, x_kind, step, columns, places, k, out, scratch)


@jit
def multiply_panel(
    table: int, kind: int, w: int, row: int, rows: int, k: int, x: int, columns: int, out: int, step: int, scratch: int
) -> None:
    """Some rows of weights times packed columns."""
    if is_k(kind):
        calls.multiply_panel_k(table, kind, w, row, rows, k, x, columns, out, step, scratch)
    else:
        calls.multiply_panel(table, kind, w, row, rows, k, x, columns, out, step, scratch)


@jit
def _by_rows(record: int, tid: int, nth: int, scratch: int, shared: int, sync: int) -> None:
    kind, k, rows = word(record, TYPE0), word(record, NE0), word(record, NE0 + 1)
    columns, heads, outer = word(record, NE1 + 1), word(record, NE1 + 2), word(record, NE1 + 3)
    ratio2, ratio3 = heads // word(record, NE0 + 2), outer // word(record, NE0 + 3)
    step = word(record, NB_DST + 1)
    stride = stride_of(form_of(kind), k)
    y, table = _prepare_columns(record, tid, nth, scratch, shared, sync, stride), calls.table_of(sync)
    # Heads that share their weights are columns of one product, if their results lie as if they were.
    joint = ratio2 if word(record, NB_DST + 2) == columns * step else 1
    groups = heads // joint
    row, most = word(record, NB0 + 1), rows if columns * joint <= WIDEST else _MOST_ROWS
    for group, first, some in each_stretch(record, groups * outer, rows, LEAST_ROWS, most, rows, nth):
        p, q = group % groups * joint, group // groups
        w = word(record, SRC) + p // ratio2 * word(record, NB0 + 2) + q // ratio3 * word(record, NB0 + 3) + first * row
        out = word(record, DST) + p * word(record, NB_DST + 2) + q * word(record, NB_DST + 3) + 4 * first
        x = y + (q * heads + p) * columns * stride
        calls.times_columns(table, kind, w, row, some, k, x, stride, columns * joint, out, step, scratch)


@jit
def _prepare_columns(record: int, tid: int, nth: int, scratch: int, shared: int, sync: int, stride: int) -> int:
    """All columns in the form the weights want; where they start. One column each thread prepares for itself."""
    kind, k, x_kind = word(record, TYPE0), word(record, NE0), word(record, TYPE1)
    form = form_of(kind)
    columns, heads = word(record, NE1 + 1), word(record, NE1 + 2)
    total = columns * heads * word(record, NE1 + 3)
    room = scratch + row_scratch(kind, k)
    if total == 1:
        y = room + column_bytes(k)
        calls.prepare(calls.table_of(sync), kind, form, word(record, SRC + 1), x_kind, k, y, room)
        return y
    for c in range(tid, total, nth):
        x = _column(record, c % columns, c // columns % heads, c // (columns * heads))
        calls.prepare(calls.table_of(sync), kind, form, x, x_kind, k, shared + c * stride, room)
    barrier(sync, nth)
    return shared


@jit
def _column(record: int, m: int, p: int, q: int) -> int:
    """The address of a column of activations."""
    offset = m * word(record, NB1 + 1) + p * word(record, NB1 + 2) + q * word(record, NB1 + 3)
    return word(record, SRC + 1) + offset


@jit
def _by_tiles(record: int, tid: int, nth: int, scratch: int, shared: int, sync: int) -> None:
    kind, k, rows = word(record, TYPE0), word(record, NE0), word(record, NE0 + 1)
    columns, heads, outer = word(record, NE1 + 1), word(record, NE1 + 2), word(record, NE1 + 3)
    ratio2, ratio3 = heads // word(record, NE0 + 2), outer // word(record, NE0 + 3)
    table, batch = calls.table_of(sync), packed_bytes(kind, k, columns)
    for i in range(heads * outer):
        x = _column(record, 0, i % heads, i // heads)
        x_kind, x_step, place = word(record, TYPE1), word(record, NB1 + 1), shared + i * batch
        pack(table, kind, tid, nth, x, x_kind, x_step, columns, 0, k, place, scratch)
    barrier(sync, nth)
    configure(scratch)
    most = panel_rows(kind, k, rows * heads * outer, nth)
    panels = (rows + most - 1) // most
    row, step = word(record, NB0 + 1), word(record, NB_DST + 1)
    for item in each_item(record, panels * heads * outer, 1):
        first, i = item % panels * most, item // panels
        p, q = i % heads, i // heads
        w = word(record, SRC) + p // ratio2 * word(record, NB0 + 2) + q // ratio3 * word(record, NB0 + 3)
        w += first * row
        out = word(record, DST) + p * word(record, NB_DST + 2) + q * word(record, NB_DST + 3) + 4 * first
        some = min(most, rows - first)
        multiply_panel(table, kind, w, row, some, k, shared + i * batch, columns, out, step, scratch)
    release()
