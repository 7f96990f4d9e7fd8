"""The llama architecture: Llama 1 to 3, Mistral, and everything else that GGUF calls `llama`.

RMS norms, rotary positions on adjacent channels, grouped-query attention, SwiGLU; the output head may be the
embedding.
"""

import math

from drover.coordinator.architectures.blocks import (
    Block,
    Caches,
    Hyper,
    Keys,
    Model,
    Slot,
    Span,
    StepShape,
    Weights,
    find,
    rope_of,
)
from drover.coordinator.graph import Graph
from drover.coordinator.model_index import ModelIndex
from drover.errors import ModelError
from drover.ggml.ops import RopeMode
from drover.ggml.tensor import Tensor
from drover.ggml.types import F32, I32

EMBEDDING = "token_embd.weight"
FACTORS = "rope_freqs.weight"
HEAD = "output.weight"

ENTRY = (Slot(EMBEDDING, ("width", "vocabulary")),)
SHARED = (Slot(FACTORS, ("pairs",), required=False),)
LAYER = (
    Slot("attn_norm.weight", ("width",)),
    Slot("attn_q.weight", ("width", "q")),
    Slot("attn_q.bias", ("q",), required=False),
    Slot("attn_k.weight", ("width", "k")),
    Slot("attn_k.bias", ("k",), required=False),
    Slot("attn_v.weight", ("width", "v")),
    Slot("attn_v.bias", ("v",), required=False),
    Slot("attn_output.weight", ("attended", "width")),
    Slot("attn_output.bias", ("width",), required=False),
    Slot("ffn_norm.weight", ("width",)),
    Slot("ffn_gate.weight", ("width", "ff")),
    Slot("ffn_gate.bias", ("ff",), required=False),
    Slot("ffn_up.weight", ("width", "ff")),
    Slot("ffn_up.bias", ("ff",), required=False),
    Slot("ffn_down.weight", ("ff", "width")),
    Slot("ffn_down.bias", ("width",), required=False),
)
NORM = (Slot("output_norm.weight", ("width",)),)
OUTPUT = (Slot(HEAD, ("width", "vocabulary"), required=False),)


def read(model: ModelIndex) -> Model:
    """Understand a file; ModelError for what it lacks or what we do not support."""
    hyper = _hyper(model)
    layers = (tuple(find(model, hyper, LAYER, f"blk.{i}.")) for i in range(hyper.layers))
    head = tuple(find(model, hyper, OUTPUT)) or (EMBEDDING,)
    return Model(
        hyper=hyper,
        entry=tuple(find(model, hyper, ENTRY)),
        shared=tuple(find(model, hyper, SHARED)),
        units=(*layers, (*find(model, hyper, NORM), *head)),
        build=build,
    )


def build(g: Graph, model: Model, span: Span, shape: StepShape, weights: Weights, caches: Caches) -> Tensor:
    """The graph of one stage: tokens or vectors [width, tokens] in, vectors or logits [vocabulary, outputs] out."""
    hyper = model.hyper
    factors = g.leaf(weights[FACTORS]) if FACTORS in weights else None
    if span.has_entry:
        x = g.get_rows(g.leaf(weights[EMBEDDING]), g.input("tokens", I32, shape.tokens))
    else:
        x = g.input("hidden", F32, hyper.width, shape.tokens)
    for layer in span.blocks:
        block = Block(g, hyper, weights, f"blk.{layer}.")
        attended = block.attention(block.rms_norm("attn_norm", x), shape, caches[layer], factors)
        if span.has_head and layer == hyper.layers - 1:
            attended, x = _wanted(g, attended, shape), _wanted(g, x, shape)
        x = g.add(attended, x)
        x = g.add(block.swiglu(block.rms_norm("ffn_norm", x)), x)
    return _head(g, hyper, _wanted(g, x, shape), weights) if span.has_head else x


def _wanted(g: Graph, x: Tensor, shape: StepShape) -> Tensor:
    """Only the rows whose logits are asked for."""
    if x.ne[1] == shape.outputs:
        return x
    return g.get_rows(x, g.input("outputs", I32, shape.outputs))


def _head(g: Graph, hyper: Hyper, x: Tensor, weights: Weights) -> Tensor:
    top = Block(g, hyper, weights, "")
    normed = top.rms_norm("output_norm", x)
    return top.project("output" if HEAD in weights else "token_embd", normed)


def _hyper(model: ModelIndex) -> Hyper:
    keys = Keys(model)
    if keys.number("expert_count", 0):
        raise ModelError(
            f"{model.path}: mixture-of-experts models ({keys.count('expert_count')} experts) are not supported yet"
        )
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    key_width = keys.count("attention.key_length", max(1, width // heads))
    embedding = model.tensors.get(EMBEDDING)
    hyper = Hyper(
        layers=keys.count("block_count"),
        width=width,
        feed_forward=keys.count("feed_forward_length"),
        heads=heads,
        kv_heads=keys.count("attention.head_count_kv", heads),
        key_width=key_width,
        value_width=keys.count("attention.value_length", max(1, width // heads)),
        vocabulary=embedding.ne[1] if embedding else keys.count("vocab_size"),
        context=keys.count("context_length"),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        attention_scale=keys.number("attention.scale", 0.0) or 1.0 / math.sqrt(key_width),
        rope=rope_of(model, keys, keys.count("rope.dimension_count", key_width), RopeMode.NORMAL),
    )
    if hyper.heads % hyper.kv_heads:
        raise ModelError(f"{model.path}: {heads} heads cannot share {hyper.kv_heads} key-value heads evenly")
    if hyper.rope.dims > key_width or hyper.rope.dims % 2:
        raise ModelError(f"{model.path}: {hyper.rope.dims} of {key_width} channels cannot be rotated")
    return hyper
