"""llama.cpp clients of older protocols on a Drover worker: the same greedy text as of the same client alone.

usage: python tests/interop_old.py [PROTOCOL …]    (7.0 and 3.6 unless told)
Builds the clients first, 10 to 40 minutes each, and keeps them. Each is tried on a worker that speaks its protocol
alone and on one that speaks both, with the demo model in F32 and as it is. The exit status is 0 if every text of the
F32 model is the same; K types were rounded otherwise by older ggml, so that a near tie may fall to another token.
"""

import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from support import drover
from support.old_peer import RELEASES, OldPeer
from support.peer import Peer, PeerUnavailableError
from support.processes import free_port

BOTH = ("--protocol", "7.0", "--also", "3.6")
PROMPTS = (
    "The licensor grants you",
    "You may copy and distribute",
    "This program is free software",
    "THE SOFTWARE IS PROVIDED",
    "Subject to the terms",
    "Redistribution and use in source",
    "If any provision of this",
    "Copyright (c)",
)
TOKENS = 64


def main(protocols: Sequence[str]) -> int:
    """Build, run, print a row for each client, worker and model."""
    exact = True
    try:
        stock = Peer.find()
        peers = [OldPeer.built(protocol) for protocol in protocols or RELEASES]
    except PeerUnavailableError as error:
        print(error)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wide = folder / "license-demo.F32.gguf"
        done = stock.run("llama-quantize", "--allow-requantize", drover.MODEL, wide, "F32", timeout=60)
        assert done.returncode == 0, done.stderr
        for peer, model in product(peers, (wide, drover.MODEL)):
            alone = [peer.text(model, prompt, TOKENS) for prompt in PROMPTS]
            for options in (("--protocol", peer.protocol), BOTH):
                texts = through_worker(peer, model, options, folder / "worker.log")
                same = compare(f"{peer}, worker {' '.join(options)}, {model.name}", alone, texts)
                exact = exact and (same or model != wide)
    return 0 if exact else 1


def compare(what: str, alone: Sequence[str], texts: Sequence[str]) -> bool:
    """Print how many texts are the same, and those that are not; whether all are."""
    pairs = list(zip(alone, texts, strict=True))
    equal = sum(one == other for one, other in pairs)
    print(f"{what}: {equal} of {len(pairs)} texts of {TOKENS} tokens are the same", flush=True)
    for one, other in pairs:
        if one != other:
            print(f"  alone:  {one!r}\n  worker: {other!r}")
    return equal == len(pairs)


def through_worker(peer: OldPeer, model: Path, options: Sequence[str], log: Path) -> list[str]:
    """The texts of a client whose layers lie on a worker started with these options."""
    port = free_port()
    with drover.start_worker(log, port, "--threads", "1", *options):
        return [peer.text(model, prompt, TOKENS, port) for prompt in PROMPTS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
