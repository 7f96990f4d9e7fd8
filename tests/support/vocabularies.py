"""Vocabularies for tests: small ones written here, real ones out of a published source package, kept in a cache folder.

Real ones are never part of this repository. The package holds each with texts and the token ids expected for them, and
chat templates of real models.
"""

import fcntl
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf

PACKAGE = "llama-cpp-python==0.3.36"
INSIDE = "/vendor/llama.cpp/models/"
FETCH_SECONDS = 600
REPOSITORY = Path(__file__).parents[2]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class VocabulariesUnavailableError(Exception):
    """Why there are no real vocabularies to test with, in one line."""


def real_vocabularies() -> Path:
    """The folder with `ggml-vocab-*.gguf` and `templates`, fetched if need be; VocabulariesUnavailableError if that
    fails, at once where it has failed before in this process."""
    folder, problem = _fetched()
    if problem is not None:
        raise VocabulariesUnavailableError(problem)
    return folder


def cases(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    """The texts that come with a vocabulary, and their token ids without special ones."""
    base = folder / f"ggml-vocab-{name}.gguf"
    texts = base.with_name(base.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = base.with_name(base.name + ".out").read_text().split("\n")
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=False)]


def write_vocabulary(path: Path, tokens: Sequence[tuple[str, int, float]], **metadata: Any) -> Path:
    """A GGUF file with a vocabulary of (text, kind, score) and no tensors; metadata keys without `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [text for text, _, _ in tokens])
    writer.add_array("tokenizer.ggml.token_type", [kind for _, kind, _ in tokens])
    writer.add_array("tokenizer.ggml.scores", [score for _, _, score in tokens])
    for key, value in metadata.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        _ADD[type(value)](writer, name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_byte_vocabulary(path: Path, **metadata: Any) -> Path:
    """A GPT-2 style vocabulary: a token for each byte (its id is the byte), a few words, then markers."""
    letters = _byte_alphabet()
    words = ["he", "ll", "hell", "hello", "Ġw", "or", "ld", "Ġwor", "Ġworld"]
    markers = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens = [(text, NORMAL, 0.0) for text in [*letters, *words]] + [(text, CONTROL, 0.0) for text in markers]
    ids = {text: i for i, (text, _, _) in enumerate(tokens)}
    defaults = {
        "model": "gpt2",
        "pre": "gpt-2",
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld"],
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "add_bos_token": True,
    }
    return write_vocabulary(path, tokens, **{**defaults, **metadata})


def _add_int(writer: gguf.GGUFWriter, key: str, value: int) -> None:
    writer.add_uint32(key, value)


_ADD: Mapping[type, Any] = {
    str: gguf.GGUFWriter.add_string,
    bool: gguf.GGUFWriter.add_bool,
    int: _add_int,
    list: gguf.GGUFWriter.add_array,
}


def _byte_alphabet() -> list[str]:
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


@cache
def _fetched() -> tuple[Path, str | None]:
    root = Path(os.environ.get("DROVER_TEST_CACHE") or REPOSITORY / ".cache")
    folder = root / PACKAGE.replace("==", "-")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / "vocabularies.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                _fetch(root, folder)
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        return folder, f"{PACKAGE} cannot be fetched: {error}"
    return folder, None


def _fetch(root: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        patience = ["--retries", "1", "--timeout", "20", "--disable-pip-version-check"]
        subprocess.run(
            [*command, *patience, "--dest", scratch, PACKAGE],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=FETCH_SECONDS,
        )
        (archive,) = Path(scratch).glob("*.tar.gz")
        partial = Path(scratch) / "models"
        with tarfile.open(archive) as files:
            for member in files:
                head, found, tail = member.name.partition(INSIDE)
                if found and "/" not in head and member.isfile():
                    member.name = tail
                    files.extract(member, partial, filter="data")
        partial.rename(folder)
