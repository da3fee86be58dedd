"""Limits of a ``tokenizer.json``: texts and tokens of bounded length.

The tokenizers library runs the file's components without limits. Components that make a text longer are therefore
bounded by their description, before they are built: a text and its tokens differ in length by a small factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

MAX_TOKENIZER_BYTES = 1 << 25  # of tokenizer.json; DeepSeek-V4's has 6.4 MB
MAX_TOKEN = 1024  # characters of a token
MAX_AFFIX = 64  # characters that a component puts before or after each word
MAX_GROWTH = 16  # factor by which the normalizer, or the decoder, may lengthen a text
MAX_WORD = 1000  # characters of a word that WordPiece compares with its vocabulary, in time of their square
# Unicode's normal forms and lower case are in neither list's factor: they lengthen a text by at most 18, once.
# DeepSeek's own: the time of each is linear in the length of the text.
KNOWN_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
STEADY = {
    "normalizer": "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Strip StripAccents",
    "decoder": "BPEDecoder ByteFallback ByteLevel CTC Fuse Metaspace Strip WordPiece",
}


def check_bounds(data: Any, settings: dict[str, Any], origin: str) -> None:
    """Refuses a tokenizer whose texts can explode.

    Args:
        data: the object in ``tokenizer.json``.
        settings: that in ``tokenizer_config.json``, which may add tokens.

    Raises:
        ValueError: the message names the component and the supported ones.
    """
    try:
        _check(data, settings)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read the tokenizer in {origin}: {error!r}; fetch tokenizer.json again") from error
    except ValueError as error:
        raise ValueError(f"{origin}: {error}; take the tokenizer.json published with the model") from None


def has_unknown_patterns(data: dict[str, Any]) -> bool:
    """Whether a text meets a regular expression that is not DeepSeek's, whose time is not known."""
    steps = [*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))]
    patterns = [step["pattern"] for step in steps if isinstance(step.get("pattern"), dict)]
    return any(pattern.get("Regex", "") and pattern["Regex"] not in KNOWN_PATTERNS for pattern in patterns)


def _check(data: dict[str, Any], settings: dict[str, Any]) -> None:
    for part in STEADY:
        factor = prod(_growth(part, step) for step in _steps(data.get(part)))
        if factor > MAX_GROWTH:
            raise ValueError(f"its {part} can make a text {factor} times longer, at most {MAX_GROWTH} is supported")
    for step in _steps(data.get("pre_tokenizer")):
        _check_pattern("pre_tokenizer", step)
    model = data["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(key) or "") > MAX_AFFIX:
            raise ValueError(f"its {key} has {len(model[key])} characters, at most {MAX_AFFIX} are supported")
    if (model.get("max_input_chars_per_word") or 0) > MAX_WORD:
        raise ValueError(f"its max_input_chars_per_word is more than {MAX_WORD}")
    added = [*(data.get("added_tokens") or []), *settings.get("added_tokens_decoder", {}).values()]
    vocab = model["vocab"]  # of Unigram: pairs of token and score
    tokens = [*vocab] if isinstance(vocab, dict) else [token for token, _ in vocab]
    longest = max([*tokens, *(token["content"] for token in added)], key=len, default="")
    if len(longest) > MAX_TOKEN:
        raise ValueError(
            f"the token {longest[:40]!r}... has {len(longest)} characters, at most {MAX_TOKEN} are supported"
        )


def _steps(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The components of sequences, in order."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        for step in component.get(key, []):
            yield from _steps(step)


def _growth(part: str, step: dict[str, Any]) -> int:
    """The factor by which a normalizer or decoder can lengthen a text."""
    kind = step["type"]
    if kind == "Replace":
        shortest = _check_pattern(part, step)
        return -(-len(step["content"]) // shortest) or 1 if shortest else 1 + len(step["content"])
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind not in STEADY[part].split():
        raise ValueError(f"a {part} of type {kind!r} is not supported, only {STEADY[part]} Prepend Replace Sequence")
    if max(map(len, filter(lambda value: isinstance(value, str), step.values()))) > MAX_AFFIX:
        raise ValueError(f"a text of its {part} {kind} is longer than {MAX_AFFIX} characters")
    if kind == "Strip" and part == "decoder" and max(step["start"], step["stop"]) > 1:
        raise ValueError(f"its decoder strips {step['start']} and {step['stop']} characters, at most 1 is supported")
    return 2 if kind in ("WordPiece", "ByteLevel") else 1


def _check_pattern(part: str, step: dict[str, Any]) -> int:
    """Length of the shortest text that the pattern of a step matches; 0 if that is not known."""
    pattern = step.get("pattern")
    if pattern is None or isinstance(pattern, str):  # no pattern, or the delimiter of CharDelimiterSplit
        return 0
    (value,) = pattern.values()
    if not value:
        raise ValueError(f"its {part} {step['type']} has an empty pattern, which matches everywhere")
    if "Regex" in pattern and part == "decoder":
        raise ValueError(f"its decoder {step['type']} has a regular expression, only strings are supported")
    return len(value) if "String" in pattern else 0
