"""A conversation as a prompt."""

from __future__ import annotations

from typing import Any, NamedTuple


class Chat(NamedTuple):
    """A conversation: its messages, and the options of `ChatOptions` that it sets."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
