"""Sizes: for people, and the largest that fits."""

from __future__ import annotations

from collections.abc import Callable


def show_bytes(count: float) -> str:
    """A number of bytes for people: 3 significant digits, decimal units."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Largest value from ``low`` to ``high`` that fits, for a condition that fails from some value on; at least low."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
