"""Rules of convolutions, pooling, scaling and windows (docs/protocol.md section 6.8)."""

from collections.abc import Callable

from drover.ggml.ops import Op
from drover.ggml.rules.call import FLOATS, ONLY_F32, Call, elements
from drover.ggml.types import F16, F32

KERNEL = frozenset({F16, F32})


def slots(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """How many places a convolution's kernel has along one axis.

    The quotient is cut toward zero: a kernel that only just does not fit still has one place, partly outside.
    """
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    return max(0, (room // stride if room >= 0 else -(-room // stride)) + 1)


def windows(size: int, kernel: int, stride: int, padding: int) -> int:
    """How many places a pool's window has along one axis; 0 if it does not fit."""
    room = size + 2 * padding - kernel
    return room // stride + 1 if room >= 0 else 0


def _geometry(call: Call, axes: int) -> list[tuple[int, int, int]]:
    """(stride, padding, dilation) per axis from the parameters, where all strides stand first, then paddings."""
    rows = [(call.ints[k], call.ints[axes + k], call.ints[2 * axes + k]) for k in range(axes)]
    call.require(all(s > 0 and p >= 0 and d > 0 for s, p, d in rows), "stride or dilation is not positive")
    return rows


def _places(call: Call, axes: int, image: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Output extents of a convolution over `axes` axes."""
    geometry = _geometry(call, axes)
    return tuple(slots(n, k, s, p, d) for n, k, (s, p, d) in zip(image, kernel, geometry, strict=True))


def _im2col(call: Call) -> None:
    kernel, image, dst = call.source(0), call.typed(1, FLOATS), call.result(KERNEL)
    if call.ints[6]:
        out = _places(call, 2, image.ne[:2], kernel.ne[:2])
        call.require(kernel.ne[2] == image.ne[2], "channels differ")
        wanted = (kernel.ne[0] * kernel.ne[1] * image.ne[2], out[0], out[1], image.ne[3])
    else:
        call.require(call.ints[0] > 0 and call.ints[2] >= 0 and call.ints[4] > 0, "stride or dilation is not positive")
        call.require(kernel.ne[1] == image.ne[1] and image.ne[3] == 1, "channels differ")
        width = slots(image.ne[0], kernel.ne[0], call.ints[0], call.ints[2], call.ints[4])
        wanted = (kernel.ne[0] * image.ne[1], width, image.ne[2], 1)
    call.require(dst.ne == wanted, f"the result is not {list(wanted)}")


def _im2col_3d(call: Call) -> None:
    kernel, image, dst = call.source(0), call.typed(1, FLOATS), call.result(KERNEL)
    channels = call.ints[9]
    call.require(channels > 0 and image.ne[3] % channels == 0, "channels do not divide the images")
    out = _places(call, 3, image.ne[:3], kernel.ne[:3])
    column = channels * kernel.ne[0] * kernel.ne[1] * kernel.ne[2]
    wanted = (column, out[0], out[1], out[2] * (image.ne[3] // channels))
    call.require(dst.ne == wanted, f"the result is not {list(wanted)}")


def _conv_2d(call: Call) -> None:
    kernel, image, dst = (call.typed(0, KERNEL), call.typed(1, ONLY_F32), call.result(ONLY_F32))
    out = _places(call, 2, image.ne[:2], kernel.ne[:2])
    call.require(kernel.ne[2] == image.ne[2], "channels differ")
    call.require(dst.ne == (*out, kernel.ne[3], image.ne[3]), "the result is not one image per kernel")


def _conv_2d_dw(call: Call) -> None:
    kernel, image, dst = (call.typed(0, KERNEL), call.typed(1, ONLY_F32), call.result(ONLY_F32))
    out = _places(call, 2, image.ne[:2], kernel.ne[:2])
    call.require(kernel.ne[2] == 1 and kernel.ne[3] == image.ne[2], "channels differ")
    call.require(dst.ne == (*out, image.ne[2], image.ne[3]), "the result is not one image per channel")


def _conv_3d(call: Call) -> None:
    kernel, image, dst = (call.typed(0, KERNEL), call.typed(1, ONLY_F32), call.result(ONLY_F32))
    inputs, images, outputs = call.ints[9:12]
    out = _places(call, 3, image.ne[:3], kernel.ne[:3])
    call.require(min(inputs, images, outputs) > 0, "no channels")
    call.require(kernel.ne[3] == inputs * outputs and image.ne[3] == inputs * images, "channels differ")
    call.require(dst.ne == (*out, outputs * images), "the result is not one volume per kernel")


def _conv_transpose_1d(call: Call) -> None:
    kernel, x, dst = (call.typed(0, KERNEL), call.typed(1, ONLY_F32), call.result(ONLY_F32))
    stride = call.ints[0]
    call.require(stride > 0 and kernel.ne[2] == x.ne[1] and kernel.ne[3] == 1, "stride or channels do not fit")
    call.require(x.ne[2:] == (1, 1), "more than one sequence")
    call.require(dst.ne == ((x.ne[0] - 1) * stride + kernel.ne[0], kernel.ne[1], 1, 1), "the result has another length")


def _conv_transpose_2d(call: Call) -> None:
    kernel, x, dst = (call.typed(0, KERNEL), call.typed(1, ONLY_F32), call.result(ONLY_F32))
    stride = call.ints[0]
    call.require(stride > 0 and kernel.ne[3] == x.ne[2], "stride or channels do not fit")
    out = tuple((x.ne[k] - 1) * stride + kernel.ne[k] for k in range(2))
    call.require(dst.ne == (*out, kernel.ne[2], x.ne[3]), "the result has another size")


def _col2im(call: Call) -> None:
    col, dst = call.typed(0, FLOATS), call.result(FLOATS)
    stride, channels, padding = call.ints[:3]
    call.require(stride > 0 and channels > 0 and padding >= 0, "stride or channels are not positive")
    call.require(col.ne[0] % channels == 0 and col.ne[2:] == (1, 1), "columns do not hold whole kernels")
    length = (col.ne[1] - 1) * stride + col.ne[0] // channels - 2 * padding
    call.require(dst.ne == (length, channels, 1, 1), "the result has another length")


def _pool_1d(call: Call) -> None:
    a, dst = call.typed(0, FLOATS), call.result(FLOATS)
    kind, kernel, stride, padding = call.ints[:4]
    call.require(kind in (0, 1) and kernel > 0 and stride > 0 and padding >= 0, "bad window")
    call.require(dst.ne == (windows(a.ne[0], kernel, stride, padding), *a.ne[1:]), "the result has another length")


def _pool_2d(call: Call) -> None:
    a, dst = call.typed(0, FLOATS), call.result(FLOATS)
    kind, k0, k1, s0, s1, p0, p1 = call.ints[:7]
    call.require(kind in (0, 1) and min(k0, k1, s0, s1) > 0 and min(p0, p1) >= 0, "bad window")
    out = (windows(a.ne[0], k0, s0, p0), windows(a.ne[1], k1, s1, p1))
    call.require(dst.ne == (*out, *a.ne[2:]), "the result has another size")


def _upscale(call: Call) -> None:
    a = call.typed(0, FLOATS)
    call.result(FLOATS)
    call.require(elements(a) > 0, "nothing to scale")
    call.require(call.ints[0] & 255 in (0, 1, 2), f"no mode {call.ints[0] & 255}")


def _timestep(call: Call) -> None:
    a, dst = call.typed(0, ONLY_F32), call.result(ONLY_F32)
    call.require(call.ints[1] > 0, f"a period of {call.ints[1]}")
    call.require(call.ints[0] >= 2 and dst.ne == (call.ints[0], a.ne[0], 1, 1), "not one embedding per step")


def _win_part(call: Call) -> None:
    a, dst = call.typed(0, ONLY_F32), call.result(ONLY_F32)
    across, down, side = call.ints[:3]
    call.require(min(across, down, side) > 0 and a.ne[3] == 1, "bad window")
    call.require(across == -(-a.ne[1] // side) and down == -(-a.ne[2] // side), "windows do not cover src0")
    call.require(dst.ne == (a.ne[0], side, side, across * down), "the result is not one window per place")


def _win_unpart(call: Call) -> None:
    a, dst, side = call.typed(0, ONLY_F32), call.result(ONLY_F32), call.ints[0]
    call.require(side > 0 and a.ne[1:3] == (side, side) and dst.ne[3] == 1, "bad window")
    count = -(-dst.ne[1] // side) * -(-dst.ne[2] // side)
    call.require(a.ne[0] == dst.ne[0] and a.ne[3] == count, "windows do not cover the result")


def _add_rel_pos(call: Call) -> None:
    a, width, height = call.typed(0, ONLY_F32), call.typed(1, ONLY_F32), call.typed(2, ONLY_F32)
    call.same_shape(a, call.result(ONLY_F32))
    call.same_shape(width, height)
    n, rows, columns, more = width.ne
    call.require(a.ne == (n * n, rows * columns, more, 1), "src0 is not [n·n, h·w, b] where src1 is [n, w, h, b]")


RULES: dict[Op, Callable[[Call], None]] = {
    Op.IM2COL: _im2col,
    Op.IM2COL_3D: _im2col_3d,
    Op.CONV_2D: _conv_2d,
    Op.CONV_2D_DW: _conv_2d_dw,
    Op.CONV_3D: _conv_3d,
    Op.CONV_TRANSPOSE_1D: _conv_transpose_1d,
    Op.CONV_TRANSPOSE_2D: _conv_transpose_2d,
    Op.COL2IM_1D: _col2im,
    Op.POOL_1D: _pool_1d,
    Op.POOL_2D: _pool_2d,
    Op.UPSCALE: _upscale,
    Op.TIMESTEP_EMBEDDING: _timestep,
    Op.WIN_PART: _win_part,
    Op.ADD_REL_POS: _add_rel_pos,
    Op.WIN_UNPART: _win_unpart,
}
