"""Pictures of benchmark rows."""

from __future__ import annotations

from pathlib import Path

# what tells rows of one series apart, as far as the rows have it
LABELS = ("op", "label", "implementation", "layer", "mode", "tokens", "batch", "context")


def bar_chart(path: Path, rows: list[dict], series: tuple[str, ...]) -> None:
    """Draws the ``microseconds`` of each row as a bar, with its 10th and 90th percentile.

    Args:
        path: .svg, .png or .pdf.
        series: keys of a row; rows that agree in all of them share a colour.

    Raises:
        ValueError: matplotlib is missing, or does not write this kind of file; nothing was written.
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
    figure.savefig(path)


def check_picture(path: Path) -> None:
    """ValueError if matplotlib is missing, or does not write this kind of file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'deepseek-attn[experiments]'") from None
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--plot {path}: it ends in none of {', '.join(f'.{kind}' for kind in sorted(kinds))}")


def row_label(row: dict, series: tuple[str, ...]) -> str:
    return " ".join(f"{row[name]}" for name in LABELS if name in row and (name not in series or name == "label"))
