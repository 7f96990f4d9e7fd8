"""Text to token ids and back, for the vocabulary in a GGUF file, through a Hugging Face `tokenizers` object.

The ids are those llama.cpp gives. Only words are merged by `tokenizers`; markers such as `<|im_end|>` are cut out here
before, because which of them count depends on the call. The only import of `tokenizers`.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import structlog
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Words

from drover.coordinator import vocabulary as vocab
from drover.coordinator.model_file import ModelFile
from drover.coordinator.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from drover.coordinator.vocabulary import Kind, Vocabulary
from drover.errors import ModelError, RequestError

SPACE = "▁"  # U+2581 stands for a space in SentencePiece vocabularies
WHITESPACE = " \t\n\v\f\r"


class Family(NamedTuple):
    """How the vocabularies of one `tokenizer.ggml.model` work."""

    merges: Callable[[Vocabulary], list[tuple[str, str]]]
    pre: PreTokenizer | None
    """None: the file names it."""
    byte_level: bool
    """Texts are bytes in GPT-2's alphabet, instead of characters with U+2581 for a space."""
    add_bos: bool = False
    space_prefix: bool = False
    default_ids: Mapping[str, int] = MappingProxyType({})


class Tokenizer:
    """The vocabulary of one model; immutable, so any thread may use it."""

    def __init__(
        self, vocabulary: Vocabulary, words: Words, family: Family, *, add_bos: bool, add_eos: bool, space_prefix: bool
    ) -> None:
        self.bos = vocabulary.bos
        self.eos = vocabulary.eos
        self.end_of_generation = vocabulary.end_of_generation
        self.size = len(vocabulary.texts)
        self.special = frozenset(i for i, kind in enumerate(vocabulary.kinds) if kind in vocab.HIDDEN)
        self.add_bos = add_bos and self.bos is not None
        self.add_eos = add_eos and self.eos is not None
        self._vocabulary = vocabulary
        self._words = words
        self._byte_level = family.byte_level
        self._space_prefix = space_prefix
        self._markers = _markers(vocabulary)
        self._swallow_after: frozenset[int] = frozenset()

    @classmethod
    def from_model(cls, model: ModelFile) -> Self:
        """Build from the file's metadata; ModelError if the vocabulary is damaged or of a kind we do not support."""
        try:
            return cls._from_metadata(model)
        except ModelError as error:
            raise ModelError(f"{model.path}: {error}") from None

    @classmethod
    def _from_metadata(cls, model: ModelFile) -> Self:
        metadata = model.metadata
        name = metadata.get(vocab.PREFIX + "model")
        family = FAMILIES.get(name) if isinstance(name, str) else None
        if family is None:
            raise ModelError(f"tokenizer {name!r} is not supported (supported: {', '.join(FAMILIES)})")
        vocabulary = vocab.read(metadata, family.default_ids)
        pre = family.pre or _pre_tokenizer(metadata.get(vocab.PREFIX + "pre"))
        self = cls(
            vocabulary,
            _build(vocabulary, family, pre),
            family,
            add_bos=vocab.flag(metadata, "add_bos_token", family.add_bos or pre.add_bos),
            add_eos=vocab.flag(metadata, "add_eos_token", False),
            space_prefix=vocab.flag(metadata, "add_space_prefix", family.space_prefix),
        )
        self._swallow_after = _swallowing(vocabulary, str(metadata.get("general.name", "")))
        return self

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` puts BOS and EOS where the model wants them, `parse_special` reads
        the texts of control tokens as those tokens instead of as plain text."""
        ids = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        after_marker = True
        for part in self._partition(text.encode("utf-8", "replace").decode(), parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_words(part, after_marker)
            after_marker = isinstance(part, int)
        if add_special and self.add_eos and self.eos is not None:
            ids.append(self.eos)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD.

        The space that `encode` puts in front is taken away again, so `decode(encode(text)) == text`. RequestError if
        an id is not in the vocabulary."""
        data = b"".join(self.piece(i) for i in ids if not (skip_special and i in self.special))
        if self._space_prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes one token stands for: maybe a part of a character. RequestError if the id is out of range."""
        text = self.text(token)
        kind = self._vocabulary.kinds[token]
        if kind is Kind.BYTE:
            return _byte_of(text)
        if kind in vocab.MARKERS:
            return text.encode()
        if kind is not Kind.NORMAL:
            return b""  # unused ids: llama.cpp shows nothing for them either
        if self._byte_level:
            return b"".join(_BYTE_OF_CHAR.get(char) or char.encode() for char in text)
        return text.replace(SPACE, " ").encode()

    def text(self, token: int) -> str:
        """What the vocabulary calls a token, not decoded. RequestError if the id is out of range."""
        if not 0 <= token < self.size:
            raise RequestError(f"token id {token} is not in the vocabulary (0 to {self.size - 1})")
        return self._vocabulary.texts[token]

    def id_of(self, text: str) -> int | None:
        """The token that the vocabulary calls so, or None."""
        return self._vocabulary.ids.get(text)

    def stream(self, skip_special: bool = True) -> "IncrementalDecoder":
        """A decoder for text that follows other text: no space is taken away at its start."""
        return IncrementalDecoder(self, skip_special)

    def _encode_words(self, text: str, after_marker: bool) -> list[int]:
        if not self._byte_level:
            prefix = " " if self._space_prefix and after_marker else ""
            text = (prefix + text).replace(" ", SPACE)
        return self._words.encode(text, add_special_tokens=False).ids

    def _partition(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut markers out of the text, longest marker first, so that none is found inside a longer one."""
        parts: list[str | int] = [text] if text else []
        for marker, token, hidden in self._markers:
            if marker in text and (parse_special or not hidden):
                parts = [piece for part in parts for piece in self._cut(part, marker, token)]
        return parts

    def _cut(self, part: str | int, marker: str, token: int) -> Iterator[str | int]:
        if isinstance(part, int):
            yield part
            return
        for number, piece in enumerate(part.split(marker)):
            if number:
                yield token
            text = piece.lstrip(WHITESPACE) if number and token in self._swallow_after else piece
            if text:
                yield text


class IncrementalDecoder:
    """Tokens in, text out as soon as its characters are whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes, maybe none."""
        if token in self._hidden:
            return ""
        return self._utf8.decode(self._tokenizer.piece(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character never became whole."""
        return self._utf8.decode(b"", final=True)


def _markers(vocabulary: Vocabulary) -> list[tuple[str, int, bool]]:
    """Text, id and whether it is hidden, of each token that is cut out of the text before all others."""
    found = [
        (vocabulary.texts[i], i, kind in vocab.HIDDEN)
        for i, kind in enumerate(vocabulary.kinds)
        if kind in vocab.MARKERS
    ]
    return sorted(found, key=lambda marker: -len(marker[0].encode()))


def _swallowing(vocabulary: Vocabulary, model_name: str) -> frozenset[int]:
    """Markers that swallow the white space after them: a habit of Phi-3 that its files do not record."""
    if not any(name in model_name.lower() for name in ("phi-3", "phi3")):
        return frozenset()
    kept = {vocabulary.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
    return frozenset(i for i, kind in enumerate(vocabulary.kinds) if kind in vocab.MARKERS and i not in kept)


def _pre_tokenizer(name: object) -> PreTokenizer:
    """The row for a name: none given means the default, with a warning, as such files are old; another name than those
    we know would silently give wrong tokens, so it is a ModelError (llama.cpp does both the same way)."""
    if not name:
        structlog.get_logger().warning("vocabulary names no pre-tokenizer", using="default")
        return DEFAULT
    row = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if row is None:
        raise ModelError(f"pre-tokenizer {name!r} is not supported (supported: {', '.join(sorted(PRE_TOKENIZERS))})")
    return row


def _build(vocabulary: Vocabulary, family: Family, pre: PreTokenizer) -> Words:
    merges = family.merges(vocabulary)
    if not merges:
        raise ModelError("the vocabulary has no usable merges or scores (tokenizer.ggml.merges, tokenizer.ggml.scores)")
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    if family.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    try:
        words = Words(
            models.BPE(dict(vocabulary.ids), merges, ignore_merges=pre.whole_words, byte_fallback=not family.byte_level)
        )
    except Exception as error:  # `tokenizers` raises bare Exception for everything
        raise ModelError(f"the vocabulary cannot be used: {error}") from error
    if steps:
        words.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return words


def _usable_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges whose parts and result are tokens: the others could never end as one."""
    ids = vocabulary.ids
    return [merge for merge in vocabulary.merges if merge[0] in ids and merge[1] in ids and merge[0] + merge[1] in ids]


def _score_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose joint text has the best score: the same as merges, best first."""
    ids, scores = vocabulary.ids, vocabulary.scores
    ranked: list[tuple[float, str, str]] = []
    for text, token in ids.items():
        score = -scores[token]
        for i in range(1, len(text)):
            left, right = text[:i], text[i:]
            if left in ids and right in ids:
                ranked.append((score, left, right))
    ranked.sort(key=lambda row: row[0])
    return [(left, right) for _, left, right in ranked]


def _byte_of(text: str) -> bytes:
    """The byte that a token `<0xNN>` stands for."""
    try:
        return bytes((int(text[3:5], 16),))
    except ValueError:
        return text.encode()


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's alphabet: visible Latin-1 characters stand for themselves; the other bytes, in order, are U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    pairs = [(byte, byte) for byte in visible] + [(0x100 + i, byte) for i, byte in enumerate(hidden)]
    return {chr(code): bytes((byte,)) for code, byte in pairs}


_BYTE_OF_CHAR = _byte_alphabet()

FAMILIES: dict[str, Family] = {
    "llama": Family(
        _score_merges,
        PreTokenizer(()),
        byte_level=False,
        add_bos=True,
        space_prefix=True,
        default_ids={"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    ),
    "gpt2": Family(_usable_merges, None, byte_level=True),
    "gemma4": Family(_usable_merges, PreTokenizer((r"\n+",)), byte_level=False, add_bos=True),
}
