"""Plots of a report as SVG whose colours are CSS variables, so that a page can show them on light and dark ground.

matplotlib draws with marker colours, which are then replaced by ``var(--fg)``, ``var(--muted)`` and ``var(--cN)``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from deepseek_attn.experiments.report.pareto import cost_at, quality_of
from deepseek_attn.experiments.report.table import COST_NAMES, show_length

FOREGROUND, MUTED = "#010203", "#040506"
SERIES = tuple(f"#0a0b{index:02x}" for index in range(24))  # more variants begin again
VARIABLES = {FOREGROUND: "var(--fg)", MUTED: "var(--muted)"} | {
    color: f"var(--c{index})" for index, color in enumerate(SERIES)
}


MATPLOTLIB_HINT = "pip install 'deepseek-attn[experiments]'"


def have_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def load_pyplot():
    """matplotlib's pyplot, set up to draw to files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if not have_matplotlib():
        raise ValueError(f"plots need matplotlib, which is not installed: {MATPLOTLIB_HINT}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
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
    )
    return pyplot


def draw(paint: Callable[[Any], None], label: str, name: str) -> str:
    """One plot as an ``<svg>`` element: ``paint`` gets the axes; ``label`` says what it shows, for screen readers."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(5.2, 3.5))
    try:
        paint(axes)
        figure.tight_layout()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    finally:
        pyplot.close(figure)
    return themed(buffer.getvalue(), label, name)


def themed(svg: str, label: str, name: str) -> str:
    """The ``<svg>`` element alone, with CSS colours, ids of its own, and as wide as its place."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg


def color_of(variant: dict[str, Any]) -> str:
    return SERIES[(variant["number"] - 1) % len(SERIES)]


def scatter(report: dict[str, Any], front: dict[str, Any]) -> Callable[[Any], None]:
    """Quality against a cost: numbered points with the spread over seeds, and the Pareto front as a line."""
    quality, cost, context = front["quality"], front["cost"], front["context"]
    points = {}
    for variant in report["variants"]:
        price, value = cost_at(variant, cost, context), quality_of(variant, quality)
        if price is not None and value is not None:
            points[variant["name"]] = (variant, price, value)

    def paint(axes) -> None:
        best = [points[name] for name in front["variants"]]
        axes.step([p for _, p, _ in best], [v["mean"] for _, _, v in best], where="post", color=MUTED, zorder=1)
        for variant, price, value in points.values():
            marked, color = variant["name"] in front["variants"], color_of(variant)
            axes.vlines(price, value["low"], value["high"], color=color, zorder=2)
            fill = color if marked else "none"
            axes.scatter([price], [value["mean"]], s=42, facecolors=fill, edgecolors=color, zorder=3)
            axes.annotate(
                str(variant["number"]), (price, value["mean"]), xytext=(5, 4), textcoords="offset points", fontsize=9
            )
        axes.set_xscale("log")
        axes.set_xlabel(f"{COST_NAMES[cost]} at {show_length(context)} tokens")
        axes.set_ylabel(quality)

    return paint


def lines(
    series: list[tuple[dict[str, Any], list[tuple[float, float]]]],
    x: str,
    y: str,
    *,
    log: str = "",
    whole: bool = False,
) -> Callable[[Any], None]:
    """One line per variant ``(variant, [(x, y), ...])``, its number at its end; ``log`` names the axes: ``"xy"``.

    Args:
        whole: ``x`` counts something, so that ticks are whole numbers.
    """

    def paint(axes) -> None:
        for variant, points in series:
            color = color_of(variant)
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, linewidth=1.4)
            axes.annotate(
                str(variant["number"]), points[-1], xytext=(4, 0), textcoords="offset points", fontsize=8, va="center"
            )
        if "x" in log:
            axes.set_xscale("log", base=2)
            ticks = sorted({point[0] for _, points in series for point in points})
            axes.set_xticks(ticks, [show_length(int(tick)) for tick in ticks])
            axes.minorticks_off()
        if whole:
            axes.xaxis.get_major_locator().set_params(integer=True)
        if "y" in log:
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return paint


def curves(variants: list[dict[str, Any]], task: str) -> Callable[[Any], None]:
    """Loss curves of one task: mean over seeds, and a band from the lowest to the highest."""

    def paint(axes) -> None:
        for variant in variants:
            steps, mean, low, high = zip(*variant["tasks"][task]["curve"], strict=True)
            color = color_of(variant)
            axes.plot(steps, mean, color=color, linewidth=1.2)
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            axes.annotate(
                str(variant["number"]), (steps[-1], mean[-1]), xytext=(4, 0), textcoords="offset points", fontsize=8,
                va="center",
            )  # fmt: skip
        axes.set_xlabel("training step")
        axes.set_ylabel(f"{task}: training loss")

    return paint
