"""Plots with matplotlib: bars of benchmark rows as a file, and SVG elements whose colours are CSS variables.

An element shows ``var(--fg)``, ``var(--muted)`` and ``var(--c0)`` to ``var(--c23)``, so that the page around it chooses
the colours of light and dark screens. matplotlib draws with marker colours, which are replaced afterwards.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_attn.utils.files import appearing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HINT = "pip install 'deepseek-attn[experiments]'"

FOREGROUND, MUTED = "#010203", "#040506"
SERIES = tuple(f"#0a0b{index:02x}" for index in range(24))  # further series repeat the colours
VARIABLES = {FOREGROUND: "var(--fg)", MUTED: "var(--muted)"} | {
    color: f"var(--c{index})" for index, color in enumerate(SERIES)
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "deepseek-attn",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": FOREGROUND,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": FOREGROUND,
    "xtick.color": FOREGROUND,
    "ytick.color": FOREGROUND,
    "grid.color": MUTED,
    "grid.alpha": 0.25,
    "axes.grid": True,
    "axes.axisbelow": True,
}

# keys that distinguish rows of one series; rows may lack some
LABELS = ("op", "label", "implementation", "layer", "mode", "tokens", "batch", "context")


def have_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def check_picture(path: Path) -> None:
    """ValueError if matplotlib is missing or cannot write this file format."""
    if not have_matplotlib():
        raise ValueError(f"--plot needs matplotlib: {HINT}")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(
            f"--plot {path}: its name must end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}"
        )


def bar_chart(path: Path, rows: list[dict], series: tuple[str, ...]) -> None:
    """Draws the ``microseconds`` of each row as a bar, with its 10th and 90th percentile.

    Args:
        path: .svg, .png or .pdf.
        series: keys of a row; rows that agree in all of them share a colour.

    Raises:
        ValueError: matplotlib is missing or cannot write this file format; nothing was written.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colours: dict[tuple, str] = {}
    for place, row in enumerate(rows):
        key = tuple(row.get(name) for name in series)
        new = key not in colours
        colour = colours.setdefault(key, f"C{len(colours) % 10}")
        spread = [[row["microseconds"] - row["low"]], [row["high"] - row["microseconds"]]]
        label = " ".join(str(part) for part in key) if new else None
        axes.barh(place, row["microseconds"], xerr=spread, color=colour, label=label)
    axes.set_yticks(range(len(rows)), [row_label(row, series) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds")
    if len(colours) <= 12:
        axes.legend(fontsize=8)
    with appearing(path) as partial:
        figure.savefig(partial)


def row_label(row: dict, series: tuple[str, ...]) -> str:
    return " ".join(f"{row[name]}" for name in LABELS if name in row and (name not in series or name == "label"))


def svg_element(paint: Callable[[Axes], None], label: str, name: str, inches: tuple[float, float] = (5.2, 3.5)) -> str:
    """One plot as an ``<svg>`` element with CSS colours, as wide as its container.

    Args:
        paint: draws on the axes; label: of the plot, for screen readers; name: prefix of the element's ids.
        inches: width and height that its text is laid out for.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if not have_matplotlib():
        raise ValueError(f"plots need matplotlib, which is not installed: {HINT}")
    from html import escape

    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=inches)
        paint(figure.subplots())
        figure.tight_layout()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg
