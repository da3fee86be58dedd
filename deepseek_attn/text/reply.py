"""Reasoning and answer of a reply: the token ``</think>`` divides them, not a text that is spelled like it."""

from __future__ import annotations

from collections.abc import Sequence

THINK = "<think>"
END_THINK = "</think>"


class ReplySplitter:
    """Divides the text of a reply into reasoning and answer, as it comes.

    The first ``</think>`` token ends the reasoning; the text of each such token belongs to neither part. Newlines at
    the beginning of a part go, and so do those between the reasoning and ``</think>``.

    Args:
        thinking: the reply begins with reasoning.
    """

    def __init__(self, thinking: bool):
        self._part = "reasoning" if thinking else "answer"
        self._begun = False  # the part has text
        self._held = ""  # newlines that may be the last of the reasoning
        self._seen = 0  # characters of the reply so far
        self._done = 0  # characters that are in a part, or belong to a token; past `_seen` inside a token's text
        self._marks = 0  # tokens so far

    def push(self, text: str, marks: Sequence[int]) -> list[tuple[str, str]]:
        """Takes the next text, and returns ``("reasoning" | "answer", text)`` in order.

        Args:
            marks: where in the whole reply the text of each ``</think>`` token begins; those known so far.
        """
        start, self._seen = self._seen, self._seen + len(text)
        found = []
        for mark in marks[self._marks :]:
            if mark >= self._seen:
                break
            found.append((self._part, self._take(text[self._done - start : mark - start])))
            self._done, self._marks = mark + len(END_THINK), self._marks + 1
            if self._part == "reasoning":
                self._part, self._begun, self._held = "answer", False, ""
        if self._done < self._seen:
            found.append((self._part, self._take(text[self._done - start :])))
            self._done = self._seen
        return [(part, piece) for part, piece in found if piece]

    def flush(self) -> list[tuple[str, str]]:
        """The newlines at the end of a reasoning that nothing follows."""
        held, self._held = self._held, ""
        return [(self._part, held)] if held else []

    def _take(self, text: str) -> str:
        text = text if self._begun else text.lstrip("\n")
        self._begun = self._begun or bool(text)
        if self._part == "answer":
            return text
        text = self._held + text
        kept = text.rstrip("\n")
        self._held = text[len(kept) :]
        return kept


def split_reply(text: str, thinking: bool, marks: Sequence[int]) -> tuple[str, str]:
    """``(reasoning, answer)`` of a whole reply; see `ReplySplitter`."""
    splitter = ReplySplitter(thinking)
    parts = splitter.push(text, marks) + splitter.flush()
    reasoning, answer = ("".join(piece for part, piece in parts if part == name) for name in ("reasoning", "answer"))
    return reasoning, answer
