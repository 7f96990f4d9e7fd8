"""Rules of operations on places: ramps, padding, bands of matrices, windows, pooling."""

from collections.abc import Callable

from drover.ggml.ops import Op, Tri, float_params, int_params
from drover.worker.devices.cpu import record, windows
from drover.worker.devices.cpu.draft import FLOATS, Draft, apart, bits, first, in_place, parameters, rows_of_f32, source
from drover.worker.devices.device import Node, Operand

_LOWEST = {record.F32: 0xFF800000, record.F16: 0xFC00FC00, record.BF16: 0xFF80FF80}
"""The bits of −∞, in four bytes."""
_EVERY = 1 << 32
"""Beyond every row."""

_BANDS = {
    Tri.UPPER_DIAG: (1, 0, 0, _EVERY),
    Tri.UPPER: (1, 1, 0, _EVERY),
    Tri.LOWER_DIAG: (0, 0, 1, 1),
    Tri.LOWER: (0, 0, 1, 0),
}
"""Slope and start, slope and end of what is kept of a row (see `windows.band`)."""


def _arange(node: Node, threads: int) -> Draft | None:
    start, _, step = float_params(node.params)[:3]
    return Draft(record.ARANGE, parameters(bits(start), bits(step))) if rows_of_f32(node.dst) else None


def _pad(node: Node, threads: int) -> Draft | None:
    x, size = first(node), node.dst.type.type_size
    if not (_whole(x) and _whole(node.dst)) or not apart(node):
        return None
    pads = int_params(node.params)
    return Draft(record.PAD, parameters(pads[0], pads[2], pads[4], pads[6], int(pads[8] != 0), size))


def _whole(operand: Operand) -> bool:
    """Whether elements of a row follow one another."""
    return not operand.type.quantized and operand.nb[0] == operand.type.type_size


def _band(node: Node, kept: tuple[int, int, int, int], others: int) -> Draft | None:
    if first(node).type.id not in FLOATS or not (_whole(first(node)) and _whole(node.dst)):
        return None
    if not (in_place(node) or apart(node)):
        return None
    return Draft(record.BAND, parameters(*kept, others, node.dst.type.type_size))


def _tri(node: Node, threads: int) -> Draft | None:
    return _band(node, _BANDS[Tri(int_params(node.params)[0])], 0)


def _diag(node: Node, threads: int) -> Draft | None:
    draft = _band(node, (1, 0, 1, 1), 0) if apart(node) else None
    if draft is not None:
        draft.words[record.NB0 + 1] = 0  # every row of the result comes from the one there is
    return draft


def _diag_mask(infinite: bool) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        others = _LOWEST.get(node.dst.type.id, 0) if infinite else 0
        return _band(node, (0, 0, 1, int_params(node.params)[0] + 1), others)

    return rule


def _window(added: bool) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        a, b, dst = first(node), source(node, 1), node.dst
        if b is None or not (_whole(a) and _whole(dst) and (added or _whole(b))) or (added and a.type.id not in FLOATS):
            return None
        strides, size = int_params(node.params)[:4], dst.type.type_size
        reach = b.ne[0] * size
        for extent, stride in zip(b.ne[1:], strides, strict=False):
            if extent > 1 and stride < reach:  # rows of the window share bytes: one after another, then
                return None
            reach += (extent - 1) * stride
        if not (in_place(node) or apart(node, 0)) or not apart(node, 1):
            return None
        return Draft(record.WINDOW, parameters(int(added), size, *strides))

    return rule


def _pool_1d(node: Node, threads: int) -> Draft | None:
    kind, kernel, step, padding = int_params(node.params)[:4]
    return _pool(node, windows.MEAN_INSIDE if kind else windows.LARGEST, kernel, 1, step, 1, padding, 0)


def _pool_2d(node: Node, threads: int) -> Draft | None:
    kind, *window = int_params(node.params)[:7]
    return _pool(node, windows.MEAN if kind else windows.LARGEST, *window)


def _pool(node: Node, *words: int) -> Draft | None:
    if first(node).type.id != record.F32 or node.dst.type.id != record.F32 or not apart(node):
        return None
    return Draft(record.POOL, parameters(*words))


RULES: dict[Op, Callable[[Node, int], Draft | None]] = {
    Op.ARANGE: _arange,
    Op.PAD: _pad,
    Op.TRI: _tri,
    Op.DIAG: _diag,
    Op.DIAG_MASK_INF: _diag_mask(infinite=True),
    Op.DIAG_MASK_ZERO: _diag_mask(infinite=False),
    Op.SET: _window(added=False),
    Op.ACC: _window(added=True),
    Op.POOL_1D: _pool_1d,
    Op.POOL_2D: _pool_2d,
}
