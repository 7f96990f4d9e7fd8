"""What operands each operation accepts: the one check of a node's shapes, types and parameters.

What passes here cannot make a correct kernel leave its operands or divide an integer by zero; the values of index
tensors are the device's to check. Pure: no numpy. Rules are rows of one table; an operation without a row is refused.
Source of every shape: docs/protocol.md section 6. Reading order: this file, `call`, then the families.
"""

from collections.abc import Callable, Sequence

from drover.errors import GraphError
from drover.ggml.ops import METADATA_OPS, Op, float_params, int_params
from drover.ggml.rules import arithmetic, attention, images, movement, products, recurrent, training
from drover.ggml.rules.call import Call, Shaped, elements, show, storage
from drover.ggml.tensor import span

LIMIT = 1 << 62
"""Bytes and elements stay far from where 64-bit arithmetic in a kernel would wrap."""

RULES: dict[Op, Callable[[Call], None]] = {
    **dict.fromkeys(METADATA_OPS, lambda call: None),
    **movement.RULES,
    **arithmetic.RULES,
    **products.RULES,
    **attention.RULES,
    **recurrent.RULES,
    **images.RULES,
    **training.RULES,
}


def check(op: Op, params: bytes, dst: Shaped, src: Sequence[Shaped | None]) -> None:
    """Raise GraphError unless a device may execute this node.

    A node whose result has no elements is only checked operand by operand: devices skip it.
    """
    rule = RULES.get(op)
    if rule is None:
        raise GraphError(f"{op.name}: unsupported operation")
    for name, operand in (("result", dst), *((f"src{i}", s) for i, s in enumerate(src))):
        if operand is not None:
            _check_operand(op, name, operand)
    if elements(dst) == 0:
        return
    if storage(dst) > span(dst.type, dst.ne, dst.nb):
        raise GraphError(f"{op.name}: the elements of the result overlap ({show(dst)}, strides {list(dst.nb)})")
    rule(Call(op, int_params(params), float_params(params), dst, src))


def _check_operand(op: Op, name: str, operand: Shaped) -> None:
    """Extents, strides and type of one operand make sense by themselves."""
    kind, ne, nb = operand.type, operand.ne, operand.nb
    if min(ne) < 0 or min(nb) < 0:
        raise GraphError(f"{op.name}: {name} has negative extents or strides ({show(operand)}, strides {list(nb)})")
    if elements(operand) >= LIMIT or span(kind, ne, nb) >= LIMIT:
        raise GraphError(f"{op.name}: {name} is too large ({show(operand)}, strides {list(nb)})")
    if kind.quantized and ne[0] % kind.block_size:
        raise GraphError(f"{op.name}: {name} is not a whole number of blocks per row ({show(operand)})")
    if kind.quantized and ne[0] and nb[0] != kind.type_size:
        raise GraphError(f"{op.name}: {name} has gaps between blocks ({show(operand)}, strides {list(nb)})")
    if any(n > 1 and stride % kind.type_size for n, stride in zip(ne, nb, strict=True)):
        raise GraphError(f"{op.name}: {name} has strides that split elements ({show(operand)}, strides {list(nb)})")
