"""Convolutions, pooling, scaling and windows (docs/protocol.md section 6.8)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drover.ggml.ops import Op
from drover.worker.devices.reference.arrays import Array, Doubles, Result, Work, load

Axis = tuple[int, int, int, int, int]
"""Places of the kernel, its size, stride, padding and dilation along one axis; fastest dimension first."""

ALIGN_CORNERS = 256
ANTIALIAS = 512


def patches(image: Array, axes: Sequence[Axis], padding: float = 0.0) -> Array:
    """Every window of the trailing dimensions: (…, places of the outermost axis …, kernel of the outermost axis …)."""
    first = image.ndim - len(axes)
    pads = [(0, 0)] * first
    where: list[Any] = [...]
    for n, (size, axis) in enumerate(zip(image.shape[first:], axes[::-1], strict=True)):
        places, kernel, stride, pad, dilation = axis
        taps = np.arange(places)[:, None] * stride + np.arange(kernel) * dilation
        pads.append((pad, max(pad, int(taps.max(initial=0)) + 1 - size - pad)))
        where.append(np.expand_dims(taps, [k for k in range(2 * len(axes)) if k not in (n, n + len(axes))]))
    found: Array = np.pad(image, pads, constant_values=padding)[tuple(where)]
    return found


def _axes(work: Work, places: Sequence[int], kernel: Sequence[int]) -> list[Axis]:
    """Axes of a convolution whose parameters hold all strides, then all paddings, then all dilations."""
    n, p = len(kernel), work.ints
    return [(places[i], kernel[i], p[i], p[n + i], p[2 * n + i]) for i in range(n)]


def im2col(work: Work) -> Result:
    """Windows of the image as columns: kx fastest, then ky, then channel."""
    kernel, image = work.operand(0), work.f32(1)
    if work.ints[6]:
        found = patches(image, _axes(work, work.dst.ne[1:3], kernel.ne[:2]))
        return found.transpose(0, 2, 3, 1, 4, 5)
    found = patches(image[0], [(work.dst.ne[1], kernel.ne[0], work.ints[0], work.ints[2], work.ints[4])])
    return found.transpose(0, 2, 1, 3)


def im2col_3d(work: Work) -> Result:
    """Windows of a volume as columns: kx fastest, then ky, kz, channel."""
    kernel, image = work.operand(0), work.f32(1)
    channels = work.ints[9]
    volume = image.reshape(image.shape[0] // channels, channels, *image.shape[1:])
    places = (work.dst.ne[1], work.dst.ne[2], work.dst.ne[3] // volume.shape[0])
    return patches(volume, _axes(work, places, kernel.ne[:3])).transpose(0, 2, 3, 4, 1, 5, 6, 7)


def conv_2d(work: Work) -> Result:
    """Σ over channels and kernel of image·kernel."""
    kernel = work.f64(0)
    found = patches(work.f64(1), _axes(work, work.dst.ne[:2], work.operand(0).ne[:2]))
    return np.einsum("ncyxhw,ochw->noyx", found, kernel)


def conv_2d_dw(work: Work) -> Result:
    """Each channel with its own kernel."""
    kernel = work.f64(0)[:, 0]
    return np.einsum(
        "ncyxhw,chw->ncyx", patches(work.f64(1), _axes(work, work.dst.ne[:2], work.operand(0).ne[:2])), kernel
    )


def conv_3d(work: Work) -> Result:
    """Volumes: dimension 3 holds channels within images, and inputs within outputs."""
    inputs, images, outputs = work.ints[9:12]
    kernel, volume = work.f64(0), work.f64(1)
    kernel = kernel.reshape(outputs, inputs, *kernel.shape[1:])
    volume = volume.reshape(images, inputs, *volume.shape[1:])
    return np.einsum(
        "nczyxdhw,ocdhw->nozyx", patches(volume, _axes(work, work.dst.ne[:3], work.operand(0).ne[:3])), kernel
    )


def conv_transpose_1d(work: Work) -> Result:
    """Every input lays its kernel over the output, `stride` apart."""
    kernel, x, stride = work.f64(0)[0], work.f64(1)[0, 0], work.ints[0]
    out = np.zeros((kernel.shape[1], work.dst.ne[0]))
    for t in range(x.shape[1]):
        out[:, t * stride : t * stride + kernel.shape[2]] += np.einsum("c,cok->ok", x[:, t], kernel)
    return out


def conv_transpose_2d(work: Work) -> Result:
    """The same over two axes."""
    kernel, x, stride = work.f64(0), work.f64(1), work.ints[0]
    out = np.zeros(work.dst.ne[::-1])
    height, width = kernel.shape[2:]
    for row, column in np.ndindex(x.shape[2:]):
        window = out[:, :, row * stride : row * stride + height, column * stride : column * stride + width]
        window += np.einsum("nc,cohw->nohw", x[:, :, row, column], kernel)
    return out


def col2im(work: Work) -> Result:
    """Columns added up where they overlap, the padding cut off."""
    stride, channels, padding = work.ints[:3]
    col = work.f64(0)[0, 0].reshape(-1, channels, work.operand(0).ne[0] // channels)
    out = np.zeros((channels, (col.shape[0] - 1) * stride + col.shape[2]))
    for t in range(col.shape[0]):
        out[:, t * stride : t * stride + col.shape[2]] += col[t]
    return out[:, padding : out.shape[1] - padding]


def pool_1d(work: Work) -> Result:
    """Maximum, or average over what lies inside, of windows over dimension 0."""
    kind, k, s, p = work.ints[:4]
    x, axes = work.f64(0), [(work.dst.ne[0], k, s, p, 1)]
    if kind == 0:
        return patches(x, axes, padding=-np.inf).max(axis=-1)
    inside = patches(np.ones_like(x), axes).sum(axis=-1)
    return patches(x, axes).sum(axis=-1) / np.maximum(inside, 1)


def pool_2d(work: Work) -> Result:
    """Maximum, or average over the whole kernel with zeros outside, of windows over dimensions 0 and 1."""
    kind, k0, k1, s0, s1, p0, p1 = work.ints[:7]
    x, axes = work.f64(0), [(work.dst.ne[0], k0, s0, p0, 1), (work.dst.ne[1], k1, s1, p1, 1)]
    if kind == 0:
        return patches(x, axes, padding=-np.inf).max(axis=(-2, -1))
    return patches(x, axes).mean(axis=(-2, -1))


def upscale(work: Work) -> Result:
    """Resize: dimensions 0 and 1 by the mode, 2 and 3 by the nearest element."""
    a, out = work.f64(0), work.dst.ne
    mode = work.ints[0] & 255
    for dim in range(4):
        axis, old, new = 3 - dim, a.shape[3 - dim], out[dim]
        if mode == 0 or dim >= 2:
            a = a.take(_nearest(old, new), axis=axis)
        else:
            weights = _weights(old, new, mode, work.ints[0])
            a = np.moveaxis(np.tensordot(weights, a, axes=(1, axis)), 0, axis)
    return a


def _nearest(old: int, new: int) -> Array:
    return np.minimum((np.arange(new) / (new / old)).astype(np.int64), old - 1)


def _weights(old: int, new: int, mode: int, flags: int) -> Doubles:
    """How much each old element is in each new one: (new, old)."""
    aligned = bool(flags & ALIGN_CORNERS)
    factor = (new - 1) / (old - 1) if aligned and new > 1 and old > 1 else new / old
    offset = 0.0 if aligned else 0.5
    at = (np.arange(new) + offset) / factor - offset
    weights = np.zeros((new, old))
    if mode == 1 and flags & ANTIALIAS:
        support = max(1.0, 1 / factor)
        weights = np.maximum(0, 1 - np.abs(np.arange(old) - at[:, None]) / support)
        weights /= weights.sum(axis=1, keepdims=True)
        return weights
    whole = np.floor(at)
    part = at - whole
    for shift in range(-1, 3):
        share = _triangle(shift - part) if mode == 1 else _cubic(shift - part)
        place = np.clip(whole + shift, 0, old - 1).astype(np.int64)
        np.add.at(weights, (np.arange(new), place), share)
    return weights


def _triangle(x: Doubles) -> Doubles:
    share: Doubles = np.maximum(0, 1 - np.abs(x))
    return share


def _cubic(x: Doubles, a: float = -0.75) -> Doubles:
    """Keys' kernel."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def timestep_embedding(work: Work) -> Result:
    """cos and sin of t at falling frequencies; an odd last channel is 0."""
    dim, period = work.ints[:2]
    half = dim // 2
    angle = work.f64(0).reshape(-1, 1) * np.exp(-math.log(period) * np.arange(half) / half)
    return np.concatenate((np.cos(angle), np.sin(angle), np.zeros((len(angle), dim % 2))), axis=1)


def win_part(work: Work) -> Result:
    """Square windows, the last ones filled up with zeros."""
    across, down, side = work.ints[:3]
    a = work.f32(0)[0]
    a = np.pad(a, ((0, down * side - a.shape[0]), (0, across * side - a.shape[1]), (0, 0)))
    return a.reshape(down, side, across, side, -1).swapaxes(1, 2)


def win_unpart(work: Work) -> Result:
    """Square windows put together again and cut to size."""
    side, width, height = work.ints[0], work.dst.ne[1], work.dst.ne[2]
    across, down = -(-width // side), -(-height // side)
    a = load(work.operand(0)).reshape(down, across, side, side, -1).swapaxes(1, 2)
    return a.reshape(down * side, across * side, -1)[:height, :width]


def add_rel_pos(work: Work) -> Result:
    """Each row of n·n numbers, as a square of rows y and columns x, plus src1 by x and src2 by y."""
    a, width, height = work.f32(0), work.f32(1), work.f32(2)
    n = width.shape[-1]
    squares = a.reshape(-1, n, n)
    return squares + width.reshape(-1, 1, n) + height.reshape(-1, n, 1)


FUNCTIONS: dict[Op, Callable[[Work], Result]] = {
    Op.IM2COL: im2col,
    Op.IM2COL_3D: im2col_3d,
    Op.CONV_2D: conv_2d,
    Op.CONV_2D_DW: conv_2d_dw,
    Op.CONV_3D: conv_3d,
    Op.CONV_TRANSPOSE_1D: conv_transpose_1d,
    Op.CONV_TRANSPOSE_2D: conv_transpose_2d,
    Op.COL2IM_1D: col2im,
    Op.POOL_1D: pool_1d,
    Op.POOL_2D: pool_2d,
    Op.UPSCALE: upscale,
    Op.TIMESTEP_EMBEDDING: timestep_embedding,
    Op.WIN_PART: win_part,
    Op.ADD_REL_POS: add_rel_pos,
    Op.WIN_UNPART: win_unpart,
}
