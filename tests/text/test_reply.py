"""Reasoning, answer and tool calls of a reply: divided at tokens, whatever the pieces of its text are."""

from __future__ import annotations

import json
import random

import pytest

from deepseek_attn.text.chat import parse_completion
from deepseek_attn.text.reply import (
    ANSWER,
    DSML,
    END_THINK,
    SYMBOLS,
    ControlMark,
    Reply,
    ReplyStart,
    ToolCall,
    parse_reply,
    spelled_marks,
)

THINKING = ReplyStart(thinking=True)
TOKEN = None  # </think> as a token; texts are ordinary tokens


def in_pieces(text: str, marks: list[ControlMark], start: ReplyStart, cuts: list[int]) -> Reply:
    """The parts of a reply whose text comes in pieces; the pieces of each call are its name and its arguments."""
    parser = start.parser()
    found: dict[str, str] = {"reasoning": "", "answer": ""}
    calls: list[list[str]] = []
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += parser.push(text[begin:end], [mark for mark in marks if mark.offset < end])
    for part, piece in parts + parser.flush():
        assert piece or part == "tool_call"
        if part == "tool_call":
            calls.append([piece, ""])
        elif part == "arguments":
            calls[-1][1] += piece
        else:
            found[part] += piece
    assert [[call.name, call.arguments] for call in parser.tool_calls] == calls
    return Reply(found["reasoning"], found["answer"], parser.tool_calls)


def check_any_pieces(text: str, marks: list[ControlMark], start: ReplyStart, times: int = 20) -> Reply:
    """The parts of the whole text, which are those of its pieces."""
    whole = parse_reply(text, marks, start)
    draw = random.Random(text)
    for _ in range(times):
        assert in_pieces(text, marks, start, sorted(draw.choices(range(len(text) + 1), k=draw.randrange(9)))) == whole
    assert in_pieces(text, marks, start, list(range(len(text)))) == whole
    return whole


@pytest.mark.parametrize(
    ("reply", "start", "expected"),
    [
        (["write </think> tag", TOKEN, "answer"], THINKING, ("write </think> tag", "answer")),
        (["write </think> tag"], THINKING, ("write </think> tag", "")),
        (["say </think> twice"], ANSWER, ("", "say </think> twice")),
        ([TOKEN, "def"], ANSWER, ("", "def")),
        (["a", TOKEN, "b", TOKEN, "c"], THINKING, ("a", "bc")),
        (["\n\na\n\nb\n\n", TOKEN, "\n\nc\n\nd\n"], THINKING, ("a\n\nb", "c\n\nd\n")),
        (["\n\nb\n"], ANSWER, ("", "b\n")),
        (["\n\nb\n"], ReplyStart(before="x"), ("", "\n\nb\n")),
        (["\n\nb\n", TOKEN, "\nc"], ReplyStart(True, "x"), ("\n\nb", "c")),
        (["  a  ", TOKEN, "  b  "], THINKING, ("  a  ", "  b  ")),
        (["a\n\n"], THINKING, ("a\n\n", "")),
        ([TOKEN], THINKING, ("", "")),
        ([], THINKING, ("", "")),
    ],
)
def test_parts(reply, start, expected):
    """As deepseek-recipe 0.2.0 parses these tokens, whole and in pieces of any length."""
    text, marks = "", []
    for part in reply:
        if part is TOKEN:
            marks.append(ControlMark(len(text), END_THINK))
        text += END_THINK if part is TOKEN else part
    assert check_any_pieces(text, marks, start) == (*expected, ())


D = DSML
V4_CALLS = (
    f'<{D}tool_calls>\n<{D}invoke name="w">\n<{D}parameter name="c" string="true">Pa"r\\is\n</{D}parameter>\n'
    f'<{D}parameter name="n" string="false">[1, null]</{D}parameter>\n</{D}invoke>\n<{D}invoke name="v">\n'
    f"</{D}invoke>\n</{D}tool_calls>"
)
V41_CALLS = V4_CALLS.replace("tool_calls", " calls").replace(f"{D}invoke", f"{D} invoke")
V41_CALLS = V41_CALLS.replace(f"{D}parameter", f"{D} parameter")
V32_CALLS = V4_CALLS.replace("tool_calls", "function_calls")
CALLS = (ToolCall("w", '{"c": "Pa\\"r\\\\is\\n", "n": [1, null]}'), ToolCall("v", "{}"))


@pytest.mark.parametrize("block", [V4_CALLS, V41_CALLS, V32_CALLS], ids=["V4", "V4.1", "V3.2"])
@pytest.mark.parametrize(
    ("before", "after", "start", "expected"),
    [
        ("", "", ANSWER, ("", "")),
        ("hi\n\n", "tail", ANSWER, ("", "hi")),
        ("why\n</think>\nhi\n\n", "", THINKING, ("why", "hi")),
        ("why </think>\n\n", "", THINKING, ("why ", "")),
        ("why\n\n", "</think>x", THINKING, ("why", "")),
    ],
    ids=["alone", "behind-an-answer", "all-three", "without-answer", "within-reasoning"],
)
def test_calls(block, before, after, start, expected):
    """As deepseek-recipe 0.2.0 parses V4's and V4.1's."""
    text = before + block + after
    reply = check_any_pieces(text, spelled_marks(text), start)
    assert reply == (*expected, CALLS)
    assert [call.values for call in reply.tool_calls] == [{"c": 'Pa"r\\is\n', "n": [1, None]}, {}]
    assert parse_completion(text + "<｜end▁of▁sentence｜>x", start.thinking) == reply


def test_calls_that_the_prompt_began():
    """``tool_choice="required"``: the prompt ends behind the beginning of the block."""
    head, rest = f"<{D}tool_calls>\n", V4_CALLS.removeprefix(f"<{D}tool_calls>\n")
    start = ReplyStart(before=head.replace(D, SYMBOLS[D]))
    assert check_any_pieces(rest, spelled_marks(rest), start) == ("", "", CALLS)


def test_markup_that_is_spelled_is_text():
    """Without the token it is part of the answer, unless the tokenizer has no such token."""
    assert check_any_pieces(V4_CALLS, [], ANSWER) == ("", V4_CALLS, ())
    assert check_any_pieces(V4_CALLS, [], ReplyStart(spelled=True)) == ("", "", CALLS)
    quoted = V4_CALLS.replace("Pa", f"</{D}parameter>")
    marks = [mark for mark in spelled_marks(quoted) if mark.offset != quoted.index(f"{D}parameter>")]
    reply = check_any_pieces(quoted, marks, ANSWER)
    assert reply.tool_calls[0].values["c"] == f'</{D}parameter>"r\\is\n'


@pytest.mark.parametrize(
    ("text", "name", "arguments", "problem"),
    [
        (V4_CALLS[: V4_CALLS.index('"r')], "w", '{"c": "Pa', "the reply ended within it"),
        (V4_CALLS.replace("[1, null]", "Paris"), "w", None, "its arguments: not valid JSON at line 1, column 27"),
        (V4_CALLS.replace('name="n"', 'name="c"'), "w", None, "its arguments: 'c' is repeated in one object"),
        (V4_CALLS.replace(' string="true"', ""), "w", None, "between two tags"),
        (
            V4_CALLS.replace('w">\n', 'w">\n{"c": 1}\n'),
            "w",
            None,
            r"""'>\n{"c": 1}\n<｜DSML｜' between two tags""",
        ),
        (V4_CALLS.replace("tool_calls>\n", "calls>\n"), "w", None, "between two tags"),
    ],
    ids=["cut-off", "no-json", "twice", "no-type", "other-text", "other-block"],
)
def test_malformed_calls(text, name, arguments, problem):
    """Read as DeepSeek's parser reads them, and not to be executed."""
    call = check_any_pieces(text, spelled_marks(text), ANSWER).tool_calls[0]
    assert call.name == name
    assert arguments is None or call.arguments == arguments
    assert problem in call.problem
    with pytest.raises(ValueError, match=r"the call of 'w' cannot be used: "):
        _ = call.values


def test_no_markup_leaks_wherever_a_reply_ends():
    for end in range(len(V4_CALLS)):
        text = "hi\n\n" + V4_CALLS[:end]
        reply = parse_reply(text, spelled_marks(text), ANSWER)
        complete = D in V4_CALLS[:end]
        assert reply.answer == "hi" if complete else text.startswith(reply.answer)
        assert D not in reply.answer + "".join(call.name + call.arguments for call in reply.tool_calls)


def test_control_tokens_within_values_are_text():
    text = V4_CALLS.replace("Pa", f"a{END_THINK}b{D}c")
    [call, _] = check_any_pieces(text, spelled_marks(text), ANSWER).tool_calls
    assert call.values["c"] == f'a{END_THINK}b{D}c"r\\is\n'
    assert json.loads(call.arguments) == call.values


def test_a_long_run_of_newlines_takes_linear_time():
    text = "\n" * 200_000 + "x"
    assert parse_reply("a" + text, [], ANSWER).answer == "a" + text
