"""Tables that are printed line by line, while their rows are timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepseek_attn.cli.terminal import show

if TYPE_CHECKING:
    from deepseek_attn.lab.bench.timing import KernelTiming


class PrintedTable:
    """A table that is printed line by line.

    Args:
        columns: by title, the format of the values with their width: ``"<26"``, ``">11.1f"``.
    """

    def __init__(self, columns: dict[str, str]):
        self.formats = list(columns.values())
        self._widths = [spec.split(".")[0].rstrip("%df") for spec in self.formats]
        self._print(format(title, width) for title, width in zip(columns, self._widths, strict=True))

    def add(self, *values: object) -> None:
        """Prints a line; None leaves a cell empty."""
        cells = zip(values, self.formats, self._widths, strict=True)
        self._print(format("", width) if value is None else format(value, spec) for value, spec, width in cells)

    def _print(self, cells: Iterable[str]) -> None:
        show("".join(cells))


def print_kernels(timing: KernelTiming) -> None:
    """Prints a line per kernel, if kernels were counted."""
    for name, count, microseconds in timing.kernels:
        show(f"    {microseconds:>9.1f} us {count:>6.1f} x  {name[:100]}")
