"""A llama forward pass in plain numpy and double precision: the independent truth for the coordinator's graphs.

Nothing of ours is imported; formulas follow the papers (RMSNorm, RoPE, YaRN, SwiGLU, grouped-query attention).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the weights do not tell."""

    layers: int
    heads: int
    kv_heads: int
    head_width: int
    eps: float = 1e-5
    freq_base: float = 10000.0
    linear: float = 1.0
    """Positions are divided by this."""
    yarn: float | None = None
    """YaRN's scale factor."""
    original_context: int = 512


def logits(weights: Mapping[str, NDArray[np.float32]], settings: Settings, tokens: Sequence[int]) -> Array:
    """Logits [tokens, vocabulary] of one sequence."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    x = w["token_embd.weight"][list(tokens)]
    turns = _turns(settings, len(tokens), w.get("rope_freqs.weight"))
    for layer in range(settings.layers):
        prefix = f"blk.{layer}."
        x = x + _attention(w, prefix, settings, _norm(x, w[prefix + "attn_norm.weight"], settings.eps), turns)
        h = _norm(x, w[prefix + "ffn_norm.weight"], settings.eps)
        gate = _linear(w, prefix + "ffn_gate", h)
        x = x + _linear(w, prefix + "ffn_down", gate / (1 + np.exp(-gate)) * _linear(w, prefix + "ffn_up", h))
    top = _norm(x, w["output_norm.weight"], settings.eps)
    return top @ w.get("output.weight", w["token_embd.weight"]).T


def greedy(
    weights: Mapping[str, NDArray[np.float32]], settings: Settings, prompt: Sequence[int], count: int
) -> list[int]:
    """The `count` likeliest next tokens, each after the ones before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits(weights, settings, tokens)[-1])))
    return tokens[len(prompt) :]


def _attention(w: Mapping[str, Array], prefix: str, settings: Settings, x: Array, turns: Array) -> Array:
    n, width = len(x), settings.head_width
    q = _rotate(_linear(w, prefix + "attn_q", x).reshape(n, settings.heads, width), turns)
    k = _rotate(_linear(w, prefix + "attn_k", x).reshape(n, settings.kv_heads, width), turns)
    v = _linear(w, prefix + "attn_v", x).reshape(n, settings.kv_heads, width)
    group = settings.heads // settings.kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(width)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return _linear(w, prefix + "attn_output", np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1))


def _turns(settings: Settings, count: int, factors: Array | None) -> NDArray[np.complex128]:
    """A complex factor for every position and pair of neighbouring channels."""
    pairs = settings.head_width // 2
    frequency = settings.freq_base ** (-np.arange(pairs) / pairs) / (1 if factors is None else factors)
    magnitude = 1.0
    if settings.yarn is None:
        frequency = frequency / settings.linear
    else:
        low, high = (
            settings.head_width
            * math.log(settings.original_context / (rotations * 2 * math.pi))
            / (2 * math.log(settings.freq_base))
            for rotations in (32.0, 1.0)
        )
        low, high = max(0, math.floor(low)), min(settings.head_width - 1, math.ceil(high))
        ramp = np.clip((np.arange(pairs) - low) / max(0.001, high - low), 0, 1)
        frequency = frequency / settings.yarn * ramp + frequency * (1 - ramp)
        magnitude = 1 + 0.1 * math.log(settings.yarn)
    return magnitude * np.exp(1j * np.arange(count)[:, None] * frequency)


def _rotate(x: Array, turns: NDArray[np.complex128]) -> Array:
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turns[:, None, :]
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def _linear(w: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
