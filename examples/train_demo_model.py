"""Train the demo model: a 6-layer llama-architecture model of license texts, small enough to sit in a repository.

Reads the plain-text licenses that Debian installs in /usr/share/common-licenses, trains a byte-level BPE vocabulary
(2,048 tokens) and the model, and writes an F16 GGUF. Quantize it afterwards with stock llama-quantize (the shipped
file is Q4_K_M). Needs torch beside what `make install` installs. About ten minutes on two cores.
"""

import argparse
import json
import math
import time
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, WIDTH, LAYERS, FEED_FORWARD, CONTEXT = 2048, 256, 6, 768, 1024
HEADS, KV_HEADS, HEAD_WIDTH = 8, 4, 32
EPS, FREQ_BASE = 1e-5, 10000.0
BOS, EOS = "<|begin|>", "<|end|>"
LICENSES = Path("/usr/share/common-licenses")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"


def main() -> None:
    """Corpus -> vocabulary -> model -> file."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=384)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    texts = corpus()
    vocabulary = train_vocabulary(texts)
    bos, eos = vocabulary.token_to_id(BOS), vocabulary.token_to_id(EOS)
    documents = [np.array([bos, *vocabulary.encode(text).ids, eos]) for text in texts]
    stream = np.concatenate([documents[i] for _ in range(8) for i in rng.permutation(len(documents))])
    print(f"{sum(map(len, documents))} tokens in {len(documents)} documents", flush=True)
    model = Model()
    train(model, stream, arguments.steps, arguments.batch, arguments.length, rng)
    write(arguments.out, model, vocabulary, bos, eos)


def corpus() -> list[str]:
    """The licenses, with the layout of their lines taken out."""
    texts = []
    for path in sorted(LICENSES.iterdir()):
        if not path.is_symlink():
            lines = path.read_text(errors="replace").splitlines()
            texts.append("\n".join(" ".join(line.split()) for line in lines).strip())
    return texts


def train_vocabulary(texts: list[str]) -> Tokenizer:
    """A byte-level BPE vocabulary, split as GPT-2 splits."""
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary.train_from_iterator(texts, trainer)
    assert vocabulary.get_vocab_size() == VOCABULARY
    return vocabulary


def train(model: "Model", stream: np.ndarray, steps: int, batch: int, length: int, rng: np.random.Generator) -> None:
    """AdamW over random pieces of the corpus, warm-up and cosine decay."""
    print(sum(parameter.numel() for parameter in model.parameters()), "parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    started = time.time()
    for step in range(steps):
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 40) * decay
        starts = rng.integers(0, len(stream) - length - 1, batch)
        tokens = torch.from_numpy(np.stack([stream[start : start + length + 1] for start in starts]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            print(step, round(loss.item(), 3), f"{time.time() - started:.0f}s", flush=True)


class Block(torch.nn.Module):
    """Attention and feed-forward with their residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = torch.nn.RMSNorm(WIDTH, eps=EPS), torch.nn.RMSNorm(WIDTH, eps=EPS)
        self.attn_q = linear(WIDTH, HEADS * HEAD_WIDTH)
        self.attn_k, self.attn_v = linear(WIDTH, KV_HEADS * HEAD_WIDTH), linear(WIDTH, KV_HEADS * HEAD_WIDTH)
        self.attn_output = linear(HEADS * HEAD_WIDTH, WIDTH)
        self.ffn_gate, self.ffn_up = linear(WIDTH, FEED_FORWARD), linear(WIDTH, FEED_FORWARD)
        self.ffn_down = linear(FEED_FORWARD, WIDTH)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[batch, tokens, width] in and out."""
        batch, tokens, _ = x.shape
        normed = self.attn_norm(x)
        q, k, v = (
            layer(normed).view(batch, tokens, heads, HEAD_WIDTH).transpose(1, 2)
            for layer, heads in ((self.attn_q, HEADS), (self.attn_k, KV_HEADS), (self.attn_v, KV_HEADS))
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(attended.transpose(1, 2).reshape(batch, tokens, -1))
        normed = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(normed)) * self.ffn_up(normed))


class Model(torch.nn.Module):
    """The whole decoder: tokens [batch, tokens] in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embd = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.output_norm = torch.nn.RMSNorm(WIDTH, eps=EPS)
        self.output = linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, tokens, vocabulary]."""
        frequencies = FREQ_BASE ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angles = torch.arange(tokens.shape[1])[:, None] * frequencies
        x = self.token_embd(tokens)
        for block in self.blocks:
            x = block(x, (angles.cos().to(x.dtype), angles.sin().to(x.dtype)))
        return self.output(self.output_norm(x))


def linear(inputs: int, outputs: int) -> torch.nn.Linear:
    """A matrix."""
    return torch.nn.Linear(inputs, outputs, bias=False)


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions over adjacent pairs, as the llama architecture of GGUF has them."""
    cos, sin = rotation
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def write(out: Path, model: Model, vocabulary: Tokenizer, bos: int, eos: int) -> None:
    """The GGUF file: matrices in F16, norms in F32."""
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name("Drover demo: license texts")
    writer.add_description("6-layer llama trained on the licenses in Debian's common-licenses")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_rope_freq_base(FREQ_BASE)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    write_vocabulary(writer, vocabulary, bos, eos)
    for name in ("token_embd", "output_norm", "output"):
        add_tensor(writer, name, getattr(model, name).weight)
    for index, block in enumerate(model.blocks):
        for name, layer in block.named_children():
            add_tensor(writer, f"blk.{index}.{name}", layer.weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print("wrote", out, out.stat().st_size)


def write_vocabulary(writer: gguf.GGUFWriter, vocabulary: Tokenizer, bos: int, eos: int) -> None:
    """Tokens in the order of their ids, merges in the order of their ranks."""
    bpe = json.loads(vocabulary.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in (BOS, EOS) else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def add_tensor(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    """A weight under its GGUF name."""
    kind = np.float32 if weight.dim() == 1 else np.float16
    writer.add_tensor(f"{name}.weight", weight.detach().float().numpy().astype(kind))


if __name__ == "__main__":
    main()
