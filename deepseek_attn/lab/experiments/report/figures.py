"""The plots of a report, each with a name, a caption and a function that paints it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from deepseek_attn.lab.bench.plots import MUTED, SERIES, svg_element
from deepseek_attn.lab.experiments.report.axes import (
    NUMBER_SIZE,
    Mark,
    belongs_to,
    draw_lines,
    draw_points,
    set_length_ticks,
    set_scale,
    set_whole_ticks,
    write_numbers,
)
from deepseek_attn.lab.experiments.report.pareto import bound_of, chance_of, measured, metric_of
from deepseek_attn.lab.experiments.report.schema import (
    Front,
    Report,
    Trained,
    VariantReport,
    recall_rows,
    tasks,
    with_task,
)
from deepseek_attn.lab.experiments.report.table import COST_NAMES, show_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# by names of a report's costs: titles of plots, and the quantity plotted against the context
FRONT_TITLES = {
    "bytes_per_token": "KV bytes per token",
    "read_bytes": "bytes read",
    "decode_ms": "decode time",
    "prefill_ms": "prefill time",
}
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
    """A variant and its points (x, y); ``bars``: (x, lowest, highest) over the seeds."""

    variant: VariantReport
    points: list[tuple[float, float]]
    bars: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Figure:
    """One plot. ``name`` is unique in a page and fit for a file."""

    name: str
    caption: str
    paint: Callable[[Axes], None]

    def svg(self) -> str:
        """The plot as an ``<svg>`` element, see `svg_element`."""
        return svg_element(self.paint, self.caption, self.name)


def main(report: Report) -> list[Figure]:
    """The five plots that answer the question, of the first task that models were trained on."""
    if not tasks(report):
        return []
    first = tasks(report)[0]
    quality = f"{first} {metric_of(with_task(report, first)[0].quality)}"
    found = [figure for figure in fronts(report) if figure.caption.startswith(f"{quality} against")][:2]
    found += [figure for figure in distances(report) if figure.name == f"length-{first}"]
    found += [*sizes(report, first), *forest(report, quality)]
    return [replace(figure, name=f"main-{figure.name}") for figure in found]


def sizes(report: Report, first: str) -> list[Figure]:
    """Quality against the number of parameters: of the first task, and of the first of its kind at each other size."""
    kind = with_task(report, first)[0].quality["kind"]
    metric, series = metric_of(with_task(report, first)[0].quality), []
    for variant in report["variants"]:
        trained = variant.get("tasks", {})
        found = [trained[task] for task in one_of_each_size(report, kind) if task in trained]
        bars = [(q["parameters"], q[metric]["low"], q[metric]["high"]) for q in found]
        if found:
            points = sorted((float(q["parameters"]), q[metric]["mean"]) for q in found)
            series.append(Line(variant, points, bars))
    if max((len(line.points) for line in series), default=0) < 2:
        return []

    def paint(axes: Axes) -> None:
        set_scale(axes, "x", [x for line in series for x, _ in line.points])
        lines(series, "parameters", f"{kind} {metric}", bounds=levels(report, f"{first} {metric}", series))(axes)

    return [Figure(f"sizes-{kind}", f"{kind}: {metric} by the size of the model", paint)]


def one_of_each_size(report: Report, kind: str) -> list[str]:
    """The first task of ``kind`` at each size of models: later ones differ in more than the size, as in their rate."""
    found: dict[str | None, str] = {}
    for task in tasks(report):
        quality = with_task(report, task)[0].quality
        if quality["kind"] == kind:
            found.setdefault(quality["size"], task)
    return [*found.values()]


def forest(report: Report, quality: str) -> list[Figure]:
    """Paired differences with their intervals: the loss of a schedule, and the effect of its selection."""
    rows = [
        row
        for row in report["comparisons"]
        if row["quality"] == quality and row["family"] in ("bound", "selection") and row["low"] is not None
    ]
    numbers = {variant["name"]: variant["number"] for variant in report["variants"]}
    if not rows:
        return []

    def paint(axes: Axes) -> None:
        axes.axvline(0.0, color=MUTED, linewidth=1)
        for place, row in enumerate(rows):
            number = numbers[row["one"]]
            color = SERIES[(number - 1) % len(SERIES)]
            low, high = (row["mean"] if end is None else end for end in (row["low"], row["high"]))
            face = color if row["exceeds"] else "none"
            belongs_to(axes.hlines(place, low, high, color=color, linewidth=1.2), number)
            [point] = axes.plot([row["mean"]], [place], "o", color=color, markersize=4, markerfacecolor=face)
            belongs_to(point, number)
        labels = [f"{numbers[row['one']]} - {numbers[row['other']]}" for row in rows]
        axes.set_yticks(range(len(rows)), labels, fontsize=max(4, min(8, 150 / len(rows))))
        axes.invert_yaxis()
        axes.set_xlabel(f"difference in {quality}")

    return [Figure("forest", "paired differences, 95 % intervals; filled: more than noise", paint)]


def fronts(report: Report) -> list[Figure]:
    """Quality against each cost, with the Pareto fronts."""
    return [
        Figure(f"front{i}", f"{front['quality']} against {FRONT_TITLES[front['cost']]}", scatter(report, front))
        for i, front in enumerate(report["fronts"])
    ]


def distances(report: Report) -> list[Figure]:
    """Quality of trained models at other lengths, by distance and depth of the fact, and loss by position."""
    figures = []
    for task in tasks(report):
        qualities = with_task(report, task)
        lengths = length_lines(qualities, metric_of(qualities[0].quality))
        figures += [*by_distance(report, task, qualities), *by_depth(report, task, qualities)]
        losses = [Line(v, [(row["end"], row["loss"]) for row in quality["by_position"]]) for v, quality in qualities]
        if len(lengths[0].points) > 1:
            figures.append(by_length(report, task))
        if len(losses[0].points) > 1:
            paint = lines(losses, "position", f"{task} loss", log="x", bounds=levels(report, f"{task} loss", losses))
            figures.append(Figure(f"position-{task}", f"{task}: loss by position in the sequence", paint))
    for name, caption in (("loss", "loss"), ("kl", "KL from the own schedule")):
        found = [(v, v.get("checkpoint", {}).get("by_position", [])) for v in report["variants"]]
        series = [Line(v, [(row["end"], row[name]) for row in rows if name in row]) for v, rows in found]
        if any(len(line.points) > 1 for line in series):
            paint = lines([line for line in series if line.points], "position", f"checkpoint {name}", log="x")
            figures.append(Figure(f"position-checkpoint-{name}", f"checkpoint: {caption} by position", paint))
    return figures


def by_distance(report: Report, task: str, qualities: list[Trained]) -> list[Figure]:
    """Accuracy against the distance of the fact, at the longest sequences."""
    longest = max(row["seq_len"] for _, quality in qualities for row in quality["by_length"])
    series = [
        Line(v, [(row["end"], row["accuracy"]) for row in q["by_distance"] if row["seq_len"] == longest])
        for v, q in qualities
    ]
    if series := [line for line in series if len(line.points) > 1]:
        drawn = levels(report, f"{task} accuracy", series)
        paint = lines(series, "tokens back", f"{task} accuracy", log="x", bounds=drawn)
        return [Figure(f"distance-{task}", f"{task}: accuracy by the distance of the fact, {longest} tokens", paint)]
    return []


def by_depth(report: Report, task: str, qualities: list[Trained]) -> list[Figure]:
    """Accuracy against the depth of a needle, a plot for each length."""
    figures = []
    for length in [row["seq_len"] for row in qualities[0].quality["by_length"]]:
        series = [
            Line(v, [(row["depth"], row["accuracy"]) for row in q["by_depth"] if row["seq_len"] == length])
            for v, q in qualities
        ]
        if series := [line for line in series if len(line.points) > 1]:
            paint = lines(series, "depth", f"{task} accuracy", bounds=levels(report, f"{task} accuracy", series))
            figures.append(Figure(f"depth-{task}-{length}", f"{task}: accuracy by depth, {length} tokens", paint))
    return figures


def by_length(report: Report, task: str) -> Figure:
    """Quality of a task against the length of the sequences."""
    qualities = with_task(report, task)
    metric = metric_of(qualities[0].quality)
    series = length_lines(qualities, metric)
    drawn = levels(report, f"{task} {metric}", series)
    paint = lines(series, "tokens", f"{task} {metric}", log="x", bounds=drawn)
    return Figure(f"length-{task}", f"{task}: {metric} by context length", paint)


def length_lines(qualities: list[Trained], metric: str) -> list[Line]:
    """Means of a metric by sequence length, with bars over the seeds."""
    found = []
    for variant, quality in qualities:
        rows = quality["by_length"]
        bars = [(row["seq_len"], row[f"{metric}_low"], row[f"{metric}_high"]) for row in rows if f"{metric}_low" in row]
        found.append(Line(variant, [(row["seq_len"], row[metric]) for row in rows], bars))
    return found


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
            guessed: dict[int, float] = {}
            for found, variant, row in recall_rows(report):
                if found == source and row[name] is not None:
                    series.setdefault(variant["number"], Line(variant, [])).points.append((row["layer"], row[name]))
                    if name == "index_recall" and row["index_recall_of_chance"] is not None:
                        guessed[row["layer"]] = min(row["index_recall_of_chance"], guessed.get(row["layer"], 1.0))
            if series:
                drawn = [Level("chance", sorted(guessed.items()))] if guessed else []
                paint = lines(list(series.values()), "layer", caption, whole=True, bounds=drawn)
                figures.append(Figure(f"layer-{source}-{name}", f"{source}: {caption}, by layer", paint))
    return figures


def mark(variant: VariantReport, points: list[tuple[float, float]]) -> Mark:
    """A variant in the colour that it has in all plots."""
    return Mark(variant["number"], SERIES[(variant["number"] - 1) % len(SERIES)], points)


def scatter(report: Report, front: Front) -> Callable[[Axes], None]:
    """Quality against a cost: numbered points with the spread over seeds, and the Pareto front as a line."""
    points = {point.variant["name"]: point for point in measured(report, front["quality"], front["cost"])}

    def paint(axes: Axes) -> None:
        set_scale(axes, "x", [point.cost for point in points.values()])
        best = [points[name] for name in front["variants"]]
        axes.step([p.cost for p in best], [p.quality["mean"] for p in best], where="post", color=MUTED, zorder=1)
        marks = [mark(variant, [(cost, quality["mean"])]) for variant, cost, quality in points.values()]
        for shown, (_, cost, quality) in zip(marks, points.values(), strict=True):
            belongs_to(axes.vlines(cost, quality["low"], quality["high"], color=shown.color, zorder=2), shown.number)
        for name, level in (("chance", chance_of), ("dense", bound_of)):
            if (value := level(report, front["quality"])) is not None:
                draw_level(axes, Level(name, [(0.0, value)]))
        draw_points(axes, marks, 6.5, filled=[point.variant["number"] for point in best])
        write_numbers(axes, marks, lift=5)
        axes.set_xlabel(f"{COST_NAMES[front['cost']]} at {show_length(front['context'])} tokens")
        axes.set_ylabel(front["quality"])

    return paint


class Level(NamedTuple):
    """What guessing or dense attention reaches, by the x of a plot; one point: the same everywhere."""

    name: str
    points: list[tuple[float, float]]


def levels(report: Report, quality: str, series: Sequence[Line]) -> list[Level]:
    """Chance, and the best line of dense attention, for a plot of ``quality``."""
    chance = chance_of(report, quality)
    guessed = [] if chance is None else [Level("chance", [(0.0, chance)])]
    return guessed + dense_level(series, quality)


def dense_level(series: Sequence[Line], quality: str) -> list[Level]:
    """The best line of dense attention among ``series``; none without one."""
    dense = [line.points for line in series if line.variant["attention"] == "dense" and line.points]
    best = min if quality.endswith("loss") else max
    return [Level("dense", best(dense, key=lambda points: fmean(y for _, y in points)))] if dense else []


def draw_level(axes: Axes, level: Level) -> None:
    """A dashed line at a bound such as chance or dense attention, with its name at the left."""
    style: dict[str, Any] = {"color": MUTED, "linestyle": "--", "zorder": 0}
    text: dict[str, Any] = {"fontsize": NUMBER_SIZE, "color": MUTED, "textcoords": "offset points"}
    xs, ys = zip(*level.points, strict=True)
    if len(xs) == 1:
        axes.axhline(ys[0], linewidth=1, **style)
        axes.annotate(level.name, (0, ys[0]), xycoords=("axes fraction", "data"), xytext=(2, 2), **text)
    else:  # wide: a variant's own line lies over it
        axes.plot(xs, ys, linewidth=4, alpha=0.5, **style)
        axes.annotate(level.name, (xs[0], ys[0]), xytext=(4, 5), **text)


def lines(
    series: list[Line], x: str, y: str, *, log: str = "", whole: bool = False, bounds: Sequence[Level] = ()
) -> Callable[[Axes], None]:
    """One line per variant, its number at the line's end.

    Args:
        log: axes that are logarithmic: ``"x"``, whose values are context lengths, or ``"xy"``.
        whole: ``x`` counts something, so that ticks are whole numbers.
        bounds: drawn as dashed lines.
    """

    def paint(axes: Axes) -> None:
        marks = [mark(line.variant, line.points) for line in series]
        places = [point for line in series for point in line.points]
        if "x" in log:
            set_length_ticks(axes, [place for place, _ in places])
        if "y" in log:
            set_scale(axes, "y", [value for _, value in places])
        if whole:
            set_whole_ticks(axes)
        for shown, line in zip(marks, series, strict=True):
            for place, low, high in line.bars:
                belongs_to(axes.vlines(place, low, high, color=shown.color, alpha=0.5, zorder=2), shown.number)
        for level in bounds:
            draw_level(axes, level)
        draw_lines(axes, marks, size=3)
        write_numbers(axes, marks)
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return paint


def curves(variants: list[Trained], task: str) -> Callable[[Axes], None]:
    """Loss curves of one task: mean over seeds, and a band from the lowest to the highest."""

    def paint(axes: Axes) -> None:
        set_whole_ticks(axes)
        marks = []
        for variant, quality in variants:
            steps, mean, low, high = zip(*quality["curve"], strict=True)
            marks.append(mark(variant, list(zip(steps, mean, strict=True))))
            if len(steps) > 1:
                band = axes.fill_between(steps, low, high, color=marks[-1].color, alpha=0.15, linewidth=0)
            else:
                band = axes.vlines(steps, low, high, color=marks[-1].color)
            belongs_to(band, variant["number"])
        dense = [Line(variant, [(row[0], row[1]) for row in found["curve"]]) for variant, found in variants]
        for level in dense_level(dense, "loss"):
            draw_level(axes, level)
        draw_lines(axes, marks, width=1.2)
        write_numbers(axes, marks)
        axes.set_xlabel("training step")
        axes.set_ylabel(f"{task}: training loss")

    return paint
