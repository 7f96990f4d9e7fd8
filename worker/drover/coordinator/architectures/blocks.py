"""What architectures are made of: hyper-parameters and weights checked against a file, attention, feed-forward.

Pure but for reading the model file handed in. An architecture states its tensors as a table of `Slot`; what the file
lacks or has in another shape is a ModelError that names it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drover.coordinator.graph import Graph, Rope
from drover.coordinator.model_index import ModelIndex, TensorInfo
from drover.errors import ModelError
from drover.ggml.ops import Glu, RopeMode
from drover.ggml.tensor import Tensor
from drover.ggml.types import F16, F32, F64, I8, I16, I32, I64, Q8_1, Q8_K, TensorType

_NOT_WEIGHTS: frozenset[TensorType] = frozenset({I8, I16, I32, I64, F64, Q8_1, Q8_K})

Weights = Mapping[str, Tensor]
Caches = Mapping[int, tuple[Tensor, Tensor]]
"""K and V of each layer: [row of all heads, cells]."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """The numbers of a decoder; widths in elements."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    vocabulary: int
    context: int
    eps: float
    attention_scale: float
    rope: Rope

    @property
    def dims(self) -> dict[str, int]:
        """Extents by the names that `Slot` shapes use."""
        return {
            "width": self.width,
            "ff": self.feed_forward,
            "q": self.heads * self.key_width,
            "k": self.kv_heads * self.key_width,
            "v": self.kv_heads * self.value_width,
            "attended": self.heads * self.value_width,
            "vocabulary": self.vocabulary,
            "pairs": self.rope.dims // 2,
        }


@dataclass(frozen=True, slots=True)
class Span:
    """The units of a stage: layers `first` to `end`, where unit `layers` is the output head."""

    first: int
    end: int
    layers: int

    @property
    def blocks(self) -> range:
        """Its layers."""
        return range(self.first, min(self.end, self.layers))

    @property
    def has_entry(self) -> bool:
        """Whether it turns tokens into vectors."""
        return self.first == 0

    @property
    def has_head(self) -> bool:
        """Whether it ends in logits."""
        return self.end > self.layers


@dataclass(frozen=True, slots=True)
class StepShape:
    """What makes two steps the same graph: rows in, KV cells attended to, rows of logits out."""

    tokens: int
    cells: int
    outputs: int


Build = Callable[[Graph, "Model", Span, StepShape, Weights, Caches], Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """A model file understood: its numbers, which tensors each unit needs, and how to build its graph.

    `entry` lives with unit 0, `shared` on every stage that has layers, `units[i]` with layer i, the last with the head.
    """

    hyper: Hyper
    entry: tuple[str, ...]
    shared: tuple[str, ...]
    units: tuple[tuple[str, ...], ...]
    build: Build

    def weights(self, span: Span) -> list[str]:
        """Names of all tensors that a stage needs, each once."""
        names = [*self.entry] if span.has_entry else []
        names += self.shared if span.blocks else ()
        for unit in self.units[span.first : span.end]:
            names += unit
        return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor an architecture knows: its name after the prefix, and its extents by name."""

    name: str
    dims: tuple[str, ...]
    required: bool = True


def find(model: ModelIndex, hyper: Hyper, slots: Sequence[Slot], prefix: str = "") -> Iterator[str]:
    """Names of the slots that the file has, checked."""
    for slot in slots:
        name = prefix + slot.name
        info = model.tensors.get(name)
        if info is not None:
            _check(model, info, tuple(hyper.dims[dim] for dim in slot.dims))
            yield name
        elif slot.required:
            raise ModelError(f"{model.path}: tensor {name} is missing; the file is damaged or not a complete model")


def _check(model: ModelIndex, info: TensorInfo, wanted: tuple[int, ...]) -> None:
    have = info.ne[: len(wanted)]
    if have != wanted or any(extent != 1 for extent in info.ne[len(wanted) :]):
        raise ModelError(f"{model.path}: tensor {info.name} has shape {list(have)}, expected {list(wanted)}")
    usable = info.type is F32 if len(wanted) == 1 else info.type not in _NOT_WEIGHTS
    if not usable:
        raise ModelError(f"{model.path}: tensor {info.name} has type {info.type.name}, which cannot be used there")


class Keys:
    """Hyper-parameters of a file by their name after the architecture's prefix."""

    def __init__(self, model: ModelIndex) -> None:
        self._model = model

    def number(self, key: str, default: float | None = None) -> float:
        """A number; ModelError if it is missing without a default, or no number."""
        full = f"{self._model.architecture}.{key}"
        value = self._single(full, self._model.metadata.get(full, default))
        if value is None:
            raise ModelError(f"{self._model.path}: {full} is missing; the file is not a complete model")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self._model.path}: {full} is {value!r}, expected a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.number(key, default)
        if value != int(value) or not 0 < value < 1 << 31:
            raise ModelError(
                f"{self._model.path}: {self._model.architecture}.{key} is {value}, expected a positive count"
            )
        return int(value)

    def text(self, key: str, default: str) -> str:
        """A word."""
        return str(self._model.metadata.get(f"{self._model.architecture}.{key}", default))

    def _single(self, full: str, value: Any) -> Any:
        """Values given per layer are fine while all layers agree."""
        if not isinstance(value, list | tuple):
            return value
        if not value or any(item != value[0] for item in value):
            raise ModelError(f"{self._model.path}: {full} differs between layers, which is not supported")
        return value[0]


def rope_of(model: ModelIndex, keys: Keys, dims: int, mode: RopeMode) -> Rope:
    """How a file wants positions encoded; scaling none, linear and yarn."""
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{model.path}: rope scaling {kind!r} is not supported; none, linear and yarn are")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    scaled = kind != "none" and factor > 0
    return Rope(
        dims=dims,
        mode=mode,
        original_context=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
        freq_base=keys.number("rope.freq_base", 10000.0),
        freq_scale=1.0 / factor if scaled else 1.0,
        ext_factor=keys.number("rope.scaling.yarn_ext_factor", 1.0) if kind == "yarn" else 0.0,
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


@dataclass(frozen=True, slots=True)
class Block:
    """One layer being built: `prefix` is the start of its tensors' names."""

    graph: Graph
    hyper: Hyper
    weights: Weights
    prefix: str

    def project(self, name: str, x: Tensor) -> Tensor:
        """`x` times the weight `name`, plus its bias if there is one."""
        product = self.graph.mul_mat(self._leaf(f"{name}.weight"), x)
        product.name = f"{self.prefix}{name}"
        bias = f"{name}.bias"
        return self.graph.add(product, self._leaf(bias)) if self.prefix + bias in self.weights else product

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        """Root-mean-square norm with the weight `name`."""
        normed = self.graph.mul(self.graph.rms_norm(x, self.hyper.eps), self._leaf(f"{name}.weight"))
        normed.name = f"{self.prefix}{name}"
        return normed

    def attention(self, x: Tensor, shape: StepShape, cache: tuple[Tensor, Tensor], factors: Tensor | None) -> Tensor:
        """Self-attention of normed rows [width, n] over the KV cache, which takes in their keys and values."""
        g, h = self.graph, self.hyper
        n = shape.tokens
        positions = g.input("positions", I32, n)
        q = g.reshape(self.project("attn_q", x), h.key_width, h.heads, n)
        k = g.reshape(self.project("attn_k", x), h.key_width, h.kv_heads, n)
        v = self.project("attn_v", x)
        q = g.rope(q, positions, h.rope, factors)
        k = g.rope(k, positions, h.rope, factors)
        keys, values = (g.leaf(half) for half in cache)
        cells = g.input("cells", I64, n)
        g.set_rows(keys, g.reshape(k, h.kv_heads * h.key_width, n), cells)
        g.set_rows(values, v, cells)
        attended = g.flash_attn_ext(
            g.permute(q, 0, 2, 1, 3),
            heads(g, keys, h.key_width, h.kv_heads, shape.cells),
            heads(g, values, h.value_width, h.kv_heads, shape.cells),
            g.input("mask", F16, shape.cells, n),
            h.attention_scale,
        )
        return self.project("attn_output", g.reshape(attended, h.heads * h.value_width, n))

    def swiglu(self, x: Tensor) -> Tensor:
        """Feed-forward: `down(silu(gate(x)) * up(x))`."""
        return self.project(
            "ffn_down", self.graph.glu(Glu.SWIGLU, self.project("ffn_gate", x), self.project("ffn_up", x))
        )

    def _leaf(self, name: str) -> Tensor:
        return self.graph.leaf(self.weights[self.prefix + name])


def heads(g: Graph, cache: Tensor, width: int, count: int, cells: int) -> Tensor:
    """The first cells of a KV cache [row, cells] as [width, cells, heads]."""
    return g.view(cache, (width, cells, count), (cache.nb[0], cache.nb[1], cache.type.row_bytes(width), cache.nb[2]))
