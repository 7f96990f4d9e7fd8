"""Nodes to records: for each operation, whether there is a kernel for this node, and the parameters the kernel wants.

A rule sees a node whose shapes have passed `ggml.rules.check`. It answers None for types and layouts that its kernel
does not know: the node then runs on the reference device.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, floor, inf, log, log2, pi

from drover.ggml.ops import Op, RopeMode, SortOrder, float_params, int_params
from drover.worker.devices.cpu import attention, copy, elementwise, experts, matmul, norm, record, rope
from drover.worker.devices.cpu.blocks import READABLE, ROOM_BYTES, WRITABLE
from drover.worker.devices.device import Node, Operand
from drover.worker.devices.host import host

FLOATS = frozenset((record.F32, record.F16, record.BF16))

_SOLO_ELEMENTS = 8192
"""Elements up to which one thread is done before another would have started."""
_WIDEST_HEAD = 1024
_MANY_TOKENS = 64
"""From here on ggml forms attention in floats throughout."""
"""Channels; what a thread's scratch for attention is proportional to."""
_ROOM = 256
"""Scratch bytes of the elementwise kernels."""


@dataclass(slots=True)
class Draft:
    """What a record holds besides operands; `words` by word number."""

    opcode: int
    words: dict[int, int] = field(default_factory=dict)
    scratch: int = _ROOM
    shared: int = 0
    small: bool = True
    """Whether the operation is cheap per element, so that few elements are best left to one thread."""


def lower(node: Node, threads: int) -> Draft | None:
    """The draft of a node's record, or None where there is no kernel for it."""
    rule = RULES.get(node.op)
    if rule is None or node.src[:1] in ((), (None,)):
        return None
    try:
        draft = rule(node, threads)
    except (ArithmeticError, ValueError):  # parameters that no model has: numpy computes with anything
        return None
    if draft is not None and draft.small:
        largest = max(node.dst.elements, *(x.elements for x in node.src[:1] if x is not None))
        draft.small = largest <= _SOLO_ELEMENTS
    return draft


def fuse(node: Node, draft: Draft, following: Node | None) -> bool:
    """Let the record of a norm also multiply by the weights that the next node would, in the same memory."""
    if draft.opcode != record.NORM or following is None or following.op is not Op.MUL:
        return False
    x, weights, dst = _source(following, 0), _source(following, 1), node.dst
    if x is None or weights is None or not x == following.dst == dst:
        return False
    apart = weights.buffer is not dst.buffer or not _overlap(weights, dst)
    if not (apart and _rows_of_f32(weights) and weights.ne == (dst.ne[0], 1, 1, 1)):
        return False
    draft.words[record.PARAMS + norm.WEIGHTS] = address(weights)
    return True


def address(operand: Operand) -> int:
    """Where an operand starts in this process."""
    return host(operand.buffer).address + operand.offset


def _overlap(a: Operand, b: Operand) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _source(node: Node, index: int) -> Operand | None:
    return node.src[index] if index < len(node.src) else None


def _first(node: Node) -> Operand:
    source = node.src[0]
    assert source is not None
    return source


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _ints(*values: int) -> dict[int, int]:
    return {record.PARAMS + i: value for i, value in enumerate(values)}


def _rows_of_f32(operand: Operand) -> bool:
    return operand.type.id == record.F32 and operand.nb[0] == 4


def _binary(kind: int) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        a, b = node.src[0], _source(node, 1)
        if a is None or b is None or not {a.type.id, b.type.id, node.dst.type.id} <= FLOATS:
            return None
        return Draft(record.BINARY, _ints(kind))

    return rule


def _function(kind: int | None, *parameters: int) -> Callable[[Node, int], Draft | None]:
    """A rule for a function of one tensor; `parameters` are the numbers of its float parameters."""

    def rule(node: Node, threads: int) -> Draft | None:
        if not {_first(node).type.id, node.dst.type.id} <= FLOATS:
            return None
        number = int_params(node.params)[0] if kind is None else kind
        floats = float_params(node.params)
        return Draft(record.UNARY, _ints(number, *(_bits(floats[i]) for i in parameters)))

    return rule


def _glu(node: Node, threads: int) -> Draft | None:
    a, b = _first(node), _source(node, 1)
    if not {a.type.id, node.dst.type.id} <= FLOATS or (b is not None and b.type.id != a.type.id):
        return None
    ints, floats = int_params(node.params), float_params(node.params)
    return Draft(record.GLU, _ints(ints[0], ints[1], _bits(floats[2]), _bits(floats[3])))


def _norm(kind: int) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        if not (_rows_of_f32(_first(node)) and _rows_of_f32(node.dst)):
            return None
        return Draft(record.NORM, _ints(kind, _bits(float_params(node.params)[0])))

    return rule


def _sum_rows(mean: int) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        if not (_rows_of_f32(_first(node)) and node.dst.type.id == record.F32):
            return None
        return Draft(record.SUM_ROWS, _ints(mean))

    return rule


def _argsort(node: Node, threads: int) -> Draft | None:
    if not _rows_of_f32(_first(node)) or node.dst.nb[0] != 4:
        return None
    return Draft(record.ARGSORT, _ints(int(int_params(node.params)[0] == SortOrder.DESC)), small=False)


def slopes(heads: int, max_bias: float) -> dict[int, int]:
    """Parameters 1 to 3 for `norm.head_slope`."""
    if max_bias == 0.0:
        return {record.PARAMS + 1: 0, record.PARAMS + 2: 0, record.PARAMS + 3: 0}
    few = 1 << floor(log2(heads))
    base, base_odd = 2.0 ** (-max_bias / few), 2.0 ** (-max_bias / 2.0 / few)
    return {record.PARAMS + 1: _bits(base), record.PARAMS + 2: _bits(base_odd), record.PARAMS + 3: few}


def _soft_max(node: Node, threads: int) -> Draft | None:
    x, mask = _first(node), _source(node, 1)
    if not (_rows_of_f32(x) and _rows_of_f32(node.dst)):
        return None
    if mask is not None and not (mask.type.id in FLOATS and mask.nb[0] == mask.type.type_size):
        return None
    scale, max_bias = float_params(node.params)[:2]
    words = {record.PARAMS: _bits(scale), **slopes(x.ne[2], max_bias if mask is not None else 0.0)}
    return Draft(record.SOFT_MAX, words, small=x.elements <= _SOLO_ELEMENTS // 4)


def _get_rows(node: Node, threads: int) -> Draft | None:
    a, ids = _first(node), _source(node, 1)
    if ids is None or ids.type.id != record.I32 or a.type.id not in READABLE or a.nb[0] != a.type.type_size:
        return None
    wanted = record.I32 if a.type.id == record.I32 else record.F32
    if node.dst.type.id != wanted or node.dst.nb[0] != 4:
        return None
    return Draft(record.GET_ROWS, scratch=ROOM_BYTES)


def _set_rows(node: Node, threads: int) -> Draft | None:
    rows, ids, dst = _first(node), _source(node, 1), node.dst
    if ids is None or ids.type.id not in (record.I32, record.I64) or rows.type.id not in (record.F32, record.F16):
        return None
    if dst.type.id in WRITABLE:
        contiguous = _rows_of_f32(rows) and dst.nb[0] == dst.type.type_size
        return Draft(record.SET_ROWS) if contiguous else None
    if dst.type.id not in FLOATS:
        return None
    if rows.ne[0] == rows.ne[2] == rows.ne[3] == 1:
        return Draft(record.SET_ELEMENTS)
    return Draft(record.SET_ROWS)


def _copy(node: Node, threads: int) -> Draft | None:
    a, dst = _first(node), node.dst
    mode = _copy_mode(a, dst)
    if mode is None:
        return None
    words = _ints(mode, a.type.type_size)
    if mode == copy.UNITS:  # blocks are the units: count them, not their elements
        words |= {record.NE0: a.ne[0] // a.type.block_size, record.NE_DST: dst.ne[0] // a.type.block_size}
    return Draft(record.COPY, words, scratch=ROOM_BYTES)


def _copy_mode(a: Operand, dst: Operand) -> int | None:
    source, target = a.type, dst.type
    whole_rows = a.nb[0] == source.type_size and dst.nb[0] == target.type_size
    if source == target:
        same_blocks = whole_rows and a.ne[0] == dst.ne[0]
        return copy.UNITS if source.block_size == 1 or same_blocks else None
    if source.id in FLOATS and target.id in FLOATS:
        return copy.FLOATS
    if (source.id, target.id) == (record.F32, record.I32):
        return copy.TO_INT
    if (source.id, target.id) == (record.I32, record.F32):
        return copy.FROM_INT
    if not whole_rows or (a.ne[0] % dst.ne[0] and dst.ne[0] % a.ne[0]):
        return None
    if source.quantized and source.id in READABLE and target.id == record.F32:
        return copy.READ_BLOCKS if dst.ne[0] % source.block_size == 0 else None
    if source.id == record.F32 and target.id in WRITABLE:
        return copy.WRITE_BLOCKS if a.ne[0] % target.block_size == 0 else None
    return None


def _concat(node: Node, threads: int) -> Draft | None:
    a, b, axis = _first(node), _source(node, 1), int_params(node.params)[0]
    if b is None or not a.type == b.type == node.dst.type or a.type.quantized or not 0 <= axis < 4:
        return None
    return Draft(record.CONCAT, _ints(axis, a.type.type_size))


def _repeat(node: Node, threads: int) -> Draft | None:
    a = _first(node)
    if a.type != node.dst.type or a.type.quantized:
        return None
    return Draft(record.REPEAT, _ints(0, a.type.type_size))


def _rope(sign: float) -> Callable[[Node, int], Draft | None]:
    def rule(node: Node, threads: int) -> Draft | None:
        x, positions, factors = _first(node), _source(node, 1), _source(node, 2)
        kind = x.type.id
        if kind not in (record.F32, record.F16) or node.dst.type != x.type or positions is None:
            return None
        if x.nb[0] != x.type.type_size or node.dst.nb[0] != x.type.type_size:
            return None
        if positions.nb[0] != 4 or (factors is not None and not _rows_of_f32(factors)):
            return None
        if float_params(node.params)[5] <= 0:
            return None
        words = _rope_words(node, sign)
        pairs = words[rope.PAIRS]
        return Draft(record.ROPE, words, scratch=8 * ((pairs + 15) // 16 * 16) + _ROOM)

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
        record.PARAMS + rope.SCALE_STEP: _bits(step),
        record.PARAMS + rope.MAGNITUDE: _bits(magnitude),
        record.PARAMS + rope.SIGN: _bits(sign),
    }
    words |= {rope.SECTIONS + i: ints[11 + i] for i in range(4)}
    words |= {record.EXTRA + 4 + i: _bits(value) for i, value in enumerate((freq_scale, ext_factor, low, span))}
    return words


def _correction(dims: int, context: int, rotations: float, base: float) -> float:
    """The pair that turns `rotations` times over the original context; before all pairs if there is no context."""
    turns = context / (rotations * 2 * pi)
    return dims * (log(turns) if turns else -inf) / (2 * log(base))


def _attention(node: Node, threads: int) -> Draft | None:
    q, k, v, mask, sinks = (_source(node, i) for i in range(5))
    if q is None or k is None or v is None or not _rows_of_f32(q) or not _rows_of_f32(node.dst):
        return None
    kv_heads = max(k.ne[2], v.ne[2])
    fits = all(x.ne[0] % 16 == 0 and 0 < x.ne[0] <= _WIDEST_HEAD for x in (q, v)) and q.ne[2] % kv_heads == 0
    fits = fits and kv_heads % k.ne[2] == 0 and kv_heads % v.ne[2] == 0
    kinds = FLOATS | WRITABLE
    if not fits or any(x.type.id not in kinds or x.nb[0] != x.type.type_size for x in (k, v)):
        return None
    if mask is not None and not (mask.type.id in (record.F16, record.F32) and mask.nb[0] == mask.type.type_size):
        return None
    if sinks is not None and not _rows_of_f32(sinks):
        return None
    scale, max_bias, cap = float_params(node.params)[:3]
    splits = _splits(q, k, kv_heads, threads)
    words = {record.PARAMS + attention.SCALE: _bits(scale), **slopes(q.ne[2], max_bias if mask is not None else 0.0)}
    words |= {record.PARAMS + attention.SOFTCAP: _bits(cap), record.PARAMS + attention.SPLITS: splits}
    words[record.PARAMS + attention.AS_GGML] = _as_ggml(q, k, v)
    rows = q.ne[1] * q.ne[2] * q.ne[3]
    scratch, shared = attention.scratch_bytes(q.ne[0], v.ne[0]), attention.shared_bytes(v.ne[0], rows, splits)
    return Draft(record.ATTENTION, words, scratch, shared, small=False)


def _as_ggml(q: Operand, k: Operand, v: Operand) -> int:
    """Where ggml rounds: queries to the type of keys, sums over F16 values; not for many tokens over floats."""
    if q.ne[1] >= _MANY_TOKENS and k.type == v.type and not k.type.quantized:
        return 0
    return attention.ROUND_QUERIES | (attention.IN_ORDER if v.type.id == record.F16 else 0)


def _splits(q: Operand, k: Operand, kv_heads: int, threads: int) -> int:
    """How many parts to cut the cells into so that every thread has work."""
    tiles = -(-q.ne[1] * q.ne[2] // kv_heads // attention.ROWS)
    items = q.ne[3] * kv_heads * tiles
    if items % threads == 0 or items >= 4 * threads:
        return 1
    return max(1, min(-(-4 * threads // items), k.ne[1] // 256))


def _mul_mat(node: Node, threads: int) -> Draft | None:
    a, b = _first(node), node.src[1]
    if b is None or a.elements == 0 or not matmul.supported(node):
        return None
    scratch, shared = matmul.scratch_bytes(a.type.id, a.ne), matmul.shared_bytes(a.type.id, a.ne, b.ne)
    return Draft(record.MUL_MAT, _ints(int_params(node.params)[0]), scratch, shared, small=False)


def _mul_mat_id(node: Node, threads: int) -> Draft | None:
    a, b, ids = _first(node), _source(node, 1), _source(node, 2)
    if b is None or ids is None or not experts.supported(node):
        return None
    scratch = experts.scratch_bytes(a.type.id, a.ne, ids.ne)
    shared = experts.shared_bytes(a.type.id, a.ne, b.ne, ids.ne)
    return Draft(record.MUL_MAT_ID, _ints(int_params(node.params)[0]), scratch, shared, small=False)


RULES: dict[Op, Callable[[Node, int], Draft | None]] = {
    Op.ADD: _binary(elementwise.ADD),
    Op.SUB: _binary(elementwise.SUB),
    Op.MUL: _binary(elementwise.MUL),
    Op.DIV: _binary(elementwise.DIV),
    Op.UNARY: _function(None, 1, 2, 3, 4),
    Op.SQR: _function(elementwise.SQR),
    Op.SQRT: _function(elementwise.SQRT),
    Op.LOG: _function(elementwise.LOG),
    Op.SIN: _function(elementwise.SIN),
    Op.COS: _function(elementwise.COS),
    Op.SCALE: _function(elementwise.SCALE, 0, 1),
    Op.CLAMP: _function(elementwise.CLAMP, 0, 1),
    Op.LEAKY_RELU: _function(elementwise.LEAKY_RELU, 0),
    Op.FILL: _function(elementwise.FILL, 0),
    Op.GLU: _glu,
    Op.NORM: _norm(norm.MEAN_AND_VARIANCE),
    Op.RMS_NORM: _norm(norm.RMS),
    Op.L2_NORM: _norm(norm.L2),
    Op.SUM_ROWS: _sum_rows(0),
    Op.MEAN: _sum_rows(1),
    Op.ARGSORT: _argsort,
    Op.SOFT_MAX: _soft_max,
    Op.GET_ROWS: _get_rows,
    Op.SET_ROWS: _set_rows,
    Op.CPY: _copy,
    Op.CONT: _copy,
    Op.DUP: _copy,
    Op.CONCAT: _concat,
    Op.REPEAT: _repeat,
    Op.ROPE: _rope(1.0),
    Op.ROPE_BACK: _rope(-1.0),
    Op.FLASH_ATTN_EXT: _attention,
    Op.MUL_MAT: _mul_mat,
    Op.MUL_MAT_ID: _mul_mat_id,
}
