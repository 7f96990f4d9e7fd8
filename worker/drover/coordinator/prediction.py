"""How fast one sequence ought to decode: what a token asks of every stage, times what was measured of each of them.

Pure: it walks the graph of one step and does sums; `measurement` takes the times. The formula and its reasons:
docs/decisions/0008.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drover.coordinator.graph import Graph
from drover.ggml.ops import Op
from drover.ggml.tensor import Tensor
from drover.ggml.types import TensorType


@dataclass(frozen=True, slots=True)
class Work:
    """What one token asks of a stage: bytes of weights by type and of KV cache, other operations, bytes handed over."""

    weights: Mapping[TensorType, int]
    cache: int
    others: int
    sent: int
    fetched: int


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds measured of a stage: for a byte of weights by type and of KV cache, for an operation, for an exchange."""

    weights: Mapping[TensorType, float]
    cache: float
    operation: float
    exchange: float


def tokens_per_second(stages: Iterable[tuple[Work, Pace]]) -> float | None:
    """What the stages reach one after the other; None if there is nothing to go by."""
    total = sum(seconds(work, pace) for work, pace in stages)
    return 1 / total if total > 0 else None


def seconds(work: Work, pace: Pace) -> float:
    """How long a stage takes for one token; a type that no product has counts like the one that holds most."""
    most = max(pace.weights, key=lambda type_: work.weights.get(type_, 0), default=None)
    usual = 0.0 if most is None else pace.weights[most]
    reading = sum(count * pace.weights.get(type_, usual) for type_, count in work.weights.items())
    return pace.exchange + reading + work.cache * pace.cache + work.others * pace.operation


def work_of(step: Graph, output: Tensor) -> Work:
    """What the graph of one step asks of its stage."""
    resident, cache = _resident(step), 0
    weights: dict[TensorType, int] = {}
    for node in step.nodes:
        sources = [step.tensor(source) for source in node.src]
        for index, source in enumerate(sources):
            if source.id not in resident or _root(source) == node.view_src:
                continue
            if node.op is Op.FLASH_ATTN_EXT:
                cache += _whole(source)
            else:
                weights[source.type] = weights.get(source.type, 0) + _bytes_read(node, index, sources)
    others = len(step.nodes) - len(_products(step)) - len(attentions(step))
    return Work(weights, cache, others, sum(tensor.nbytes for tensor in step.inputs.values()), output.nbytes)


def matrices(step: Graph) -> dict[TensorType, list[Tensor]]:
    """The weights that a graph multiplies with, by type, each once."""
    found: dict[TensorType, dict[int, Tensor]] = {}
    for node in _products(step):
        matrix = step.tensor(node.src[0])
        found.setdefault(matrix.type, {})[matrix.id] = matrix
    return {type_: list(by_id.values()) for type_, by_id in found.items()}


def attentions(step: Graph) -> list[Tensor]:
    """The nodes that read the KV cache."""
    return [node for node in step.nodes if node.op is Op.FLASH_ATTN_EXT]


def _products(step: Graph) -> list[Tensor]:
    resident = _resident(step)
    return [node for node in step.nodes if node.op is Op.MUL_MAT and node.src[0] in resident]


def _resident(step: Graph) -> set[int]:
    """Weights, KV caches and views of them: what was there before the step."""
    inputs = {tensor.id for tensor in step.inputs.values()}
    there = {tensor.id for tensor in step.tensors if tensor.op is Op.NONE} - inputs
    return {tensor.id for tensor in step.tensors if _root(tensor) in there}


def _root(tensor: Tensor) -> int:
    return tensor.view_src or tensor.id


def _bytes_read(node: Tensor, index: int, sources: list[Tensor]) -> int:
    source = sources[index]
    if index == 0 and node.op is Op.GET_ROWS:
        return source.type.row_bytes(source.ne[0]) * sources[1].elements
    if index == 0 and node.op is Op.MUL_MAT_ID:
        return _whole(source) * min(sources[2].elements, source.ne[2]) // source.ne[2]
    return _whole(source)


def _whole(tensor: Tensor) -> int:
    return tensor.type.row_bytes(tensor.elements)
