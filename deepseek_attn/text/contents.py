"""Message contents that stay text: a special token that is spelled out in one does not become that token.

A template makes one string of markers and contents. A mark, a character that neither has, is put inside each spelling
of an added token in the contents before, so that afterwards markers are found in the string and spellings are not. The
text between markers loses its marks and is tokenized without the added vocabulary.
"""

from __future__ import annotations

import json
from typing import Any

from deepseek_attn.text.tokenizer import Tokenizer, check_number

FIRST_MARK = 0xF0000  # a plane of private-use characters


def mark_messages(
    tokenizer: Tokenizer, messages: list[Any], max_tokens: int | None = None
) -> tuple[list[Any], str | None]:
    """JSON values with a mark in each spelling of an added token, and the mark; None where nothing is spelled.

    Raises:
        ValueError: far more than ``max_tokens`` tokens, or a spelling that a mark does not break.
    """
    text = json.dumps(messages, ensure_ascii=False)
    mark = next(mark for mark in map(chr, range(FIRST_MARK, FIRST_MARK + 2**16)) if mark not in text)
    marked = [_marked(tokenizer, message, mark, max_tokens) for message in messages]
    return (messages, None) if marked == messages else (marked, mark)


def encode_marked(tokenizer: Tokenizer, text: str, mark: str, max_tokens: int | None = None) -> list[int]:
    """Token ids of a rendered conversation; ValueError if there are more than ``max_tokens``, see `Tokenizer.encode`.

    Where the tokenizer's own model makes an added token of a text, the text is tokenized in pieces, cut at the marks.
    """
    ids, done = [], 0
    for start, end, token in [*tokenizer.find_added(text, max_tokens), (len(text), len(text), None)]:
        piece = text[done:start]
        found = tokenizer.encode_plain(piece.replace(mark, ""), max_tokens)
        if mark in piece and not tokenizer.added_ids.isdisjoint(found):
            found = [i for part in piece.split(mark) for i in tokenizer.encode_plain(part, max_tokens)]
        ids += found if token is None else [*found, token]
        if max_tokens is not None:
            check_number(len(ids) // 2, max_tokens)
        done = end
    return ids


def _marked(tokenizer: Tokenizer, value: Any, *args: Any) -> Any:
    if isinstance(value, dict):
        return {_marked(tokenizer, key, *args): _marked(tokenizer, item, *args) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(tokenizer, item, *args) for item in value]
    return _marked_text(tokenizer, value, *args) if isinstance(value, str) else value


def _marked_text(tokenizer: Tokenizer, value: str, mark: str, max_tokens: int | None) -> str:
    while spans := [(start, end) for start, end, _ in tokenizer.find_added(value, max_tokens) if end - start > 1]:
        if any(mark in value[start:end] for start, end in spans):
            raise ValueError(
                "a message spells out a special token, and the tokenizer's normalizer leaves no way to keep it text: "
                "remove it, or allow special tokens (allow_special=True, --allow-special)"
            )
        for start, end in reversed(spans):
            middle = (start + end) // 2
            value = value[:middle] + mark + value[middle:]
    return value
