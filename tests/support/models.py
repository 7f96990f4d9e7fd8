"""Model files to measure with: random weights in a given shape, written once and quantized by the stock tool."""

from pathlib import Path

from support import make_gguf
from support.peer import Peer, configured_root

SHAPES = {
    "1b": make_gguf.Shape(),
    "wide": make_gguf.Shape(layers=2, embd=4096, ff=14336, heads=32, kv=8, vocab=23400),
    "small": make_gguf.Shape(layers=8, embd=512, ff=1536, heads=8, kv=4, vocab=8000),
    "moe": make_gguf.Shape(layers=16, embd=1024, ff=512, heads=16, kv=4, experts=64, used=8),
}
QUANTIZE_SECONDS = 1800


def model_file(peer: Peer, shape: str, kind: str) -> Path:
    """The model of this shape and type, made if it is not there yet, in a folder beside the peer's."""
    folder = configured_root().parent / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{shape}.{kind}.gguf"
    if made.exists():
        return made
    source, partial = folder / f"{shape}.F16.gguf", made.with_suffix(".partial")
    if not source.exists():
        print(f"writing {source}", flush=True)
        make_gguf.write(partial, SHAPES[shape])
        partial.rename(source)
    if made == source:
        return made
    print(f"writing {made}", flush=True)
    done = peer.run("llama-quantize", source, partial, kind, timeout=QUANTIZE_SECONDS)
    if done.returncode != 0:
        raise SystemExit(f"llama-quantize ended with {done.returncode}: {done.stderr[-2000:]}")
    partial.rename(made)
    return made
