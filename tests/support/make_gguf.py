"""Writes a GGUF with random weights and a byte-level vocabulary: any shape, for measuring and for recording.

usage: python -m support.make_gguf OUT.gguf [--layers 22 --embd 2048 --ff 5632 --heads 32 --kv 4 --vocab 32000]
Weights are F16; `llama-quantize` of the stock peer makes other types of them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

ALPHABET = "etaoinshrdlucmfwypvbgkqjxz"
SPECIAL = ("<|s|>", "<|end|>", "<|pad|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|s|>' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The hyper-parameters of a llama-like model; the defaults are a 1.1 B one."""

    layers: int = 22
    embd: int = 2048
    ff: int = 5632
    heads: int = 32
    kv: int = 4
    vocab: int = 32000
    ctx: int = 32768
    experts: int = 0
    """If there are any, a qwen3moe model: `ff` is the width of each, `used` are chosen for a token."""
    used: int = 0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embd // self.heads


def write(path: Path, shape: Shape, std: float = 0.02, seed: int = 7) -> None:
    """Write the model; the same arguments give the same bytes."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "qwen3moe" if shape.experts else "llama")
    _add_hyper_parameters(writer, shape)
    _add_vocabulary(writer, shape.vocab, rng)
    _add_weights(writer, shape, std, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_hyper_parameters(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("synthetic-llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.ctx)
    writer.add_embedding_length(shape.embd)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.ff)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int, rng: np.random.Generator) -> None:
    """All bytes, then pairs of letters, then random pairs of pairs, then the special tokens."""
    symbols = _byte_symbols()
    letters = [symbols[ord(letter)] for letter in ALPHABET] + [symbols[ord(" ")]]
    pairs = [(a, b) for a in letters for b in letters]
    ordinary = size - len(SPECIAL)
    words = dict.fromkeys(symbols)
    merges = []
    for a, b in pairs:
        if len(words) < ordinary:
            words[a + b] = None
            merges.append(f"{a} {b}")
    twos = [a + b for a, b in pairs]
    while len(words) < ordinary:
        a, b = twos[rng.integers(len(twos))], twos[rng.integers(len(twos))]
        if a + b not in words:
            words[a + b] = None
            merges.append(f"{a} {b}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*words, *SPECIAL])
    writer.add_token_types([gguf.TokenType.NORMAL] * ordinary + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ordinary)
    writer.add_eos_token_id(ordinary + 1)
    writer.add_pad_token_id(ordinary + 2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def _add_weights(writer: gguf.GGUFWriter, shape: Shape, std: float, rng: np.random.Generator) -> None:
    def matrix(name: str, *size: int) -> None:
        values = rng.standard_normal(size, dtype=np.float32) * std
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def norm(name: str, width: int = shape.embd) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    kv_width = shape.kv * shape.head_dim
    matrix("token_embd", shape.vocab, shape.embd)
    norm("output_norm")
    matrix("output", shape.vocab, shape.embd)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        norm(f"{block}attn_norm")
        norm(f"{block}ffn_norm")
        matrix(f"{block}attn_q", shape.embd, shape.embd)
        matrix(f"{block}attn_k", kv_width, shape.embd)
        matrix(f"{block}attn_v", kv_width, shape.embd)
        matrix(f"{block}attn_output", shape.embd, shape.embd)
        if shape.experts:
            norm(f"{block}attn_q_norm", shape.head_dim)
            norm(f"{block}attn_k_norm", shape.head_dim)
            matrix(f"{block}ffn_gate_inp", shape.experts, shape.embd)
            matrix(f"{block}ffn_gate_exps", shape.experts, shape.ff, shape.embd)
            matrix(f"{block}ffn_up_exps", shape.experts, shape.ff, shape.embd)
            matrix(f"{block}ffn_down_exps", shape.experts, shape.embd, shape.ff)
            continue
        matrix(f"{block}ffn_gate", shape.ff, shape.embd)
        matrix(f"{block}ffn_up", shape.ff, shape.embd)
        matrix(f"{block}ffn_down", shape.embd, shape.ff)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: one option per field of Shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    for name in Shape.__slots__:
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape(), name))
    options = vars(parser.parse_args(arguments))
    write(options.pop("out"), Shape(**options))


if __name__ == "__main__":
    main()
