"""The library's log on standard error while a command runs."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from deepseek_attn.cli.terminal import write_above_bars
from deepseek_attn.utils.terminal import visible


class AboveBars(logging.Handler):
    """Writes each record as a line on standard error, above active progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        write_above_bars(self.format(record), sys.stderr)


@contextmanager
def logged(level: int) -> Iterator[None]:
    """Context that shows records of the logger ``deepseek_attn`` from ``level`` up, and each warning as one line."""
    logger, handler = logging.getLogger("deepseek_attn"), AboveBars()
    before, format_before = logger.level, warnings.formatwarning
    warnings.formatwarning = lambda message, *where, **line: f"warning: {visible(str(message))}\n"
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        warnings.formatwarning = format_before
        logger.setLevel(before)
        logger.removeHandler(handler)
