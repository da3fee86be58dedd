"""Prompts and chat messages from files."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import io
import os
import re
import select
import stat
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from deepseek_attn.cli.options import read_text
from deepseek_attn.text.conversation import Chat
from deepseek_attn.utils.json_files import JSONSyntaxError, parse_json

if TYPE_CHECKING:
    from deepseek_attn.engine.sampling import SamplingParams

CHUNK_BYTES = 1 << 16  # bytes per read from a file of prompts
KINDS = ("prompt", "token_ids", "messages")  # keys of a line that is an object
BEGINS_AS_OBJECT = re.compile(r'\s*\[?\s*\{\s*"')  # start of a line meant to be JSON, even if broken
AS_TEXT = "to complete the line as it stands, write it as a JSON string"


def read_messages(path: str) -> Chat:
    """The conversation of a JSON file: messages, or an object with ``messages`` and options; ``-``: standard input.

    Raises:
        ValueError: the file is not readable, or has other contents.
    """
    from deepseek_attn.text.template import plain_messages

    found = parse_json(read_text("--messages", path), f"--messages {path}")
    try:
        fields = found if isinstance(found, dict) and "messages" in found else {"messages": found}
        return Chat(plain_messages(fields["messages"]), checked_options(fields))
    except ValueError as error:
        raise ValueError(f"--messages {path}: {error}") from error


def read_tools(path: str) -> list[Any]:
    """The tools of a JSON file: a list, or an object with ``tools``. ValueError: not readable, or other contents."""
    found = parse_json(read_text("--tools", path), f"--tools {path}")
    tools = found.get("tools") if isinstance(found, dict) and "name" not in found else found
    if not isinstance(tools, list):
        raise ValueError(
            f'--tools {path}: expected a JSON list of {{"type": "function", "function": {{"name": ...}}}}, got '
            f"{type(found).__name__}"
        )
    return tools


def checked_options(fields: dict[str, Any]) -> dict[str, Any]:
    """The options of an object that has ``messages``. ValueError: other keys."""
    known = chat_keys()
    unknown = sorted(fields.keys() - {"messages", *known})
    if unknown:
        raise ValueError(f"no such keys: {', '.join(unknown)[:200]}; beside messages there are {', '.join(known)}")
    return {key: value for key, value in fields.items() if key in known and value is not None}


class PromptLine(NamedTuple):
    """The prompt of one line.

    Attributes:
        prompt: text, token ids, or a conversation.
        params: the sampling parameters: fields of the line override the flags.
        id: the prompt's name, which its output line repeats.
    """

    prompt: str | list[int] | Chat
    params: SamplingParams
    id: str | int | None = None


class PromptLines(Iterator[PromptLine | None]):
    """One prompt per line that is not blank.

    A line is a JSON object with ``prompt``, ``token_ids`` or ``messages``, an ``id``, fields of `SamplingParams` and,
    beside messages, of `ChatOptions`; a JSON string; a JSON list of token ids or of messages; or plain
    text. Lines are read as they are consumed.
    Yields None while the next line of a stream has not arrived.

    Args:
        path: ``-`` reads standard input.
        params: the sampling parameters of the flags.
        system: the system message of ``--system``.

    Raises:
        ValueError: the file cannot be read; or, while iterating, a line is not UTF-8 text, is JSON of another form, or
            repeats an earlier id.

    Attributes:
        regular: the input is a regular file, which can be read again.
    """

    def __init__(self, path: str, params: SamplingParams, system: str | None = None):
        self.path, self._params, self._system = path, params, system
        self._line_of: dict[str | int, int] = {}  # line number of each id
        try:
            if path == "-" and sys.stdin is None:
                raise OSError(errno.EBADF, "there is no standard input")
            # unbuffered: all bytes read so far are in `_lines` and `_rest`, so that select sees the remaining input
            self._file = io.FileIO(sys.stdin.fileno() if path == "-" else path, closefd=path != "-")
            self.regular = path != "-" and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        except OSError as error:
            raise ValueError(f"--prompts {path}: {error.strerror or error}") from error
        self._lines: deque[bytes] = deque()
        self._rest, self._ended, self._number = bytearray(), False, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __next__(self) -> PromptLine | None:
        while True:
            while self._lines:
                self._number += 1
                try:
                    line = self._lines.popleft().decode()
                    if line.strip():
                        return self._checked(parse_line(line, self._params))
                except UnicodeDecodeError:
                    raise ValueError(f"--prompts {self.path}: line {self._number}: not UTF-8 text") from None
                except ValueError as error:
                    raise ValueError(f"--prompts {self.path}: line {self._number}: {error}") from error
            if self._ended:
                raise StopIteration
            if not self.regular and not select.select([self._file], [], [], 0)[0]:
                return None
            self._read()

    def _checked(self, line: PromptLine) -> PromptLine:
        if self._system and isinstance(line.prompt, Chat):
            raise ValueError("--system beside messages: write the system message into the line, as its first")
        if line.id is not None and (before := self._line_of.setdefault(line.id, self._number)) != self._number:
            raise ValueError(f"line {before} has the id {line.id!r:.80} too: give each line one of its own")
        return line

    def _read(self) -> None:
        try:
            data = self._file.read(CHUNK_BYTES)
        except OSError as error:
            raise ValueError(f"--prompts {self.path}: {error.strerror}") from error
        if data is None:  # a stream that does not block
            return
        self._ended = not data
        whole, end, rest = data.rpartition(b"\n")
        if end or self._ended:
            self._lines.extend((bytes(self._rest) + whole).split(b"\n"))
            self._rest = bytearray(rest)
        else:
            self._rest += rest


def parse_line(line: str, params: SamplingParams) -> PromptLine:
    """The prompt of a line. ValueError: JSON of another form than `PromptLines` takes, with the remedy."""
    line = line.removesuffix("\r")
    try:
        value = parse_json(line, "the line")
    except ValueError as error:
        if isinstance(error, JSONSyntaxError) and not BEGINS_AS_OBJECT.match(line):
            return PromptLine(line, params)
        raise ValueError(f"{error}; {AS_TEXT}") from None
    if isinstance(value, dict):
        return parse_object(value, params)
    if isinstance(value, list):
        return PromptLine(value if is_token_ids(value) else Chat(checked_messages(value), {}), params)
    return PromptLine(value if isinstance(value, str) else line, params)


def parse_object(fields: dict[str, Any], params: SamplingParams) -> PromptLine:
    """The prompt of a JSON object; null is the same as an absent key."""
    fields = {key: value for key, value in fields.items() if value is not None}
    if "custom_id" in fields:
        raise ValueError(
            'it is a line of an OpenAI batch: write {"id": ..., "messages": [...], "max_tokens": ...}, with its '
            "custom_id as the id and the keys of its body that are named so here"
        )
    sampling = [field.name for field in dataclasses.fields(params) if field.name != "logits_processors"]
    chat = chat_keys() if "messages" in fields else ()
    unknown = fields.keys() - {*KINDS, "id", *sampling, *chat}
    if unknown:
        raise ValueError(
            f"no such keys: {', '.join(sorted(unknown))[:200]}; there are {', '.join(KINDS)} (one of them), id, and "
            f"{', '.join((*sampling, *chat))}; {AS_TEXT}"
        )
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        raise ValueError(f"one of {', '.join(KINDS)} is needed, got {' and '.join(kinds) or 'none'}; {AS_TEXT}")
    [kind] = kinds
    prompt, given = fields[kind], f"{kind} is {fields[kind]!r:.80}"
    if kind == "prompt" and not isinstance(prompt, str):
        raise ValueError(f"{given}: expected text; token ids are token_ids, a conversation is messages")
    if kind == "token_ids" and not (isinstance(prompt, list) and is_token_ids(prompt)):
        raise ValueError(f"{given}: expected a list of integers")
    name = fields.get("id")
    if name is not None and (not isinstance(name, (str, int)) or isinstance(name, bool)):
        raise ValueError(f"id is {name!r:.80}: expected text or an integer")
    own = {key: fields[key] for key in sampling if key in fields}
    if kind == "messages":
        prompt = Chat(checked_messages(prompt), {key: fields[key] for key in chat if key in fields})
    return PromptLine(prompt, dataclasses.replace(params, **own) if own else params, name)


def chat_keys() -> tuple[str, ...]:
    """Names of the options that a conversation can have."""
    from deepseek_attn.text.chat import ChatOptions

    return tuple(ChatOptions.__annotations__)


def checked_messages(value: Any) -> list[dict[str, Any]]:
    """The chat messages of decoded JSON; ValueError for anything else."""
    from deepseek_attn.text.template import plain_messages

    if isinstance(value, list) and not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{value!r:.80} is neither a list of token ids nor a list of messages; {AS_TEXT}")
    return plain_messages(value)


def is_token_ids(value: list) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def chat_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the flags."""
    flags = {
        "thinking": args.thinking or None,
        "reasoning_effort": args.reasoning_effort,
        "tools": args.tools,
        "allow_special": args.allow_special or None,
    }
    return {name: value for name, value in flags.items() if value is not None}


def conversation_of(args: argparse.Namespace, prompt: Any) -> Chat:
    """The conversation of a prompt.

    A `Chat` keeps its messages, and its options override the flags. Text becomes the user message, after the system
    message of ``--system`` if it is given.

    Raises:
        ValueError: the prompt is token ids, which take no chat format.
    """
    options = chat_options(args)
    if isinstance(prompt, Chat):
        if {"thinking", "reasoning_effort"} & prompt.options.keys():  # not to be mixed
            options = {key: value for key, value in options.items() if key not in ("thinking", "reasoning_effort")}
        return Chat(prompt.messages, options | prompt.options)
    if not isinstance(prompt, str):
        raise ValueError("--chat takes text; token ids are run as they are")
    system = [{"role": "system", "content": args.system}] if args.system else []
    return Chat([*system, {"role": "user", "content": prompt}], options)
