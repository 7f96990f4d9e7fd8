"""Rules of the rotary position embedding: its angles' constants, worked out once for each node."""

import struct
from collections.abc import Callable
from math import ceil, floor, inf, log, pi

from drover.ggml.ops import Op, RopeMode, float_params, int_params
from drover.worker.devices.cpu import record, rope
from drover.worker.devices.cpu.draft import ROOM, Draft, bits, first, rows_of_f32, source
from drover.worker.devices.device import Node


def _rope(sign: float) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        x, positions, factors = first(node), source(node, 1), source(node, 2)
        kind = x.type.id
        if kind not in (record.F32, record.F16) or node.dst.type != x.type or positions is None:
            return None
        if x.nb[0] != x.type.type_size or node.dst.nb[0] != x.type.type_size:
            return None
        if positions.nb[0] != 4 or (factors is not None and not rows_of_f32(factors)):
            return None
        if float_params(node.params)[5] <= 0:
            return None
        words = _rope_words(node, sign)
        pairs = words[rope.PAIRS]
        return Draft(record.ROPE, words, scratch=8 * ((pairs + 15) // 16 * 16) + ROOM)

    return rule


def _rope_words(node: Node, sign: float) -> dict[int, int]:
    ints, floats = int_params(node.params), float_params(node.params)
    dims, mode, context = ints[1], ints[2], ints[4]
    base, freq_scale, ext_factor, magnitude, fast, slow = floats[5:11]
    pairs = dims if mode == RopeMode.VISION else dims // 2
    low, span = 0.0, 1.0
    if ext_factor != 0.0:
        ends = (_correction(dims, context, turns, base) for turns in (fast, slow))
        first, last = (min(max(0.0, end), dims - 1.0) for end in ends)  # before rounding: they may be infinite
        low = floor(first)
        span = max(0.001, ceil(last) - low)
        magnitude *= 1.0 + 0.1 * log(1.0 / freq_scale)
    step = base ** struct.unpack("<f", struct.pack("<f", -2.0 / dims))[0]
    words = {rope.PAIRS: pairs, rope.MODE: mode, rope.OFFSET: ints[15], rope.ROTATED: 2 * pairs}
    words |= {
        record.PARAMS + rope.SCALE_STEP: bits(step),
        record.PARAMS + rope.MAGNITUDE: bits(magnitude),
        record.PARAMS + rope.SIGN: bits(sign),
    }
    words |= {rope.SECTIONS + i: ints[11 + i] for i in range(4)}
    words |= {record.EXTRA + 4 + i: bits(value) for i, value in enumerate((freq_scale, ext_factor, low, span))}
    return words


def _correction(dims: int, context: int, rotations: float, base: float) -> float:
    """The pair that turns `rotations` times over the original context; before all pairs if there is no context."""
    turns = context / (rotations * 2 * pi)
    return dims * (log(turns) if turns else -inf) / (2 * log(base))


RULES: dict[Op, Callable[[Node, int], Draft | None]] = {
    Op.ROPE: _rope(1.0),
    Op.ROPE_BACK: _rope(-1.0),
}
