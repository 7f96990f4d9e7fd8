"""Architectures: what a file may leave out, and a ModelError that names what is wrong with the others."""

from pathlib import Path
from typing import Any

import pytest

from drover.coordinator import architectures
from drover.coordinator.architectures.blocks import Model
from drover.coordinator.model_file import ModelFile
from drover.errors import ModelError
from support import tiny_model
from support.tiny_model import Tiny


def read(folder: Path, **tiny: Any) -> Model:
    tiny_model.write(folder / "m.gguf", Tiny(**tiny))
    with ModelFile(folder / "m.gguf") as file:
        return architectures.read(file)


def test_numbers(tmp_path: Path) -> None:
    hyper = read(tmp_path, layers=2, heads=4, kv_heads=2, head_width=8, vocab=99).hyper
    assert (hyper.layers, hyper.heads, hyper.kv_heads, hyper.key_width, hyper.vocabulary) == (2, 4, 2, 8, 99)
    assert hyper.attention_scale == pytest.approx(8**-0.5)
    assert (hyper.rope.freq_scale, hyper.rope.ext_factor, hyper.rope.original_context) == (1.0, 0.0, 512)


@pytest.mark.parametrize(
    ("metadata", "freq_scale", "ext_factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 0.25, 0.0),
        ({"rope.scaling.factor": 4.0}, 0.25, 0.0),
        ({"rope.scale_linear": 2.0}, 0.5, 0.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0, 0.0),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}, 0.125, 1.0),
    ],
)
def test_position_scaling(metadata: dict[str, Any], freq_scale: float, ext_factor: float, tmp_path: Path) -> None:
    rope = read(tmp_path, metadata=metadata).hyper.rope
    assert (rope.freq_scale, rope.ext_factor) == (freq_scale, ext_factor)


def test_numbers_given_per_layer_may_agree(tmp_path: Path) -> None:
    assert read(tmp_path, metadata={"attention.head_count_kv": [2, 2, 2]}).hyper.kv_heads == 2


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architecture": "mamba"}, "architecture 'mamba' is not supported; supported: .*llama"),
    "a missing tensor": ({"omitted": ("blk.1.ffn_up.weight",)}, r"tensor blk\.1\.ffn_up\.weight is missing"),
    "no embedding": (
        {"omitted": ("token_embd.weight",), "metadata": {"vocab_size": 80}}, r"tensor token_embd\.weight is missing"
    ),
    "too many layers": ({"metadata": {"block_count": 4}}, r"tensor blk\.3\.attn_norm\.weight is missing"),
    "another width": (
        {"metadata": {"feed_forward_length": 90}},
        r"tensor blk\.0\.ffn_gate\.weight has shape \[64, 96\], expected \[64, 90\]",
    ),
    "no layers": ({"metadata": {"block_count": 0}}, r"llama\.block_count is 0"),
    "a huge number": ({"metadata": {"block_count": 1 << 31}}, "block_count is 2147483648"),
    "text for a number": ({"metadata": {"block_count": "many"}}, "block_count is 'many', expected a number"),
    "not a number": ({"metadata": {"attention.layer_norm_rms_epsilon": float("nan")}}, "rms_epsilon is nan"),
    "layers that differ": ({"metadata": {"attention.head_count": [4, 2, 4]}}, "head_count differs between layers"),
    "uneven groups": ({"metadata": {"attention.head_count_kv": 3}}, "heads cannot share 3 key-value heads"),
    "experts": ({"metadata": {"expert_count": 8}}, r"mixture-of-experts models \(8 experts\) are not supported"),
    "an unknown scaling": ({"metadata": {"rope.scaling.type": "longrope"}}, "rope scaling 'longrope' is not supported"),
    "too many rotated channels": ({"metadata": {"rope.dimension_count": 32}}, "32 of 16 channels cannot be rotated"),
}  # fmt: skip


@pytest.mark.parametrize(("tiny", "message"), WRONG.values(), ids=WRONG)
def test_wrong_files(tiny: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, **tiny)
    assert str(caught.value).startswith(str(tmp_path / "m.gguf"))


def test_a_norm_must_be_f32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    path = tmp_path / "m.gguf"
    tiny_model.write(path, Tiny(layers=1))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    raw[at : at + 4] = int(gguf.GGMLQuantizationType.F16).to_bytes(4, "little")
    path.write_bytes(raw)
    with ModelFile(path) as file, pytest.raises(ModelError, match=r"output_norm\.weight has type F16"):
        architectures.read(file)
