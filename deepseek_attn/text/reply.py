"""Reasoning, answer and tool calls of a reply, divided as its text comes.

Control tokens divide a reply, not texts that are spelled like them: ``</think>`` ends the reasoning, and ``｜DSML｜``
stands in every tag of a tool call. A reply of DeepSeek-V3.2, V4 or V4.1::

    reasoning</think>answer

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

V3.2 names the block ``function_calls``; V4.1 names it ``calls`` and has a blank behind each ``｜DSML｜``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from deepseek_attn.utils.json_files import parse_json

THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
# Control tokens within a text, as lone surrogates, which no decoded text has.
SYMBOLS = {END_THINK: "\ud800", DSML: "\ud801"}
CALL_BLOCKS = ("tool_calls", " calls", "function_calls")  # of V4, V4.1 and V3.2


class ControlMark(NamedTuple):
    """A control token of a reply: the offset in the reply's text at which its text begins, and that text."""

    offset: int
    token: str


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote.

    Attributes:
        name: of the function; in V4.1 with its namespace in front (``search::lookup``).
        arguments: JSON text of an object, as OpenAI's ``function.arguments``; up to where the reply ended.
        problem: the deviation from the format, or None. A call with a problem should not be executed.
    """

    name: str
    arguments: str
    problem: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name, with their JSON types. ValueError: the call has a problem, which it names."""
        if self.problem is not None:
            raise ValueError(f"the call of {self.name!r} cannot be used: {self.problem}")
        return parse_json(self.arguments, f"the arguments of {self.name!r}")


class ReplyStart(NamedTuple):
    """The part of a reply in which a prompt ends.

    Attributes:
        thinking: within reasoning.
        before: the part's beginning in the prompt, with `SYMBOLS` in the place of tokens.
        spelled: the tokenizer has no ``｜DSML｜`` token, so that its spelling counts.
    """

    thinking: bool = False
    before: str = ""
    spelled: bool = False

    def parser(self) -> ReplyParser:
        return ReplyParser(self)


ANSWER = ReplyStart()  # of a prompt that begins no reasoning


class Reply(NamedTuple):
    """The parts of a whole reply."""

    reasoning: str
    answer: str
    tool_calls: tuple[ToolCall, ...]


@dataclass
class _OpenCall:
    """A call as it is read. ``pieces``: of the JSON text of its arguments."""

    name: str
    problem: str | None
    pieces: list[str] = field(default_factory=list)
    closed: bool = False

    def finished(self) -> ToolCall:
        arguments, problem = "".join(self.pieces), self.problem
        if problem is None and not self.closed:
            problem = "the reply ended within it"
        if problem is None:
            try:
                parse_json(arguments, "its arguments")
            except ValueError as error:
                problem = str(error)
        return ToolCall(self.name, arguments, problem)


class ReplyParser:
    """Divides a reply into reasoning, answer and tool calls, as its text comes; no markup is part of any of them.

    The first ``</think>`` token ends the reasoning. Newlines at the beginning of a part are dropped, and so are those
    before ``</think>`` and before a block of calls. Text after the block is dropped. A malformed call is read as
    DeepSeek's own parser reads it, and its `ToolCall.problem` names the unexpected part.

    """

    def __init__(self, start: ReplyStart):
        self._stages = _stages(DSML if start.spelled else SYMBOLS[DSML])
        self._stage = "reasoning" if start.thinking else "answer"
        self._leading = True  # newlines at the beginning of a part are dropped
        self._text = ""  # possibly the beginning of a tag
        self._skipped = ""  # text since the last tag, where the format allows only the rest of tags
        self._problem: str | None = None  # of the call that comes
        self._calls: list[_OpenCall] = []
        self._name = ""  # of the call or the parameter that is being read
        self._string = False  # the value that is being read is a string
        self._found: list[tuple[str, str]] = []
        self._seen = 0  # characters of the reply so far
        self._done = 0  # characters that are read, or belong to a token; past `_seen` inside a token's text
        self._marks = 0  # tokens so far
        self._read(start.before)
        self._found = []
        if start.before and self._stage in ("reasoning", "answer"):
            self._leading, self._text = False, ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls so far, the last of them up to where the reply is."""
        return tuple(call.finished() for call in self._calls)

    def push(self, text: str, marks: Sequence[ControlMark]) -> list[tuple[str, str]]:
        """Takes the next text and returns the parts that are certain, in order.

        ``("reasoning", text)`` and ``("answer", text)``; ``("tool_call", name)`` begins a call, and the texts of
        ``("arguments", text)`` up to the next one are the JSON of its arguments.

        Args:
            marks: control tokens of the whole reply, those known so far.
        """
        self._read(self._with_symbols(text, marks))
        return self._take()

    def flush(self) -> list[tuple[str, str]]:
        """The parts that were held back, when nothing follows."""
        self._rest(self._text)
        self._text = ""
        return self._take()

    def _take(self) -> list[tuple[str, str]]:
        found, self._found = self._found, []
        joined: list[tuple[str, str]] = []
        for part, piece in found:
            if joined and joined[-1][0] == part != "tool_call":
                joined[-1] = (part, joined[-1][1] + piece)
            else:
                joined.append((part, piece))
        return joined

    def _with_symbols(self, text: str, marks: Sequence[ControlMark]) -> str:
        start, self._seen = self._seen, self._seen + len(text)
        pieces = []
        for mark in marks[self._marks :]:
            if mark.offset >= self._seen:
                break
            pieces += [text[self._done - start : mark.offset - start], SYMBOLS[mark.token]]
            self._done, self._marks = mark.offset + len(mark.token), self._marks + 1
        if self._done < self._seen:
            pieces.append(text[self._done - start :])
            self._done = self._seen
        return "".join(pieces)

    def _read(self, text: str) -> None:
        """Takes text with symbols up to the last character that cannot belong to a tag."""
        self._text += text
        while (stage := self._stages[self._stage]).pattern is not None:
            match = stage.pattern.search(self._text)
            if match is None:
                break
            rest = self._text[: match.start()]
            self._rest(rest.rstrip("\n") if match.lastgroup in stage.strips else rest)
            self._text = self._text[match.end() :]
            getattr(self, f"_on_{match.lastgroup}")()
        keep = stage.held(self._text)
        self._rest(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]

    def _rest(self, text: str) -> None:
        """Takes text that belongs to no tag."""
        for token, symbol in SYMBOLS.items():
            text = text.replace(symbol, token)
        if self._stage in ("reasoning", "answer"):
            text = text.lstrip("\n") if self._leading else text
            self._leading = self._leading and not text
            self._emit(self._stage, text)
        elif self._stage == "value":
            self._argue(_escaped(text) if self._string else text)
        elif self._stage in ("name", "parameter"):
            self._name += text
        elif self._stage != "done":
            self._skipped += text

    def _emit(self, part: str, text: str) -> None:
        if text:
            self._found.append((part, text))

    def _argue(self, text: str) -> None:
        self._calls[-1].pieces.append(text)
        self._emit("arguments", text)

    def _enter(self, stage: str) -> None:
        """Enters the next stage; records text between two tags where the format allows none."""
        expected = self._stages[self._stage].between
        if expected is not None and not expected.fullmatch(self._skipped):
            problem = f"its markup has {self._skipped!r:.80} between two tags"
            if stage == "name":
                self._problem = problem
            elif self._calls:
                self._calls[-1].problem = self._calls[-1].problem or problem
        self._stage, self._skipped = stage, ""

    # one method for each tag, named as its group in the patterns of `_stages`

    def _on_end_think(self) -> None:
        self._leading = self._stage == "reasoning"
        self._enter("answer")

    def _on_block(self) -> None:
        self._enter("calls")

    def _on_invoke(self) -> None:
        self._enter("name")
        self._name = ""

    def _on_close(self) -> None:
        self._enter("done")

    def _on_named(self) -> None:
        self._enter("call")
        self._calls.append(_OpenCall(self._name, self._problem))
        self._problem = None
        self._found.append(("tool_call", self._name))

    def _on_parameter(self) -> None:
        self._enter("parameter")
        self._name = ""

    def _on_parameter_named(self) -> None:
        self._enter("type")
        call = self._calls[-1]
        self._argue((", " if call.pieces else "{") + f'"{_escaped(self._name)}": ')

    def _on_string(self) -> None:
        self._enter("value")
        self._string = True
        self._argue('"')

    def _on_json(self) -> None:
        self._enter("value")
        self._string = False

    def _on_value_end(self) -> None:
        if self._string:
            self._argue('"')
        self._enter("call")

    def _on_call_end(self) -> None:
        self._enter("calls")
        call = self._calls[-1]
        self._argue("}" if call.pieces else "{}")
        call.closed = True


@dataclass(frozen=True)
class _Stage:
    """Where a reply is.

    Attributes:
        pattern: the tags that end it, each a named group; None: nothing does.
        literals: their texts, for a text at whose end one begins.
        strips: tags that newlines before them belong to.
        between: the only text that the format has here; None: any.
    """

    pattern: re.Pattern[str] | None
    literals: tuple[str, ...] = ()
    strips: tuple[str, ...] = ()
    between: re.Pattern[str] | None = None

    def held(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a tag, newlines before it included."""
        length = max((_overlap(text, literal) for literal in self.literals), default=0)
        rest = text[: len(text) - length]
        return length + (len(rest) - len(rest.rstrip("\n")) if self.strips else 0)


@cache
def _stages(tag: str) -> dict[str, _Stage]:
    """The text that ends each stage; ``tag``: the placeholder of the ``｜DSML｜`` token."""
    end, begin_tag, end_tag = SYMBOLS[END_THINK], f"<{tag}", f"</{tag}"
    closing = tuple(f"{end_tag}{block}>" for block in CALL_BLOCKS)

    def stage(between: str | None = None, strips: tuple[str, ...] = (), **tags: str | tuple[str, ...]) -> _Stage:
        literals = {name: (texts,) if isinstance(texts, str) else texts for name, texts in tags.items()}
        groups = [f"(?P<{name}>{'|'.join(map(re.escape, texts))})" for name, texts in literals.items()]
        known = re.compile(between) if between else None
        return _Stage(re.compile("|".join(groups)), sum(literals.values(), ()), strips, known)

    # between two tags: the rest of the first, and the beginning of the second, in which the token is a text again
    next_tag = rf">\s*(?:<{DSML} ?)?"
    return {
        "reasoning": stage(end_think=end, block=begin_tag, strips=("end_think", "block")),
        "answer": stage(end_think=end, block=begin_tag, strips=("block",)),
        "calls": stage(
            invoke='invoke name="', close=closing, between=rf"(?: ?invoke|{'|'.join(CALL_BLOCKS)}){next_tag}"
        ),
        "name": stage(named='"'),
        "call": stage(parameter='parameter name="', call_end=end_tag, between=rf"(?: ?parameter)?{next_tag}"),
        "parameter": stage(parameter_named='"'),
        "type": stage(string='true">', json='false">', between=' string="'),
        "value": stage(value_end=end_tag),
        "done": _Stage(None),
    }


def _overlap(text: str, literal: str) -> int:
    """Length of the longest end of ``text`` that begins ``literal``, and is not all of it."""
    return next((n for n in range(min(len(literal) - 1, len(text)), 0, -1) if text.endswith(literal[:n])), 0)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def parse_reply(text: str, marks: Sequence[ControlMark], start: ReplyStart) -> Reply:
    """The parts of a whole reply."""
    parser = start.parser()
    found: dict[str, list[str]] = {}
    for part, piece in parser.push(text, marks) + parser.flush():
        found.setdefault(part, []).append(piece)
    return Reply("".join(found.get("reasoning", [])), "".join(found.get("answer", [])), parser.tool_calls)


def spelled_marks(text: str) -> list[ControlMark]:
    """A mark for each text that is spelled like a control token."""
    return [ControlMark(match.start(), match[0]) for match in re.finditer("|".join(map(re.escape, SYMBOLS)), text)]
