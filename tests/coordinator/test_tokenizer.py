"""Token ids and texts: small vocabularies by hand, real ones against published ids and the stock tokenizer."""

import ast
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drover.coordinator.model_file import ModelFile
from drover.coordinator.pretokenizers import PRE_TOKENIZERS
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import ModelError, RequestError
from support.peer import Peer
from support.vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    cases,
    write_byte_vocabulary,
    write_vocabulary,
)

REAL = (
    "llama-spm",
    "llama-bpe",
    "gpt-2",
    "qwen2",
    "qwen35",
    "phi-3",
    "deepseek-llm",
    "deepseek-coder",
    "falcon",
    "starcoder",
    "refact",
    "mpt",
    "gemma-4",
)
HELLO, WORLD, BOS, EOS, START, END = 259, 264, 265, 266, 267, 268


@cache  # a large vocabulary takes seconds
def load(path: Path) -> Tokenizer:
    with ModelFile(path) as model:
        return Tokenizer.from_model(model)


def sentence_piece(path: Path, **metadata: Any) -> Path:
    """Ids: 3 to 258 are the bytes; then the pieces below in order."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab", "é", "bb"]
    scores = [-1.0, -2.0, -3.0, -0.5, -0.2, -0.1, -4.0, -0.3]
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    tokens += [(text, NORMAL, score) for text, score in zip(pieces, scores, strict=True)]
    tokens += [("[MARK]", USER_DEFINED, 0.0)]
    return write_vocabulary(path, tokens, **{"model": "llama", **metadata})


def test_bytes_words_and_markers(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello world") == [BOS, HELLO, WORLD]
    assert tokenizer.encode("hello world", add_special=False) == [HELLO, WORLD]
    assert tokenizer.encode("<|im_start|>hello<|im_end|>", False) == [START, HELLO, END]
    assert tokenizer.encode("<s>", False, parse_special=False) == [*b"<s>"]
    assert tokenizer.encode("é\x00", False) == [tokenizer.id_of("Ã"), tokenizer.id_of("©"), tokenizer.id_of("Ā")]
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.encode("", False) == []


def test_properties(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos, tokenizer.eos, tokenizer.size) == (BOS, EOS, 269)
    assert tokenizer.special == {BOS, EOS, START, END}
    assert tokenizer.end_of_generation == {EOS, END}
    assert tokenizer.piece(HELLO) == b"hello"
    assert tokenizer.piece(0) == b"\x00"
    assert tokenizer.piece(WORLD) == b" world"
    assert tokenizer.piece(END) == b"<|im_end|>"


def test_decode_hides_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([BOS, HELLO, WORLD, END]) == "hello world"
    assert tokenizer.decode([BOS, HELLO, END], skip_special=False) == "<s>hello<|im_end|>"
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize("token", [-1, 269, 1 << 40])
def test_unknown_ids_are_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(RequestError, match="not in the vocabulary"):
        tokenizer.piece(token)


@pytest.mark.parametrize("text", ["naïve 🦙🦙 café", "👨‍👩‍👧", "a\x00b", "\r\n\t ", "한국어 и русский", "\ud800 lone"])
def test_stream_yields_whole_characters_and_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    clean = text.encode("utf-8", "replace").decode()
    ids = tokenizer.encode(text)
    decoder = tokenizer.stream()
    pieces = [decoder.push(token) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + decoder.flush() == clean == tokenizer.decode(ids)


def test_stream_flushes_a_broken_character(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.stream()
    llama = "🦙".encode()
    alphabet = {tokenizer.piece(i): i for i in range(256)}
    assert [decoder.push(alphabet[bytes((byte,))]) for byte in llama[:3]] == ["", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.push(END) == ""
    assert tokenizer.stream(skip_special=False).push(END) == "<|im_end|>"


def test_sentence_piece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = load(sentence_piece(tmp_path / "spm.gguf"))
    ids = {text: tokenizer.id_of(text) for text in ("▁", "a", "b", "▁a", "ab", "▁ab", "é", "bb", "[MARK]")}
    assert tokenizer.encode("ab") == [1, ids["▁ab"]]
    assert tokenizer.encode("abb", False) == [ids["▁ab"], ids["b"]]
    assert tokenizer.encode("bb ab", False) == [ids["▁"], ids["bb"], ids["▁ab"]]
    assert tokenizer.encode("aé", False) == [ids["▁a"], ids["é"]]
    assert tokenizer.encode("aü", False) == [ids["▁a"], 3 + 0xC3, 3 + 0xBC]
    assert tokenizer.encode("a[MARK]ab", False, parse_special=False) == [ids["▁a"], ids["[MARK]"], ids["▁ab"]]
    assert tokenizer.encode("</s>ab", False) == [2, ids["▁ab"]]
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    assert tokenizer.end_of_generation == {2}


def test_sentence_piece_decodes_what_it_encoded(tmp_path: Path) -> None:
    tokenizer = load(sentence_piece(tmp_path / "spm.gguf"))
    for text in ("ab ab", "  ab", "üb\n", "", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    decoder = tokenizer.stream()
    word = tokenizer.id_of("▁ab")
    assert word is not None
    assert decoder.push(word) == " ab"


def test_sentence_piece_flags(tmp_path: Path) -> None:
    path = sentence_piece(
        tmp_path / "spm.gguf", add_bos_token=False, add_eos_token=True, add_space_prefix=False, eos_token_id=2
    )
    tokenizer = load(path)
    assert tokenizer.encode("ab") == [tokenizer.id_of("ab"), 2]
    assert tokenizer.decode([tokenizer.id_of("▁ab") or 0]) == " ab"


def test_markers_swallow_space_in_phi3_only(tmp_path: Path) -> None:
    name = {"general.name": "Phi3 mini"}
    tokenizer = load(write_byte_vocabulary(tmp_path / "phi.gguf", **name))
    assert tokenizer.encode("<|im_end|>\n hello", False) == [END, HELLO]
    assert tokenizer.encode("<s>\n", False) == [BOS, tokenizer.id_of("Ċ")]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"model": "bert"}, "tokenizer 'bert' is not supported (supported: llama, gpt2"),
        ({"pre": "my-own"}, "pre-tokenizer 'my-own' is not supported (supported: "),
        ({"merges": []}, "no usable merges"),
        ({"merges": ["x"]}, "no usable merges"),
        ({"add_bos_token": 3}, "add_bos_token is 3"),
    ],
)
def test_bad_vocabularies(tmp_path: Path, metadata: dict[str, Any], expected: str) -> None:
    path = write_byte_vocabulary(tmp_path / "bad.gguf", **metadata)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_lists_that_are_too_short_or_of_the_wrong_type(tmp_path: Path) -> None:
    tokens = [("a", NORMAL, 0.0), ("b", NORMAL, 0.0), ("ab", NORMAL, 0.0)]
    path = write_vocabulary(tmp_path / "v.gguf", tokens, model="llama")
    for key, value, expected in (
        ("token_type", [1, 1], "token_type has 2 entries for 3 tokens"),
        ("scores", [0.5], "scores has 1 entries for 3 tokens"),
        ("scores", ["x"], "scores is not a list of the right type"),
        ("tokens", [], "no vocabulary"),
        ("tokens", 7, "tokens is not a list"),
    ):
        with ModelFile(path) as model:
            model.metadata[f"tokenizer.ggml.{key}"] = value
            with pytest.raises(ModelError, match=expected):
                Tokenizer.from_model(model)


def test_ids_out_of_range_are_as_if_not_there(tmp_path: Path) -> None:
    tokenizer = load(write_byte_vocabulary(tmp_path / "v.gguf", bos_token_id=999, eos_token_id=10_000))
    assert tokenizer.bos is None
    assert tokenizer.eos is None
    assert tokenizer.encode("hello") == [HELLO]


def test_missing_pre_tokenizer_means_the_default(tmp_path: Path) -> None:
    assert load(write_byte_vocabulary(tmp_path / "old.gguf", pre="")).encode("hello", False) == [HELLO]


@pytest.mark.parametrize("name", {row: name for name, row in PRE_TOKENIZERS.items()}.values())
def test_every_pre_tokenizer_keeps_the_text(tmp_path: Path, name: str) -> None:
    tokenizer = load(write_byte_vocabulary(tmp_path / "v.gguf", pre=name, add_bos_token=False))
    text = "I've 1234 HTTPServer's  naïve\r\n\n\t東京タワー, «ok»… x_y=3.14;   end "
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.timeout(900)  # the first one may fetch the vocabularies
@pytest.mark.parametrize("name", REAL)
def test_real_vocabulary_gives_the_published_ids(vocabularies: Path, name: str) -> None:
    tokenizer = load(vocabularies / f"ggml-vocab-{name}.gguf")
    rows = cases(vocabularies, name)
    assert len(rows) > 40
    for text, ids in rows:
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids) == text


WORDS = (
    "Hello world I've DON'T it's WE'LL the quick brown é straße naïve 北京 こんにちは 안녕 नमस्ते Привет "
    "مرحبا ÉCOLE 12 345 6789 1234567 ٣٤ ½ 3.14 foo_bar fooBar HTTPServer x=y; {} [] () // -- == ... … "
    "!? @#$%^&* ` ~ | 🚀 😶‍🌫️ 👨‍👩‍👧 ﬁ 「」 ’s"
).split()
GAPS = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n", "\n ", "", "\u00a0", "\u3000")


def noise(rng: random.Random, markers: list[str]) -> str:
    parts = []
    for _ in range(150):
        parts.append(rng.choice(WORDS) if rng.random() < 0.8 else chr(rng.randrange(32, 0x2FF)))
        parts.append(rng.choice(GAPS))
        if rng.random() < 0.05 and markers:
            parts.append(rng.choice(markers))
    return "".join(parts)


@pytest.mark.interop
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2", "llama-bpe", "qwen2"])
def test_noise_gives_the_ids_of_the_stock_tokenizer(peer: Peer, vocabularies: Path, tmp_path: Path, name: str) -> None:
    path = vocabularies / f"ggml-vocab-{name}.gguf"
    tokenizer = load(path)
    rng = random.Random(name)
    markers = [tokenizer.text(token) for token in sorted(tokenizer.special)[:40]]
    for parse_special in (True, False):
        text = noise(rng, markers)
        file = tmp_path / "text"
        file.write_text(text, encoding="utf-8", newline="")
        flags = [] if parse_special else ["--no-parse-special"]
        done = peer.run(
            "llama-tokenize", "-m", path, "-f", file, "--ids", "--log-disable", "--no-escape", *flags, timeout=60
        )
        assert tokenizer.encode(text, True, parse_special) == ast.literal_eval(done.stdout.strip())
