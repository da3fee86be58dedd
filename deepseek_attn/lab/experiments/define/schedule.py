"""Schedules by pattern: ``"0,0,(4,128)*"`` for any number of layers."""

from __future__ import annotations

import re

MAX_LENGTH = 10_000  # characters of a pattern
MAX_DEPTH = 20  # parentheses inside one another
_TOKEN = re.compile(r"\d+|[(),*x]")


def expand_schedule(pattern: str, num_layers: int) -> list[int]:
    """Compress ratios of ``num_layers`` layers, first layer first.

    Args:
        pattern: comma-separated items. An item is a ratio or a parenthesised list of items, and may be repeated:
            ``4x3`` and ``(4,128)x3`` three times, ``4*`` and ``(4,128)*`` as often as fills the remaining layers.
            At most one item has a star; its last repetition may be cut short, so that ``(4,128)*`` fits any length.

    Raises:
        ValueError: the pattern does not parse, or gives another number of layers.
    """
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"schedule {pattern[:40]!r}... has {len(pattern)} characters: at most {MAX_LENGTH} are read")
    tokens = _TOKEN.findall(pattern)
    if "".join(tokens) != re.sub(r"\s+", "", pattern) or not tokens:
        raise _broken(pattern, "write ratios, commas, parentheses, xN and *")
    parser = _Parser(pattern, tokens, num_layers)
    items = parser.items()
    if parser.left:
        raise _broken(pattern, f"nothing opens the {parser.left[0]!r}")
    fixed = sum(len(ratios) for ratios, star in items if not star)
    stars = [ratios for ratios, star in items if star]
    if len(stars) > 1:
        raise _broken(pattern, "only one item can have a star")
    remaining = num_layers - fixed
    if remaining < 0 or (not stars and remaining):
        raise ValueError(f"schedule {pattern!r:.200} names {fixed} layers, and the model has {num_layers}")
    schedule: list[int] = []
    for ratios, star in items:
        schedule += (ratios * -(-remaining // len(ratios)))[:remaining] if star else ratios
    return schedule


def _broken(pattern: str, why: str) -> ValueError:
    return ValueError(f"schedule {pattern!r:.200}: {why}; for instance '0,0,(4,128)*'")


class _Parser:
    """Items of a pattern as (ratios, has a star)."""

    def __init__(self, pattern: str, tokens: list[str], num_layers: int):
        self.pattern, self.left, self.num_layers, self.depth = pattern, tokens, num_layers, 0

    def take(self, *expected: str) -> str | None:
        return self.left.pop(0) if self.left and self.left[0] in expected else None

    def items(self, inside: bool = False) -> list[tuple[list[int], bool]]:
        found = [self.item(inside)]
        while self.take(","):
            found.append(self.item(inside))
        return found

    def item(self, inside: bool) -> tuple[list[int], bool]:
        if self.take("("):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise _broken(self.pattern, f"more than {MAX_DEPTH} parentheses inside one another")
            ratios = [ratio for part, _ in self.items(inside=True) for ratio in part]
            if not self.take(")"):
                raise _broken(self.pattern, "a parenthesis is not closed")
            self.depth -= 1
        else:
            ratios = [self.number("a ratio")]
        if self.take("x"):
            count = self.number("a count after x")
            if not 0 < count * len(ratios) <= self.num_layers:
                what = "0 times" if count == 0 else f"to more than the model's {self.num_layers} layers"
                raise _broken(self.pattern, f"an item is repeated {what}")
            ratios = ratios * count
        star = self.take("*") is not None
        if star and inside:
            raise _broken(self.pattern, "a star cannot be inside parentheses")
        return ratios, star

    def number(self, what: str) -> int:
        if not self.left or not self.left[0].isdigit():
            raise _broken(self.pattern, f"{what} is missing")
        digits = self.left.pop(0)
        if len(digits) > 9:
            raise _broken(self.pattern, f"a number has {len(digits)} digits")
        return int(digits)
