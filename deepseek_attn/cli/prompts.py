"""Prompts and chat messages from files."""

from __future__ import annotations

import argparse
import errno
import io
import os
import select
import stat
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Self

from deepseek_attn.cli.options import read_text
from deepseek_attn.utils.json_files import parse_json

CHUNK_BYTES = 1 << 16  # read at once from a file of prompts


def read_messages(path: str) -> list[dict]:
    """The chat messages of a JSON file; ``-`` reads standard input. ValueError if it is none, or not readable."""
    from deepseek_attn.text.template import plain_messages

    found = parse_json(read_text("--messages", path), f"--messages {path}")
    try:
        return plain_messages(found)
    except ValueError as error:
        raise ValueError(f"--messages {path}: {error}") from error


class PromptLines(Iterator[str | list[int] | None]):
    """One prompt per line that is not blank: a JSON string, a JSON list of token ids, or plain text as it stands.

    Lines are read as they are taken. None: the next line of a stream is not there yet.

    Args:
        path: ``-`` reads standard input.

    Raises:
        ValueError: it cannot be read, or, when it is taken, a line is not UTF-8 text.

    Attributes:
        regular: a file that can be read again.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            if path == "-" and sys.stdin is None:
                raise OSError(errno.EBADF, "there is no standard input")
            # not buffered: what has been read is in `_lines` and `_rest`, and select sees the remainder
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

    def __next__(self) -> str | list[int] | None:
        while True:
            while self._lines:
                self._number += 1
                try:
                    line = self._lines.popleft().decode()
                except UnicodeDecodeError:
                    raise ValueError(f"--prompts {self.path}: not UTF-8 text in line {self._number}") from None
                if line.strip():
                    return parse_line(line)
            if self._ended:
                raise StopIteration
            if not self.regular and not select.select([self._file], [], [], 0)[0]:
                return None
            self._read()

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


def parse_line(line: str) -> str | list[int]:
    line = line.removesuffix("\r")
    try:
        value = parse_json(line, "prompt")
    except ValueError:
        return line
    ids = isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    return value if ids or isinstance(value, str) else line


def messages(args: argparse.Namespace, prompt: Any) -> list[dict]:
    """The chat messages of a prompt: the system message, if there is one, and the user's; those of ``--messages``.

    Raises:
        ValueError: the prompt is token ids, which take no chat format.
    """
    if args.messages is not None:
        return prompt
    if not isinstance(prompt, str):
        raise ValueError("--chat takes text; token ids are run as they are")
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": prompt}]
