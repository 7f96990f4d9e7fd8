"""What a GGUF file says about its tokens, checked: texts, kinds, scores, merges and the ids with a meaning.

Pure: no tokenization here. Where files are known to be wrong about a token, the tables at the top put it right, the
same way llama.cpp does, so that both see the same tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from drover.errors import ModelError

PREFIX = "tokenizer.ggml."


class Kind(IntEnum):
    """What a token is for, numbered as in the file."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


HIDDEN = frozenset({Kind.CONTROL, Kind.UNKNOWN})
MARKERS = HIDDEN | {Kind.USER_DEFINED}

# Texts that end a generation in every vocabulary that has them, whatever the file says.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "<|tool_response>",
        "<turn|>",
        "<eos>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
    }
)
# Texts of fill-in-the-middle models that end a generation: padding, next repository, next file.
FILL_END_TEXTS = frozenset(
    {
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    }
)
# Texts around what is to be filled in: control tokens, whatever the file says.
FILL_TEXTS = frozenset(
    {
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<fim-prefix>",
        "<fim-suffix>",
        "<fim-middle>",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
        "<PRE>",
        "<SUF>",
        "<MID>",
        "▁<PRE>",
        "▁<SUF>",
        "▁<MID>",
        "<|code_prefix|>",
        "<|code_suffix|>",
        "<|code_middle|>",
        "<|prefix|>",
        "<|suffix|>",
        "<|middle|>",
    }
)
# The parts of the harmony format: always shown, never hidden as control tokens.
SHOWN_TEXTS = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
# (all of these are there) -> (this text does not end a generation, and has this kind)
NOT_AN_END: tuple[tuple[frozenset[str], str, Kind], ...] = (
    (frozenset({"<|return|>", "<|call|>"}), "<|end|>", Kind.USER_DEFINED),
    (frozenset({"<|calls|>", "<|flush|>"}), "<|end|>", Kind.USER_DEFINED),
    (frozenset({"<|tool_response>"}), "</s>", Kind.NORMAL),
)
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model; the list index is the id."""

    model: str
    texts: tuple[str, ...]
    kinds: tuple[Kind, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    ids: Mapping[str, int]
    bos: int | None
    eos: int | None
    unknown: int | None
    end_of_generation: frozenset[int]


def read(metadata: Mapping[str, Any], defaults: Mapping[str, int]) -> Vocabulary:
    """The vocabulary in a model's metadata; `defaults` are ids (by key) for files that do not name them. ModelError."""
    texts = tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(_list(metadata, "tokens", str)))
    if not texts:
        raise ModelError("the file has no vocabulary (tokenizer.ggml.tokens is missing or empty)")
    ids = {text: i for i, text in enumerate(texts)}
    special = _special_ids(metadata, defaults, len(texts))
    kinds = _kinds(metadata, texts)
    ends = {special[key] for key in END_KEYS if key in special}
    ends |= {ids[text] for text in (END_TEXTS | FILL_END_TEXTS) & ids.keys()}
    for text in (END_TEXTS | FILL_END_TEXTS | FILL_TEXTS) & ids.keys():
        kinds[ids[text]] = Kind.CONTROL
    for text in SHOWN_TEXTS & ids.keys():
        kinds[ids[text]] = Kind.USER_DEFINED
    for together, text, kind in NOT_AN_END:
        if together <= ids.keys() and text in ids:
            ends.discard(ids[text])
            kinds[ids[text]] = kind
    return Vocabulary(
        model=str(metadata.get(PREFIX + "model")),
        texts=texts,
        kinds=tuple(kinds),
        scores=_scores(metadata, len(texts)),
        merges=tuple(_merge(entry) for entry in _list(metadata, "merges", str)),
        ids=ids,
        bos=special.get("bos_token_id"),
        eos=special.get("eos_token_id"),
        unknown=special.get("unknown_token_id"),
        end_of_generation=frozenset(ends),
    )


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean under `tokenizer.ggml.`; ModelError if it is something else."""
    value = metadata.get(PREFIX + key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{PREFIX}{key} is {value!r}, where true or false is needed")
    return value


def _list(metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> list[Any]:
    values = metadata.get(PREFIX + key, [])
    if not isinstance(values, list) or (values and not isinstance(values[0], kind)):
        raise ModelError(f"{PREFIX}{key} is not a list of the right type")
    return values


def _kinds(metadata: Mapping[str, Any], texts: tuple[str, ...]) -> list[Kind]:
    raw = _list(metadata, "token_type", int) or [Kind.NORMAL] * len(texts)
    if len(raw) < len(texts):
        raise ModelError(f"{PREFIX}token_type has {len(raw)} entries for {len(texts)} tokens")
    known = {int(kind): kind for kind in Kind}
    return [known.get(value, Kind.UNDEFINED) for value in raw[: len(texts)]]


def _scores(metadata: Mapping[str, Any], count: int) -> tuple[float, ...]:
    raw = _list(metadata, "scores", (float, int)) or [0.0] * count
    if len(raw) < count:
        raise ModelError(f"{PREFIX}scores has {len(raw)} entries for {count} tokens")
    return tuple(raw[:count])


def _special_ids(metadata: Mapping[str, Any], defaults: Mapping[str, int], count: int) -> dict[str, int]:
    """Ids by key; one that is out of range is as if it were not there."""
    found = {key: value for key, value in defaults.items() if value < count}
    for key in ("bos_token_id", "unknown_token_id", *END_KEYS):
        value = metadata.get(PREFIX + key)
        if isinstance(value, int) and 0 <= value < count:
            found[key] = value
    return found


def _merge(entry: str) -> tuple[str, str]:
    left, _, right = entry[1:].partition(" ")
    return entry[:1] + left, right
