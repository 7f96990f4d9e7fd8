"""How byte-level vocabularies cut text into words before merging: a table from `tokenizer.ggml.pre` to patterns.

Pure data. Each pattern cuts what the one before it left over; the pieces it matches are never cut across again by
merges. The patterns are those the models were trained with, in Oniguruma's syntax.
"""

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """Patterns in order, and what else goes with this kind of vocabulary."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is in the vocabulary stands as it is, whatever the merges would make of it."""
    add_bos: bool = False
    """Whether prompts begin with the BOS token where the file does not say."""


# The building blocks; each alternation is tried from left to right.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PREFIXED_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _cl100k(digits: str, contraction: str = _CONTRACTION + "|") -> str:
    """The family that began with cl100k: words keep one character before them, digits come in short groups."""
    return f"{contraction}{_PREFIXED_WORD}|{digits}|{_SYMBOLS}|{_SPACES}"


def _o200k(digits: str, contraction: str) -> str:
    """The family that began with o200k: as above, and words also end where lower case turns to upper."""
    words = (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contraction}"
    )
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# Letters of alphabets with two cases, and the CJK planes, as the DeepSeek tokenizers draw them.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK_RUN = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_WORDS = (
    rf"{_ASCII_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

GPT2 = PreTokenizer((_GPT2,))
DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
LLAMA3 = PreTokenizer((_LLAMA3,))
QWEN2 = PreTokenizer((_QWEN2,))
DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_WORDS))
DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": DEFAULT,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4 "
        "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe".split(),
        GPT2,
    ),
    **dict.fromkeys(
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2".split(),
        DIGITS_GPT2,
    ),
    **dict.fromkeys(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano".split(),
        LLAMA3._replace(whole_words=True, add_bos=True),
    ),
    **dict.fromkeys("dbrx smaug-bpe chatglm-bpe".split(), LLAMA3),
    **dict.fromkeys("glm4 glm5".split(), LLAMA3._replace(whole_words=True)),
    **dict.fromkeys(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2".split(),
        QWEN2,
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), whole_words=True),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK_RUN, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_RUN, r"\p{N}")),
    **dict.fromkeys("deepseek-v3 hunyuan-dense joyai-llm hy_v4".split(), DEEPSEEK3),
    **dict.fromkeys("poro-chat bloom gpt3-finnish".split(), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer((_o200k(r"\p{N}", ""),), whole_words=True, add_bos=True),
    **dict.fromkeys(
        "gpt-4o llama4 kanana2 talkie minimax-m2".split(),
        PreTokenizer((_o200k(r"\p{N}{1,3}", _CONTRACTION + "?"),)),
    ),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTION}|{_PREFIXED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    ),
    **dict.fromkeys(
        "bailingmoe bailingmoe2 llada-moe".split(),
        PreTokenizer(
            (rf"'(?i:[sdmt]|ll|ve|re)|{_PREFIXED_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",),
        ),
    ),
}
