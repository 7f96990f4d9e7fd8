"""Nodes to records: for each operation, whether there is a kernel for this node, and the parameters the kernel wants.

A rule sees a node whose shapes have passed `ggml.rules.check`. It answers None for types and layouts that its kernel
does not know: the node then runs on the reference device. Rules of copies, attention and products stand here, others in
a `lowering_…` for each family.
"""

from collections.abc import Callable

from drover.ggml.ops import Op, float_params, int_params
from drover.worker.devices.cpu import (
    attention,
    copy,
    experts,
    lowering_recurrent,
    lowering_rope,
    lowering_routing,
    lowering_rows,
    lowering_windows,
    matmul,
    norm,
    record,
)
from drover.worker.devices.cpu.blocks import READABLE, ROOM_BYTES, WRITABLE
from drover.worker.devices.cpu.draft import (
    FLOATS,
    SOLO_ELEMENTS,
    Draft,
    address,
    bits,
    first,
    overlap,
    parameters,
    rows_of_f32,
    source,
)
from drover.worker.devices.cpu.lowering_rows import slopes
from drover.worker.devices.device import Node, Operand

_WIDEST_HEAD = 1024
"""Channels; what a thread's scratch for attention is proportional to."""
_MANY_TOKENS = 64
"""From here on ggml forms attention in floats throughout."""


def lower(node: Node, threads: int) -> Draft | None:
    """The draft of a node's record, or None where there is no kernel for it."""
    rule = RULES.get(node.op)
    if rule is None or (node.src[:1] in ((), (None,)) and node.op is not Op.ARANGE):
        return None
    try:
        draft = rule(node, threads)
    except (ArithmeticError, ValueError):  # parameters that no model has: numpy computes with anything
        return None
    if draft is not None and draft.small:
        largest = max([node.dst.elements, *(x.elements for x in node.src[:1] if x is not None)])
        draft.small = largest <= SOLO_ELEMENTS
    return draft


def fuse(node: Node, draft: Draft, following: Node | None) -> bool:
    """Let the record of a norm also multiply by the weights that the next node would, in the same memory."""
    if draft.opcode != record.NORM or following is None or following.op is not Op.MUL:
        return False
    x, weights, dst = source(following, 0), source(following, 1), node.dst
    if x is None or weights is None or not x == following.dst == dst:
        return False
    apart = weights.buffer is not dst.buffer or not overlap(weights, dst)
    if not (apart and rows_of_f32(weights) and weights.ne == (dst.ne[0], 1, 1, 1)):
        return False
    draft.words[record.PARAMS + norm.WEIGHTS] = address(weights)
    return True


def _get_rows(node: Node, threads: int) -> Draft | None:
    a, ids = first(node), source(node, 1)
    if ids is None or ids.type.id != record.I32 or a.type.id not in READABLE or a.nb[0] != a.type.type_size:
        return None
    wanted = record.I32 if a.type.id == record.I32 else record.F32
    if node.dst.type.id != wanted or node.dst.nb[0] != 4:
        return None
    return Draft(record.GET_ROWS, scratch=ROOM_BYTES)


def _set_rows(node: Node, threads: int) -> Draft | None:
    rows, ids, dst = first(node), source(node, 1), node.dst
    if ids is None or ids.type.id not in (record.I32, record.I64) or rows.type.id not in (record.F32, record.F16):
        return None
    if dst.type.id in WRITABLE:
        contiguous = rows_of_f32(rows) and dst.nb[0] == dst.type.type_size
        return Draft(record.SET_ROWS) if contiguous else None
    if dst.type.id not in FLOATS:
        return None
    if rows.ne[0] == rows.ne[2] == rows.ne[3] == 1:
        return Draft(record.SET_ELEMENTS)
    return Draft(record.SET_ROWS)


def _copy(node: Node, threads: int) -> Draft | None:
    a, dst = first(node), node.dst
    mode = _copy_mode(a, dst)
    if mode is None:
        return None
    words = parameters(mode, a.type.type_size)
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
    a, b, axis = first(node), source(node, 1), int_params(node.params)[0]
    if b is None or not a.type == b.type == node.dst.type or a.type.quantized or not 0 <= axis < 4:
        return None
    return Draft(record.CONCAT, parameters(axis, a.type.type_size))


def _repeat(node: Node, threads: int) -> Draft | None:
    a = first(node)
    if a.type != node.dst.type or a.type.quantized:
        return None
    return Draft(record.REPEAT, parameters(0, a.type.type_size))


def _attention(node: Node, threads: int) -> Draft | None:
    q, k, v, mask, sinks = (source(node, i) for i in range(5))
    if q is None or k is None or v is None or not rows_of_f32(q) or not rows_of_f32(node.dst):
        return None
    kv_heads = max(k.ne[2], v.ne[2])
    fits = all(x.ne[0] % 16 == 0 and 0 < x.ne[0] <= _WIDEST_HEAD for x in (q, v)) and q.ne[2] % kv_heads == 0
    fits = fits and kv_heads % k.ne[2] == 0 and kv_heads % v.ne[2] == 0
    kinds = FLOATS | WRITABLE
    if not fits or any(x.type.id not in kinds or x.nb[0] != x.type.type_size for x in (k, v)):
        return None
    if mask is not None and not (mask.type.id in (record.F16, record.F32) and mask.nb[0] == mask.type.type_size):
        return None
    if sinks is not None and not rows_of_f32(sinks):
        return None
    scale, max_bias, cap = float_params(node.params)[:3]
    splits = _splits(q, k, kv_heads, threads)
    words = {record.PARAMS + attention.SCALE: bits(scale), **slopes(q.ne[2], max_bias if mask is not None else 0.0)}
    words |= {record.PARAMS + attention.SOFTCAP: bits(cap), record.PARAMS + attention.SPLITS: splits}
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
    a, b = first(node), node.src[1]
    if b is None or a.elements == 0 or not matmul.supported(node):
        return None
    scratch, shared = matmul.scratch_bytes(a.type.id, a.ne), matmul.shared_bytes(a.type.id, a.ne, b.ne)
    return Draft(record.MUL_MAT, parameters(int_params(node.params)[0]), scratch, shared, small=False)


def _mul_mat_id(node: Node, threads: int) -> Draft | None:
    a, b, ids = first(node), source(node, 1), source(node, 2)
    if b is None or ids is None or not experts.supported(node):
        return None
    scratch = experts.scratch_bytes(a.type.id, a.ne, ids.ne)
    shared = experts.shared_bytes(a.type.id, a.ne, b.ne, ids.ne)
    return Draft(record.MUL_MAT_ID, parameters(int_params(node.params)[0]), scratch, shared, small=False)


RULES: dict[Op, Callable[[Node, int], Draft | None]] = {
    **lowering_rows.RULES,
    **lowering_rope.RULES,
    **lowering_routing.RULES,
    **lowering_windows.RULES,
    **lowering_recurrent.RULES,
    Op.GET_ROWS: _get_rows,
    Op.SET_ROWS: _set_rows,
    Op.CPY: _copy,
    Op.CONT: _copy,
    Op.DUP: _copy,
    Op.CONCAT: _concat,
    Op.REPEAT: _repeat,
    Op.FLASH_ATTN_EXT: _attention,
    Op.MUL_MAT: _mul_mat,
    Op.MUL_MAT_ID: _mul_mat_id,
}
