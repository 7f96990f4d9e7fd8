"""llama.cpp clients of older protocols on a Drover worker: the same greedy text as of the same client alone.

usage: python tests/interop_old.py [PROTOCOL …]    (7.0 and 3.6 unless told)
Builds the clients first, 10 to 40 minutes each, and keeps them. Each is tried on a worker that speaks its protocol
alone and on one that speaks both. The exit status is 0 if every text is the same.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support import drover
from support.old_peer import RELEASES, OldPeer
from support.peer import PeerUnavailableError
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
    """Build, run, print a row for each protocol and worker."""
    same = True
    try:
        peers = [OldPeer.built(protocol) for protocol in protocols or RELEASES]
    except PeerUnavailableError as error:
        print(error)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for peer in peers:
            alone = [peer.text(drover.MODEL, prompt, TOKENS) for prompt in PROMPTS]
            for options in (("--protocol", peer.protocol), BOTH):
                texts = through_worker(peer, options, Path(folder, "worker.log"))
                equal = sum(text == expected for text, expected in zip(texts, alone, strict=True))
                print(
                    f"llama-cpp-python {peer.release}, protocol {peer.protocol}, worker {' '.join(options)}: "
                    f"{equal} of {len(PROMPTS)} texts of {TOKENS} tokens are the same",
                    flush=True,
                )
                for text, expected in zip(texts, alone, strict=True):
                    if text != expected:
                        same = False
                        print(f"  alone:  {expected!r}\n  worker: {text!r}")
    return 0 if same else 1


def through_worker(peer: OldPeer, options: Sequence[str], log: Path) -> list[str]:
    """The texts of a client whose layers lie on a worker started with these options."""
    port = free_port()
    with drover.start_worker(log, port, "--threads", "1", *options):
        return [peer.text(drover.MODEL, prompt, TOKENS, port) for prompt in PROMPTS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
