"""Output of commands: on a terminal, control characters are shown as escapes (`for_stream`)."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO

from deepseek_attn.utils.terminal import for_stream


def show(text: str = "", end: str = "\n") -> None:
    """Prints a result on standard output at once."""
    print(for_stream(text, sys.stdout), end=end, flush=True)


def say(text: str = "") -> None:
    """Prints a line for people on standard error, unless it is closed or full."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(for_stream(text, sys.stderr), file=sys.stderr, flush=True)


def write_above_bars(text: str, stream: TextIO) -> None:
    """Prints a line above active progress bars."""
    from tqdm.auto import tqdm

    tqdm.write(for_stream(text, stream), file=stream)
