"""Readable plots for any data: ticks of short axes, lines and points that coincide, their numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count, groupby, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from deepseek_attn.lab.bench.plots import FOREGROUND
from deepseek_attn.lab.experiments.report.table import show_length

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Point = tuple[float, float]

NEAR = 2.0  # points (1/72 inch): nearer marks look the same
NUMBER_SIZE = 8  # points
DASH = 8  # line widths: coincident lines show in turn for so long
TICKS = 8  # labels of context lengths that an axis has room for
LOGARITHMIC = 3.0  # factor between the ends of a logarithmic axis; on a shorter one few values are round
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Mark(NamedTuple):
    """A variant in a plot: its number, its colour and the points of its line."""

    number: int
    color: str
    points: Sequence[Point]


def show_tick(value: float, _place: int | None = None) -> str:
    """``0.5``, ``20``, ``1.5k``, ``10G``."""
    for size, unit in UNITS:
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def set_scale(axes: Axes, which: Literal["x", "y"], values: Iterable[float]) -> None:
    """Makes an axis logarithmic where ``values`` differ by a factor of `LOGARITHMIC`; few ticks, at round values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    axis, found = (axes.xaxis if which == "x" else axes.yaxis), list(values)
    low, high = min(found), max(found)
    if low > 0 and high >= LOGARITHMIC * low:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(FixedLocator(log_ticks(low, high)))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if high - low > 1e-3 * max(abs(low), abs(high)):  # else neighbouring ticks would read the same
        axis.set_major_formatter(FuncFormatter(show_tick))


def log_ticks(low: float, high: float) -> list[float]:
    """Three to seven round values from ``low`` to ``high``, which differ by a factor of `LOGARITHMIC` at least."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
        if len(ticks) < 3:
            ticks = [digit * 10.0**decade for decade in decades for digit in digits]
            ticks = [tick for tick in ticks if low <= tick <= high]
    return ticks[:: math.ceil(len(ticks) / 7)]


def set_length_ticks(axes: Axes, lengths: Iterable[float]) -> None:
    """A logarithmic x axis with ticks at the lengths themselves; of close lengths, only at the longest."""
    wanted = sorted(set(lengths), reverse=True)
    gap = math.log(wanted[0] / wanted[-1]) / TICKS
    ticks: list[float] = []
    for length in wanted:
        if not ticks or math.log(ticks[-1] / length) >= gap:
            ticks.append(length)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [show_length(int(tick)) for tick in ticks])
    axes.minorticks_off()


def set_whole_ticks(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers, also where it has one only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def draw_lines(axes: Axes, marks: Sequence[Mark], *, width: float = 1.4, size: float = 0.0) -> None:
    """One line per mark. Where lines coincide they show in turn, as dashes; points that coincide are rings.

    Call it after the scales are set.

    Args:
        size: diameter of a point; 0: points show only where there is no line.
    """
    places = _places(axes, [point for mark in marks for point in mark.points])
    sharing: dict[tuple[Point, Point], dict[int, None]] = defaultdict(dict)
    for mark in marks:
        for start, end in pairwise(mark.points):
            sharing[places[start], places[end]][mark.number] = None
    for mark in marks:
        for members, run in groupby(pairwise(mark.points), lambda pair: sharing[places[pair[0]], places[pair[1]]]):
            path = list(run)
            turn, total = list(members).index(mark.number), len(members)
            style = "-" if total == 1 else (turn * DASH, (DASH, DASH * (total - 1)))
            xs, ys = zip(path[0][0], *(end for _, end in path), strict=True)
            [line] = axes.plot(xs, ys, color=mark.color, linewidth=width, linestyle=style, dash_capstyle="butt")
            belongs_to(line, mark.number)
    draw_points(axes, [mark for mark in marks if size or len(mark.points) == 1], size or 5.0)


def draw_points(axes: Axes, marks: Sequence[Mark], size: float, filled: Iterable[int] | None = None) -> None:
    """The points of every mark; those that coincide are rings around each other.

    Args:
        filled: numbers of the marks whose points are filled; None: all.
    """
    full = {mark.number for mark in marks} if filled is None else set(filled)
    for members in _coincident(axes, [(mark, point) for mark in marks for point in mark.points]):
        step = min(3.0, 8 / len(members))
        for ring, (mark, (x, y)) in enumerate(members):
            diameter = size + step * (len(members) - 1 - ring)
            face = mark.color if mark.number in full else "none"
            [point] = axes.plot(
                [x], [y], "o", color=mark.color, linestyle="none", markersize=diameter, markerfacecolor=face,
                markeredgecolor=mark.color, zorder=3,
            )  # fmt: skip
            belongs_to(point, mark.number)


def belongs_to(artist: Artist, *numbers: int) -> None:
    """Writes variant numbers into the SVG id of an artist; the page hides the artist together with these variants."""
    place = 0 if artist.axes is None else len(artist.axes.get_children())  # ids in a plot differ
    artist.set_gid("".join(f"v{number}-" for number in numbers) + f"{place}")


def write_numbers(axes: Axes, marks: Sequence[Mark], lift: float = 0.0) -> None:
    """Writes each mark's number beside its last point: one text where they coincide, moved where it would overlap.

    Args:
        lift: points by which a number is above its point where there is room.
    """
    groups = _coincident(axes, [(mark, mark.points[-1]) for mark in marks])
    height = 1.15 * NUMBER_SIZE
    ends = [tuple(axes.transData.transform(members[0][1]) * 72 / axes.figure.dpi) for members in groups]
    bottom = axes.bbox.y0 * 72 / axes.figure.dpi  # below are the labels of ticks
    taken = [(x - 4, x + 4, y) for x, y in ends]  # left, right and middle of what is there already, in points
    for (x, y), members in sorted(zip(ends, groups, strict=True), key=lambda found: found[0][1]):
        text, point = show_numbers(mark.number for mark, _ in members), members[0][1]
        left, right = x + 6, x + 8 + 0.62 * NUMBER_SIZE * len(text)
        for step in count():
            shift = (step + 1) // 2 * (1 if step % 2 else -1) * height / 2 + lift
            free = all(left >= end or right <= start or abs(y + shift - at) >= height for start, end, at in taken)
            if free and (y + shift >= bottom or step == 0):
                break
        taken.append((left, right, y + shift))
        color = members[0][0].color if len(members) == 1 else FOREGROUND
        leader = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
        label = axes.annotate(
            text, point, xytext=(7, shift), textcoords="offset points", fontsize=NUMBER_SIZE, va="center", color=color,
            arrowprops=leader if abs(shift) > height else None,
        )  # fmt: skip
        belongs_to(label, *(mark.number for mark, _ in members))


def show_numbers(numbers: Iterable[int]) -> str:
    """``1-3, 7``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _places(axes: Axes, points: list[Point]) -> dict[Point, Point]:
    """Places of points in the plot, in steps of `NEAR`: points that look the same have the same place."""
    axes.update_datalim(points)
    axes.autoscale_view()
    size = NEAR * axes.figure.dpi / 72
    found = axes.transData.transform(points)
    return {point: (round(x / size), round(y / size)) for point, (x, y) in zip(points, found.tolist(), strict=True)}


def _coincident(axes: Axes, marked: list[tuple[Mark, Point]]) -> list[list[tuple[Mark, Point]]]:
    """Marked points by where they are in the plot."""
    places, groups = _places(axes, [point for _, point in marked]) if marked else {}, defaultdict(list)
    for mark, point in marked:
        groups[places[point]].append((mark, point))
    return list(groups.values())
