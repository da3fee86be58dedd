"""The plots of a report, each with a name, a caption and a function that paints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from deepseek_attn.bench.plots import MUTED, SERIES, svg_element
from deepseek_attn.experiments.report.pareto import measured
from deepseek_attn.experiments.report.schema import Front, Report, Trained, VariantReport, recall_rows, tasks, with_task
from deepseek_attn.experiments.report.table import COST_NAMES, show_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# by names of a report's costs: titles of plots, and the quantity plotted against the context
FRONT_TITLES = {"bytes_per_token": "KV bytes per token", "decode_ms": "decode time", "prefill_ms": "prefill time"}
COST_CAPTIONS = {
    "sequence_bytes": "cache bytes of a sequence",
    "read_bytes": "cache bytes read by a query",
    "flops": "FLOPs of a query, all attention layers",
    "decode_ms": "decode ms, all attention layers",
    "prefill_ms": "prefill ms, all attention layers",
}
RECALL_CAPTIONS = {
    "token_mass": "dense attention covered by what is read",
    "entry_mass": "attention to entries kept by the indexer",
    "index_recall": "indexer recall@k",
}


class Line(NamedTuple):
    """A variant and its points (x, y)."""

    variant: VariantReport
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """One plot. ``name`` is unique in a page and fit for a file."""

    name: str
    caption: str
    paint: Callable[[Axes], None]

    def svg(self) -> str:
        """The plot as an ``<svg>`` element, see `svg_element`."""
        return svg_element(self.paint, self.caption, self.name)


def fronts(report: Report) -> list[Figure]:
    """Quality against each cost, with the Pareto fronts."""
    return [
        Figure(f"front{i}", f"{front['quality']} against {FRONT_TITLES[front['cost']]}", scatter(report, front))
        for i, front in enumerate(report["fronts"])
    ]


def distances(report: Report) -> list[Figure]:
    """Quality of trained models at other lengths, and loss by position in the sequence."""
    figures = []
    for task in tasks(report):
        metric, qualities = "loss" if task == "text" else "accuracy", with_task(report, task)
        lengths = [Line(v, [(row["seq_len"], row[metric]) for row in quality["by_length"]]) for v, quality in qualities]
        losses = [Line(v, [(row["end"], row["loss"]) for row in quality["by_position"]]) for v, quality in qualities]
        if len(lengths[0].points) > 1:
            paint = lines(lengths, "tokens", f"{task} {metric}", log="x")
            figures.append(Figure(f"length-{task}", f"{task}: {metric} by context length", paint))
        if len(losses[0].points) > 1:
            paint = lines(losses, "position", f"{task} loss", log="x")
            figures.append(Figure(f"position-{task}", f"{task}: loss by position in the sequence", paint))
    return figures


def training(report: Report) -> list[Figure]:
    """Loss curves of every task."""
    caption = "training loss, mean and range over seeds"
    return [
        Figure(f"curve-{task}", f"{task}: {caption}", curves(with_task(report, task), task)) for task in tasks(report)
    ]


def costs(report: Report) -> list[Figure]:
    """Bytes, FLOPs and times of attention by context length."""
    rows = [(variant, variant["cost"]["contexts"]) for variant in report["variants"] if "cost" in variant]
    figures = []
    for name, caption in COST_CAPTIONS.items():
        series = [Line(v, [(row["context"], row[name]) for row in found if row[name] is not None]) for v, found in rows]
        if series := [line for line in series if line.points]:
            figures.append(Figure(f"cost-{name}", caption, lines(series, "context", caption, log="xy")))
    return figures


def layers(report: Report) -> list[Figure]:
    """Attention recall of each layer, for every trained task and for the checkpoint."""
    figures = []
    for source in [*tasks(report), "checkpoint"]:
        for name, caption in RECALL_CAPTIONS.items():
            series: dict[int, Line] = {}
            for found, variant, row in recall_rows(report):
                if found == source and row[name] is not None:
                    series.setdefault(variant["number"], Line(variant, [])).points.append((row["layer"], row[name]))
            if series:
                paint = lines(list(series.values()), "layer", caption, whole=True)
                figures.append(Figure(f"layer-{source}-{name}", f"{source}: {caption}, by layer", paint))
    return figures


def color_of(variant: VariantReport) -> str:
    return SERIES[(variant["number"] - 1) % len(SERIES)]


def scatter(report: Report, front: Front) -> Callable[[Axes], None]:
    """Quality against a cost: numbered points with the spread over seeds, and the Pareto front as a line."""
    points = {point.variant["name"]: point for point in measured(report, front["quality"], front["cost"])}

    def paint(axes: Axes) -> None:
        best = [points[name] for name in front["variants"]]
        axes.step([p.cost for p in best], [p.quality["mean"] for p in best], where="post", color=MUTED, zorder=1)
        for name, (variant, cost, quality) in points.items():
            color = color_of(variant)
            fill = color if name in front["variants"] else "none"
            axes.vlines(cost, quality["low"], quality["high"], color=color, zorder=2)
            axes.scatter([cost], [quality["mean"]], s=42, facecolors=fill, edgecolors=color, zorder=3)
            _number_at(axes, variant, (cost, quality["mean"]), xytext=(5, 4), fontsize=9, va="baseline")
        axes.set_xscale("log")
        axes.set_xlabel(f"{COST_NAMES[front['cost']]} at {show_length(front['context'])} tokens")
        axes.set_ylabel(front["quality"])

    return paint


def lines(series: list[Line], x: str, y: str, *, log: str = "", whole: bool = False) -> Callable[[Axes], None]:
    """One line per variant, its number at the line's end; ``log`` names the logarithmic axes: ``"xy"``.

    Args:
        whole: ``x`` counts something, so that ticks are whole numbers.
    """

    def paint(axes: Axes) -> None:
        for variant, points in series:
            axes.plot(*zip(*points, strict=True), color=color_of(variant), marker="o", markersize=3, linewidth=1.4)
            _number_at(axes, variant, points[-1])
        if "x" in log:
            axes.set_xscale("log", base=2)
            ticks = sorted({place for _, points in series for place, _ in points})
            axes.set_xticks(ticks, [show_length(int(tick)) for tick in ticks])
            axes.minorticks_off()
        if whole:
            axes.locator_params("x", integer=True)
        if "y" in log:
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return paint


def curves(variants: list[Trained], task: str) -> Callable[[Axes], None]:
    """Loss curves of one task: mean over seeds, and a band from the lowest to the highest."""

    def paint(axes: Axes) -> None:
        for variant, quality in variants:
            steps, mean, low, high = zip(*quality["curve"], strict=True)
            color = color_of(variant)
            axes.plot(steps, mean, color=color, linewidth=1.2)
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            _number_at(axes, variant, (steps[-1], mean[-1]))
        axes.set_xlabel("training step")
        axes.set_ylabel(f"{task}: training loss")

    return paint


def _number_at(axes: Axes, variant: VariantReport, point: tuple[float, float], **style: object) -> None:
    axes.annotate(
        str(variant["number"]), point,
        **{"xytext": (4, 0), "textcoords": "offset points", "fontsize": 8, "va": "center", **style},
    )  # fmt: skip
