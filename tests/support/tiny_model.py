"""Writes a tiny llama GGUF with random weights in milliseconds: any shape, any weight type that `gguf` can quantize."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tiny:
    """The shape of a model; `metadata` and `omitted` bend it for tests of bad files."""

    layers: int = 3
    width: int = 64
    ff: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 16
    vocab: int = 80
    context: int = 512
    type: str = "F32"
    tied: bool = False
    biases: bool = False
    factors: bool = False
    seed: int = 1
    metadata: dict[str, Any] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()
    architecture: str = "llama"


def write(path: Path, tiny: Tiny, tensors_per_file: int = 0) -> dict[str, Floats]:
    """Write the file; returns every tensor as the floats that its stored bytes stand for.

    With `tensors_per_file` it is split: files named after it, NAME-00001-of-0000N.gguf.
    """
    writer = gguf.GGUFWriter(str(path), tiny.architecture, split_max_tensors=tensors_per_file)
    for key, value in {**_metadata(tiny), **tiny.metadata}.items():
        _add(writer, f"{tiny.architecture}.{key}", value)
    stored = {}
    for name, values in _tensors(tiny).items():
        if name in tiny.omitted:
            continue
        kind = gguf.GGMLQuantizationType[tiny.type if values.ndim > 1 else "F32"]
        raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        stored[name] = gguf.quants.dequantize(raw, kind).reshape(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _metadata(tiny: Tiny) -> dict[str, Any]:
    return {
        "block_count": tiny.layers,
        "context_length": tiny.context,
        "embedding_length": tiny.width,
        "feed_forward_length": tiny.ff,
        "attention.head_count": tiny.heads,
        "attention.head_count_kv": tiny.kv_heads,
        "attention.key_length": tiny.head_width,
        "attention.value_length": tiny.head_width,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": tiny.head_width,
        "rope.freq_base": 10000.0,
    }


def _tensors(tiny: Tiny) -> dict[str, Floats]:
    rng = np.random.default_rng(tiny.seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (tiny.vocab, tiny.width)}
    kv = tiny.kv_heads * tiny.head_width
    q = tiny.heads * tiny.head_width
    parts = {
        "attn_q": (q, tiny.width),
        "attn_k": (kv, tiny.width),
        "attn_v": (kv, tiny.width),
        "attn_output": (tiny.width, q),
        "ffn_gate": (tiny.ff, tiny.width),
        "ffn_up": (tiny.ff, tiny.width),
        "ffn_down": (tiny.width, tiny.ff),
    }
    for layer in range(tiny.layers):
        shapes |= {f"blk.{layer}.{norm}.weight": (tiny.width,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
        if tiny.biases:
            shapes |= {f"blk.{layer}.{name}.bias": shape[:1] for name, shape in parts.items()}
    shapes["output_norm.weight"] = (tiny.width,)
    if not tiny.tied:
        shapes["output.weight"] = (tiny.vocab, tiny.width)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = 1 + 0.1 * values if "norm" in name else values / np.float32(np.sqrt(shape[-1]))
    if tiny.factors:
        tensors["rope_freqs.weight"] = np.linspace(1, 4, tiny.head_width // 2, dtype=np.float32)
    return tensors


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def write_stub(path: Path, architecture: str = "llama", tensor: gguf.GGMLQuantizationType | None = None) -> Path:
    """A GGUF of a few bytes: an architecture, and one tensor of some type."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(1)
    if tensor is not None:
        block, size = gguf.GGML_QUANT_SIZES[tensor]
        writer.add_tensor("token_embd.weight", np.zeros((block, size), np.uint8), raw_dtype=tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
