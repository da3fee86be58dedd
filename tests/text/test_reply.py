"""Reasoning and answer of a reply: divided at tokens, whatever the pieces of its text are."""

from __future__ import annotations

import random

import pytest

from deepseek_attn.text.reply import END_THINK, ReplySplitter, split_reply

TOKEN = None  # </think> as a token; texts are ordinary tokens


@pytest.mark.parametrize(
    ("reply", "thinking", "expected"),
    [
        (["write </think> tag", TOKEN, "answer"], True, ("write </think> tag", "answer")),
        (["write </think> tag"], True, ("write </think> tag", "")),
        (["say </think> twice"], False, ("", "say </think> twice")),
        ([TOKEN, "def"], False, ("", "def")),
        (["a", TOKEN, "b", TOKEN, "c"], True, ("a", "bc")),
        (["\n\na\n\nb\n\n", TOKEN, "\n\nc\n\nd\n"], True, ("a\n\nb", "c\n\nd\n")),
        (["\n\nb\n"], False, ("", "b\n")),
        (["  a  ", TOKEN, "  b  "], True, ("  a  ", "  b  ")),
        (["a\n\n"], True, ("a\n\n", "")),
        ([TOKEN], True, ("", "")),
        ([], True, ("", "")),
    ],
)
def test_parts(reply, thinking, expected):
    """As deepseek-recipe 0.2.0 parses these tokens, whole and in pieces of any length."""
    text, marks = "", []
    for part in reply:
        if part is TOKEN:
            marks.append(len(text))
        text += END_THINK if part is TOKEN else part
    assert split_reply(text, thinking, marks) == expected
    draw = random.Random(text)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(6)))
        splitter, found = ReplySplitter(thinking), {"reasoning": "", "answer": ""}
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            for part, piece in splitter.push(text[start:end], [mark for mark in marks if mark < end]):
                assert piece
                found[part] += piece
        for part, piece in splitter.flush():
            found[part] += piece
        assert tuple(found.values()) == expected
