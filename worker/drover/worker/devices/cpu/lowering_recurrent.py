"""Rules of operations that carry a state from token to token, and of hyper-connections."""

from collections.abc import Callable

from drover.ggml.ops import Op, float_params, int_params
from drover.ggml.rules.call import contiguous
from drover.worker.devices.cpu import record, recurrent
from drover.worker.devices.cpu.draft import (
    SOLO_ELEMENTS,
    Draft,
    apart,
    bits,
    first,
    parameters,
    rows_of_f32,
    source,
)
from drover.worker.devices.device import Node, Operand


def _operands(node: Node, count: int) -> list[Operand] | None:
    """The first `count` operands if all are there, floats without gaps in their rows, and apart from the result."""
    found = [x for x in node.src[:count] if x is not None]
    fits = len(found) == count and all(rows_of_f32(x) for x in (*found, node.dst)) and apart(node)
    return found if fits else None


def _ssm_conv(node: Node, threads: int) -> Draft | None:
    operands = _operands(node, 2)
    return Draft(record.SSM_CONV, scratch=recurrent.conv_scratch(operands[1].ne[0])) if operands else None


def _ssm_scan(node: Node, threads: int) -> Draft | None:
    operands, kept = _operands(node, 6), int_params(node.params)[0]
    if operands is None or kept == 0 or operands[0].elements == 0 or operands[1].elements == 0:
        return None
    return Draft(record.SSM_SCAN, parameters(kept), small=False)


def _gated_delta_net(node: Node, threads: int) -> Draft | None:
    operands, kept = _operands(node, 6), int_params(node.params)[0]
    if operands is None or kept == 0 or operands[2].elements == 0:
        return None
    size, state = operands[2].ne[0], operands[5]
    if size % 16 or not contiguous(state):
        return None
    return Draft(record.GATED_DELTA_NET, parameters(kept), scratch=12 * size, small=False)


def _wkv7(node: Node, threads: int) -> Draft | None:
    operands = _operands(node, 7)
    sequences = _sequences(operands, 6)
    if operands is None or not sequences or operands[0].ne[0] % 16:
        return None
    return Draft(record.WKV7, parameters(sequences), small=False)


def _sequences(operands: list[Operand] | None, slot: int) -> int:
    """How many sequences there are states for in this slot; 0 if there is nothing to do, or gaps."""
    if operands is None or operands[0].elements == 0 or not contiguous(operands[slot]):
        return 0
    size, heads = operands[0].ne[:2]
    return operands[slot].elements // (size * size * heads)


def _wkv6(node: Node, threads: int) -> Draft | None:
    operands = _operands(node, 6)
    sequences = _sequences(operands, 5)
    if operands is None or not sequences or not contiguous(operands[3]):
        return None
    return Draft(record.LINEAR_ATTENTION, parameters(recurrent.WKV6, 0, sequences), small=False)


def _gated_linear_attention(node: Node, threads: int) -> Draft | None:
    sequences = _sequences(_operands(node, 5), 4)
    if not sequences:
        return None
    scale = bits(float_params(node.params)[0])
    return Draft(record.LINEAR_ATTENTION, parameters(recurrent.GATED, scale, sequences), small=False)


def _hc_pre(node: Node, threads: int) -> Draft | None:
    if not (_operands(node, 1) and (w := source(node, 1))):
        return None
    gated = int(int_params(node.params)[1] != 0)
    if gated and not rows_of_f32(w):
        return None
    return Draft(record.HC_PRE, parameters(bits(float_params(node.params)[0]), gated))


def _hc_post(node: Node, threads: int) -> Draft | None:
    return Draft(record.HC_POST) if _operands(node, 2) else None


def _hc_comb(node: Node, threads: int) -> Draft | None:
    operands = _operands(node, 3)
    if operands is None or not (contiguous(operands[1]) and contiguous(operands[2])):
        return None
    words = parameters(bits(float_params(node.params)[0]), int_params(node.params)[1])
    return Draft(record.HC_COMB, words, small=first(node).elements <= SOLO_ELEMENTS // 16)


RULES: dict[Op, Callable[[Node, int], Draft | None]] = {
    Op.SSM_CONV: _ssm_conv,
    Op.SSM_SCAN: _ssm_scan,
    Op.GATED_DELTA_NET: _gated_delta_net,
    Op.RWKV_WKV7: _wkv7,
    Op.RWKV_WKV6: _wkv6,
    Op.GATED_LINEAR_ATTN: _gated_linear_attention,
    Op.DSV4_HC_PRE: _hc_pre,
    Op.DSV4_HC_POST: _hc_post,
    Op.DSV4_HC_COMB: _hc_comb,
}
