"""Convolutions, pooling, scaling and windows (docs/protocol.md section 6.8)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drover.ggml.ops import Op
from drover.worker.devices.reference.arrays import Array, Doubles, Result, Work, load, require_room

Axis = tuple[int, int, int, int, int]
"""Places of the kernel, its size, stride, padding and dilation along one axis; fastest dimension first."""

ALIGN_CORNERS = 256
ANTIALIAS = 512


def patches(image: Array, axes: Sequence[Axis]) -> Array:
    """Every window of the trailing dimensions: (…, places of the outermost axis …, kernel of the outermost axis …).

    Zeros outside the image. The padding is never laid out: there may be any number of it.
    """
    first = image.ndim - len(axes)
    if 0 in image.shape[first:]:
        image = np.zeros((*image.shape[:first], *(max(1, size) for size in image.shape[first:])), image.dtype)
    require_room(math.prod(image.shape[:first]) * math.prod(axis[0] * axis[1] for axis in axes))
    where: list[Any] = [...]
    outside: list[Any] = []
    for n, (size, axis) in enumerate(zip(image.shape[first:], axes[::-1], strict=True)):
        places, kernel, stride, pad, dilation = axis
        taps = np.arange(places)[:, None] * stride + np.arange(kernel) * dilation - pad
        taps = np.expand_dims(taps, [k for k in range(2 * len(axes)) if k not in (n, n + len(axes))])
        where.append(np.clip(taps, 0, size - 1))
        outside.append((taps < 0) | (taps >= size))
    found: Array = image[tuple(where)]
    for missed in outside:
        found[..., np.broadcast_to(missed, found.shape[first:])] = 0
    return found


def convolve(image: Doubles, kernel: Doubles, axes: Sequence[Axis]) -> Doubles:
    """The image shifted to each place of the kernel, times what stands there, summed up: (images, outputs, places).

    Nor is padding laid out here, and no window.
    """
    out: Doubles = np.zeros((kernel.shape[0], image.shape[0], *(axis[0] for axis in axes[::-1])))
    for tap in np.ndindex(kernel.shape[2:]):
        seen: list[Any] = [...]
        met: list[Any] = [...]
        for i, size, (places, _, stride, pad, dilation) in zip(tap, image.shape[2:], axes[::-1], strict=True):
            start = i * dilation - pad
            first, last = max(0, -(start // stride)), min(places, -((start - size) // stride))
            seen.append(slice(start + first * stride, max(0, start + last * stride), stride))
            met.append(slice(first, max(first, last)))
        weights: Doubles = kernel[:, :, *tap]
        out[tuple(met)] += np.tensordot(weights, image[tuple(seen)], axes=(1, 1))
    return out.swapaxes(0, 1)


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
    return convolve(work.f64(1), work.f64(0), _axes(work, work.dst.ne[:2], work.operand(0).ne[:2]))


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
    return convolve(volume, kernel, _axes(work, work.dst.ne[:3], work.operand(0).ne[:3]))


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
    out = np.zeros((channels, work.dst.ne[0]))
    for t in range(col.shape[0]):
        at = t * stride - padding
        first, last = max(0, -at), min(col.shape[2], out.shape[1] - at)
        if first < last:
            out[:, at + first : at + last] += col[t, :, first:last]
    return out


def pool_1d(work: Work) -> Result:
    """Maximum, or average over what lies inside, of windows over dimension 0."""
    kind, k, s, p = work.ints[:4]
    x, places = work.f64(0), work.dst.ne[0]
    if kind == 0:
        return _pooled(x, 3, _windows(x.shape[3], places, k, s, p), np.max, -np.inf)
    windows = _windows(x.shape[3], places, k, s, p)
    inside = np.array([max(1, window.stop - window.start) for window in windows])
    return _pooled(x, 3, windows, np.sum, 0.0) / inside


def pool_2d(work: Work) -> Result:
    """Maximum, or average over the whole kernel with zeros outside, of windows over dimensions 0 and 1."""
    kind, k0, k1, s0, s1, p0, p1 = work.ints[:7]
    x, (across, down) = work.f64(0), work.dst.ne[:2]
    columns, rows = _windows(x.shape[3], across, k0, s0, p0), _windows(x.shape[2], down, k1, s1, p1)
    if kind == 0:
        return _pooled(_pooled(x, 3, columns, np.max, -np.inf), 2, rows, np.max, -np.inf)
    return _pooled(_pooled(x, 3, columns, np.sum, 0.0), 2, rows, np.sum, 0.0) / (k0 * k1)


def _windows(size: int, places: int, kernel: int, stride: int, padding: int) -> list[slice]:
    """What of an axis of `size` elements each window covers."""
    starts = (i * stride - padding for i in range(places))
    return [slice(min(max(at, 0), size), min(max(at + kernel, 0), size)) for at in starts]


def _pooled(x: Doubles, axis: int, windows: Sequence[slice], reduce: Callable[..., Any], empty: float) -> Doubles:
    """One number for each window of an axis."""
    lead = (slice(None),) * axis
    return np.stack([reduce(x[(*lead, window)], axis=axis, initial=empty) for window in windows], axis=axis)


def upscale(work: Work) -> Result:
    """Resize: dimensions 0 and 1 by the mode, 2 and 3 by the nearest element."""
    a, out = work.f64(0), work.dst.ne
    mode = work.ints[0] & 255
    for dim in range(4):
        axis, old, new = 3 - dim, a.shape[3 - dim], out[dim]
        if mode == 0 or dim >= 2:
            a = a.take(_nearest(old, new), axis=axis)
        else:
            a = _resampled(a, axis, new, mode, work.ints[0])
    return a


def _nearest(old: int, new: int) -> Array:
    return np.minimum((np.arange(new) / (new / old)).astype(np.int64), old - 1)


def _resampled(a: Doubles, axis: int, new: int, mode: int, flags: int) -> Doubles:
    """An axis in another size: each new element is a few old ones, each with its share."""
    old = a.shape[axis]
    aligned = bool(flags & ALIGN_CORNERS)
    factor = (new - 1) / (old - 1) if aligned and new > 1 and old > 1 else new / old
    offset = 0.0 if aligned else 0.5
    at = (np.arange(new) + offset) / factor - offset
    whole = np.floor(at)
    smooth = mode == 1 and bool(flags & ANTIALIAS)
    support = max(1.0, 1 / factor) if smooth else 1.0
    reach = math.ceil(support)
    along = [-1 if k == axis else 1 for k in range(a.ndim)]
    total, found = np.zeros(new), np.zeros([new if k == axis else n for k, n in enumerate(a.shape)])
    for shift in range(-reach, reach + 2):
        distance = (whole + shift - at) / support
        share = _triangle(distance) if mode == 1 else _cubic(distance)
        place = np.clip(whole + shift, 0, old - 1)
        if smooth:
            share = np.where(place == whole + shift, share, 0)
        total += share
        found += share.reshape(along) * a.take(place.astype(np.int64), axis=axis)
    return found / total.reshape(along) if smooth else found


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
