"""Text from elsewhere (names, messages, generated text) on a terminal: its control characters are shown as escapes."""

from __future__ import annotations

import re
from typing import TextIO

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1, without newline and tab


def visible(text: str) -> str:
    r"""Replaces control characters other than newline and tab by escapes such as ``\x1b``."""
    return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def for_stream(text: str, stream: TextIO | None) -> str:
    """Returns ``text``, `visible` where ``stream`` is a terminal. Files and pipes get the text as it is."""
    return visible(text) if stream is not None and stream.isatty() else text
