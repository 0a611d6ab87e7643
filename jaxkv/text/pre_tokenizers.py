"""How byte-level BPE cuts a text into words before merging: a rule for each `tokenizer.ggml.pre` name of GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from jaxkv.core.errors import ModelLoadError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _letters_then(numbers: str) -> str:
    """The GPT-4 shape: words with one leading mark, `numbers`, punctuation with its line ends, white space."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(numbers: str, suffix: str) -> str:
    """The shape that also cuts where lower case turns into upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _split(*patterns: str) -> PreTokenizer:
    """Cuts by each pattern in turn (matches and what lies between them both stay), then spells bytes."""
    steps: list[PreTokenizer] = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


@dataclass(frozen=True, slots=True)
class PreRule:
    """What a `pre` name stands for.

    ignore_merges: a word that is in the vocabulary is one token, whatever the merges say.
    add_bos: the custom where the file does not say.
    """

    build: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2_RULE = PreRule(_gpt2)
_SINGLE_DIGITS_RULE = PreRule(_single_digits)
_THREE_DIGITS_RULE = PreRule(lambda: _split(_letters_then(r"\p{N}{1,3}")))
_LLAMA3_RULE = PreRule(lambda: _split(_letters_then(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True)
_QWEN2_RULE = PreRule(lambda: _split(_letters_then(r"\p{N}")), normalizer=NFC)

_RULES: dict[str, PreRule] = {
    # What files from before the name existed were made with.
    "default": PreRule(lambda: _split(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "smollm": _SINGLE_DIGITS_RULE,
    "starcoder": _SINGLE_DIGITS_RULE,
    "refact": _SINGLE_DIGITS_RULE,
    "codeshell": _SINGLE_DIGITS_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "dbrx": _THREE_DIGITS_RULE,
    "smaug-bpe": _THREE_DIGITS_RULE,
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "deepseek-coder": PreRule(lambda: _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "tekken": PreRule(lambda: _split(_cased_words(r"\p{N}", "")), ignore_merges=True, add_bos=True),
    "gpt-4o": PreRule(lambda: _split(_cased_words(r"\p{N}{1,3}", rf"{_CONTRACTION}?"))),
}


def pre_rule(name: str) -> PreRule:
    """The rule of a `pre` name; raises ModelLoadError for an unknown one, since a guess gives wrong token ids."""
    try:
        return _RULES[name]
    except KeyError:
        raise ModelLoadError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not known here (known: {', '.join(_RULES)}): "
            "load the model from its Hugging Face directory, whose tokenizer.json holds the rule"
        ) from None
