"""A fingerprint of a model: tells one file from another in the time it takes to open it, however large it is.

It covers, of every file of the model in order, the size, all that precedes the tensors, and the first 4 KiB of each
tensor: some MiB of a model of 40 GB. Whoever quantizes, trains or merges a model changes nearly all of its tensors, so
another model has another fingerprint; the same bytes under another name have the same. It does not show damage further
in, nor malice: that is what a SHA-256 is for.
"""

import hashlib

from drover.coordinator.model_file import ModelFile
from drover.errors import ModelReplacedError

SAMPLE = 4 << 10
LENGTH = 32
"""Hexadecimal digits: fewer than a SHA-256 has, so that nobody takes one for the other."""


def of(file: ModelFile) -> str:
    """The fingerprint of an open model."""
    digest = hashlib.sha256()
    for number, view in enumerate(file.views):
        tensors = [tensor for tensor in file.tensors.values() if tensor.shard == number]
        head = min((tensor.offset for tensor in tensors), default=len(view))
        digest.update(len(view).to_bytes(8, "little") + head.to_bytes(8, "little"))
        digest.update(view[:head])
        for tensor in tensors:
            digest.update(view[tensor.offset : tensor.offset + min(tensor.nbytes, SAMPLE)])
    return digest.hexdigest()[:LENGTH]


def check(file: ModelFile, expected: str) -> None:
    """ModelReplacedError if a model has another fingerprint."""
    found = of(file)
    if found != expected:
        raise ModelReplacedError(
            f"{file.path}: another model than the one that was proven (its fingerprint is {found}, not {expected}); "
            "load it with `drover load` first, which reports its fingerprint, or put the proven file back"
        )
