"""Exceptions before any line of the library: what Ctrl-C does, or a signal handler that raises."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import deepseek_attn
import deepseek_attn.kernels
import deepseek_attn.models
import deepseek_attn.utils.turns
from tests.support.typed import required

# A trace function can raise between the end of a `with` and the release of its lock, where no signal handler can.
EXCEPT = required(deepseek_attn.utils.turns.__file__)
PACKAGES = (deepseek_attn, deepseek_attn.kernels, deepseek_attn.models)
LIBRARY = tuple(str(Path(required(package.__file__)).parent) for package in PACKAGES)


class Interrupted(BaseException):
    """No `Exception`: nothing but the clean-up of what it breaks off may catch it."""


class Line(NamedTuple):
    file: str
    number: int


class InterruptBefore:
    """Context that raises `Interrupted` before a line of the library runs; None: it only records lines.

    Args:
        files: beginnings of the names of files whose lines count.
        error: what it raises.

    Attributes:
        lines: lines that have run, each once, in order; fired: whether it has raised.
    """

    def __init__(
        self,
        line: Line | None = None,
        files: tuple[str, ...] = LIBRARY,
        error: type[BaseException] = Interrupted,
    ):
        self.line, self.files, self.error = line, files, error
        self.lines: dict[Line, None] = {}
        self.fired = False

    def __enter__(self) -> InterruptBefore:
        self._before = sys.gettrace()
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType) -> bool:
        sys.settrace(self._before)
        return kind is Interrupted

    def _enter_function(self, frame: FrameType, event: str, arg: object):
        name = frame.f_code.co_filename
        if self.fired or name == EXCEPT or not name.startswith(self.files) or (self.line and name != self.line.file):
            return None
        return self._run_line

    def _run_line(self, frame: FrameType, event: str, arg: object):
        if event != "line":
            return self._run_line
        line = Line(frame.f_code.co_filename, frame.f_lineno)
        self.lines[line] = None
        if line == self.line and not self.fired:
            self.fired = True
            raise self.error
        return self._run_line
