"""Rules of what chooses: rows added by number, orders, the largest of a row, the scores of a sparse attention."""

from collections.abc import Callable

from drover.ggml.ops import Op, SortOrder, int_params
from drover.worker.devices.cpu import record, routing, sorting
from drover.worker.devices.cpu.blocks import READABLE
from drover.worker.devices.cpu.draft import (
    FLOATS,
    SOLO_ELEMENTS,
    Draft,
    apart,
    first,
    in_place,
    parameters,
    rows_of_f32,
    source,
)
from drover.worker.devices.device import Node


def _add_id(node: Node, threads: int) -> Draft | None:
    b = source(node, 1)
    if b is None or not (rows_of_f32(first(node)) and rows_of_f32(b) and rows_of_f32(node.dst)):
        return None
    fits = (in_place(node) or apart(node, 0)) and apart(node, 1, 2)
    return Draft(record.ADD_ID) if fits else None


def _argsort(node: Node, threads: int) -> Draft | None:
    return _sorted(node, int_params(node.params)[0])


def _top_k(node: Node, threads: int) -> Draft | None:
    draft = _sorted(node, SortOrder.DESC)
    if draft is not None and node.dst.ne[0] <= sorting.FEW:
        draft.opcode = record.TOP_FEW
    return draft


def _sorted(node: Node, order: int) -> Draft | None:
    x = first(node)
    if not rows_of_f32(x) or node.dst.nb[0] != 4 or x.ne[0] > sorting.LONGEST_ROW or not apart(node):
        return None
    kind = sorting.FALLING if order == SortOrder.DESC else sorting.RISING
    small = x.elements <= SOLO_ELEMENTS // 8
    return Draft(record.ARGSORT, parameters(kind), scratch=sorting.sorting_scratch(x.ne[0]), small=small)


def _argmax(node: Node, threads: int) -> Draft | None:
    return Draft(record.ARGMAX) if rows_of_f32(first(node)) and apart(node) else None


def _lightning_indexer(node: Node, threads: int) -> Draft | None:
    q, k, mask = first(node), source(node, 1), source(node, 3)
    if k is None or mask is None or not (rows_of_f32(q) and rows_of_f32(node.dst) and apart(node)):
        return None
    if k.type.id not in READABLE - {record.I32} or k.nb[0] != k.type.type_size or q.ne[0] % 16 or q.ne[0] == 0:
        return None
    if mask.type.id not in FLOATS or mask.nb[0] != mask.type.type_size or q.ne[1] > routing.MOST_HEADS:
        return None
    return Draft(record.LIGHTNING_INDEXER, scratch=routing.scores_scratch(q.ne[0], q.ne[1]), small=False)


RULES: dict[Op, Callable[[Node, int], Draft | None]] = {
    Op.ADD_ID: _add_id,
    Op.ARGSORT: _argsort,
    Op.TOP_K: _top_k,
    Op.ARGMAX: _argmax,
    Op.LIGHTNING_INDEXER: _lightning_indexer,
}
