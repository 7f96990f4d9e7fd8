"""Operations that move, gather, join and fill (docs/protocol.md section 6.3)."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from drover.ggml.ops import Op, Tri
from drover.worker.devices.reference.arrays import Array, Result, Work, decode, encode, load, tile, view


def copy(work: Work) -> Result:
    """Elements in row-major order, converted; blocks of the same type move untouched."""
    source = work.operand(0)
    if source.type == work.dst.type:
        blocks, target = view(source).copy(), view(work.dst)
        target[...] = blocks.reshape(target.shape)
        return None
    return load(source)


def concat(work: Work) -> Result:
    """Join along a dimension, whatever the type."""
    target = view(work.dst)
    target[...] = np.concatenate((view(work.operand(0)), view(work.operand(1))), axis=3 - work.ints[0])
    return None


def repeat(work: Work) -> Result:
    """Tile; elements keep their bits."""
    target = view(work.dst)
    target[...] = tile(view(work.operand(0)), target.shape)
    return None


def repeat_back(work: Work) -> Result:
    """Add the tiles up."""
    a, shape = work.f64(0), work.dst.ne[::-1]
    split = [part for n, s in zip(a.shape, shape, strict=True) for part in (n // s, s)]
    return a.reshape(split).sum(axis=(0, 2, 4, 6))


def get_rows(work: Work) -> Result:
    """dst(:,i,p,q) = a(:, ids(i,p,q), p, q)."""
    source = work.operand(0)
    ids = work.indices(1, source.ne[1])[0]
    q, p = np.ogrid[: ids.shape[0], : ids.shape[1]]
    return decode(source.type, view(source)[q[..., None], p[..., None], ids])


def set_rows(work: Work) -> Result:
    """dst(:, idx(i, p mod P', q mod Q'), p, q) = rows(:,i,p,q); all other rows stay."""
    rows = work.f32(0)
    if rows.size == 0:
        return None
    ids = work.indices(1, work.dst.ne[1])[0]
    ids = tile(ids, rows.shape[:3])
    q, p = np.ogrid[: ids.shape[0], : ids.shape[1]]
    view(work.dst)[q[..., None], p[..., None], ids] = encode(work.dst.type, rows)
    return None


def pad(work: Work) -> Result:
    """Zeros, or the other end, around src0."""
    a = view(work.operand(0)).copy()
    widths = [(work.ints[6 - 2 * axis], work.ints[7 - 2 * axis]) for axis in range(4)]
    if not work.ints[8]:
        return np.pad(a, widths)
    for axis, (before, after) in enumerate(widths):
        a = a.take(np.arange(-before, a.shape[axis] + after) % a.shape[axis], axis=axis)
    return a


def pad_reflect(work: Work) -> Result:
    """Mirror the row at both ends without repeating its edge."""
    return np.pad(work.f32(0), ((0, 0), (0, 0), (0, 0), work.ints[:2]), mode="reflect")


def roll(work: Work) -> Result:
    """dst((i+shift) mod ne) = src(i)."""
    return np.roll(work.f32(0), work.ints[3::-1], axis=(0, 1, 2, 3))


def _window(work: Work) -> tuple[Array, Array]:
    """src0 copied into the result; then the window of the result that src1 covers, and src1's values."""
    values = load(work.operand(1))
    copy(work)
    nb1, nb2, nb3, offset = work.ints[:4]
    nb = (work.dst.type.type_size, nb1, nb2, nb3)
    return view(replace(work.dst, ne=work.operand(1).ne, nb=nb), offset), values


def set_window(work: Work) -> Result:
    """src0 with a window overwritten by src1."""
    window, values = _window(work)
    window[...] = encode(work.dst.type, values)
    return None


def add_window(work: Work) -> Result:
    """src0 with src1 added to a window."""
    window, values = _window(work)
    window[...] = encode(work.dst.type, decode(work.dst.type, window) + values)
    return None


def arange(work: Work) -> Result:
    """start, start + step, …"""
    start, _, step = work.floats[:3]
    return start + step * np.arange(work.dst.ne[0])


def fill(work: Work) -> Result:
    """One constant everywhere."""
    return np.full(work.dst.ne[::-1], work.floats[0], np.float32)


def tri(work: Work) -> Result:
    """Keep a triangle of each matrix; rows are dimension 1."""
    a = work.f32(0)
    row, column = np.ogrid[: a.shape[2], : a.shape[3]]
    keep = {
        Tri.UPPER_DIAG: column >= row,
        Tri.UPPER: column > row,
        Tri.LOWER_DIAG: column <= row,
        Tri.LOWER: column < row,
    }[Tri(work.ints[0])]
    return np.where(keep, a, np.float32(0))


def diag(work: Work) -> Result:
    """Rows onto the diagonals of zero matrices."""
    a = work.f32(0)
    return np.where(np.eye(a.shape[3], dtype=bool), a, np.float32(0))


def _diag_mask(value: float) -> Callable[[Work], Result]:
    """Elements right of the diagonal, `n_past` further on, become `value`."""

    def function(work: Work) -> Result:
        a = work.f32(0)
        row, column = np.ogrid[: a.shape[2], : a.shape[3]]
        return np.where(column > work.ints[0] + row, np.float32(value), a)

    return function


def rel_pos(work: Work) -> Result:
    """dst(:, i1, i2) = a(:, k - 1 - i1 + i2)."""
    k = work.dst.ne[1]
    i2, i1 = np.ogrid[:k, :k]
    return load(work.operand(0))[0, 0][k - 1 - i1 + i2]


FUNCTIONS: dict[Op, Callable[[Work], Result]] = {
    Op.DUP: copy,
    Op.CPY: copy,
    Op.CONT: copy,
    Op.CONCAT: concat,
    Op.REPEAT: repeat,
    Op.REPEAT_BACK: repeat_back,
    Op.GET_ROWS: get_rows,
    Op.SET_ROWS: set_rows,
    Op.PAD: pad,
    Op.PAD_REFLECT_1D: pad_reflect,
    Op.ROLL: roll,
    Op.SET: set_window,
    Op.ACC: add_window,
    Op.ARANGE: arange,
    Op.FILL: fill,
    Op.TRI: tri,
    Op.DIAG: diag,
    Op.DIAG_MASK_INF: _diag_mask(-np.inf),
    Op.DIAG_MASK_ZERO: _diag_mask(0.0),
    Op.GET_REL_POS: rel_pos,
}
