"""Parts of a report's page: tables whose cells carry exact values, grids of plots."""

from __future__ import annotations

from html import escape
from typing import Any

from deepseek_attn.experiments.report import plots
from deepseek_attn.experiments.report.table import show_number

TEXT = ("variant", "best window-only", "best with long-range entries", "measured on", "why not")  # columns of words


def number(value: float | None, std: float | None = None) -> str:
    """A table cell: what people read, and the exact value of the JSON."""
    if value is None:
        return "<td>-</td>"
    spread = f' <small data-value="{std!r}">± {show_number(std)}</small>' if std else ""
    return f'<td data-value="{value!r}">{show_number(value)}{spread}</td>'


def table(headers: list[str], rows: list[str]) -> str:
    """A table that scrolls sideways inside its own box; ``rows`` are the cells of each row."""
    opened = ['<th class="name">' if header in TEXT else "<th>" for header in headers]
    head = "".join(f"{tag}{escape(header)}</th>" for tag, header in zip(opened, headers, strict=True))
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def name_cell(variant: dict[str, Any]) -> str:
    """Number and name of a variant, with its colour in the plots: two cells."""
    color = (variant["number"] - 1) % len(plots.SERIES)
    return (
        f'<td data-value="{variant["number"]}"><i style="background:var(--c{color})"></i>{variant["number"]}</td>'
        f'<td class="name">{escape(variant["name"])}</td>'
    )


def figures(items: list[tuple[str, str, Any]]) -> str:
    """A grid of plots ``(id, caption, paint)``."""
    drawn = []
    for name, caption, paint in items:
        svg = plots.draw(paint, escape(caption, quote=True), name)
        drawn.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")
    return f'<div class="grid">{"".join(drawn)}</div>' if drawn else ""


def fold(title: str, content: str) -> str:
    """Content that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>\n{content}\n</details>"
