"""Plots whose data is awkward: short axes, single points, whole numbers, and lines on top of each other."""

from itertools import pairwise

import pytest

from deepseek_attn.lab.bench.plots import FOREGROUND, SERIES
from deepseek_attn.lab.experiments.report.axes import (
    Mark,
    draw_lines,
    draw_points,
    set_length_ticks,
    set_scale,
    set_whole_ticks,
    show_numbers,
    show_tick,
    write_numbers,
)
from tests.support.tiers import tiered


@pytest.fixture
def axes():
    from matplotlib.figure import Figure  # not by processes that run other tests

    return Figure(figsize=(5.2, 3.5)).subplots()


def draw(axes):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(axes.figure).draw()


def shown_ticks(axes):
    """(place, text, box) of the labels of the x axis inside the view, as drawn."""
    draw(axes)
    left, right = axes.get_xlim()
    labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    found = [(label.get_position()[0], label.get_text(), label.get_window_extent()) for label in labels]
    return sorted((place, text, box) for place, text, box in found if text and left <= place <= right)


def assert_readable(ticks, at_least):
    assert len(ticks) >= at_least
    assert len({text for _, text, _ in ticks}) == len(ticks), "two places read the same"
    for (_, _, one), (_, _, other) in pairwise(ticks):
        assert one.x1 < other.x0, "labels collide"


COSTS = [
    (2.85, 4.77),
    (2.85, 22.39),
    (1.01, 3.04),
    (20, 61),
    (61.0, 540.0),
    (100000, 100001),
    (123456, 998765),
    (7, 71),
    (4.4, 430),
    (3e5, 8e11),
    (0.0, 3.0),
]


@pytest.mark.parametrize(
    ("low", "high"),
    tiered(COSTS, [(2.85, 22.39), (100000, 100001), (3e5, 8e11), (0.0, 3.0)], quick_on_gpu=COSTS),
)
def test_ticks_of_a_cost_do_not_collide(axes, low, high):
    values = [low, low + (high - low) / 3, high]
    set_scale(axes, "x", values)
    axes.plot(values, values)
    assert axes.get_xscale() == ("log" if low and high >= 3 * low else "linear")
    assert_readable(shown_ticks(axes), 2)


@pytest.mark.parametrize("lengths", [[512], [160, 256, 512], [4096, 4160, 5000, 8192], range(4, 516, 4)], ids=str)
def test_ticks_of_lengths_are_lengths_with_the_longest(axes, lengths):
    set_length_ticks(axes, lengths)
    axes.plot(lengths, lengths)
    ticks = shown_ticks(axes)
    assert_readable(ticks, min(2, len(lengths)))
    assert {place for place, _, _ in ticks} <= set(lengths)
    assert ticks[-1][0] == max(lengths)


@pytest.mark.parametrize("layers", [[3], [0, 1], range(43)], ids=str)
def test_layers_are_whole_numbers(axes, layers):
    set_whole_ticks(axes)
    draw_lines(axes, [Mark(1, SERIES[0], [(layer, 0.5) for layer in layers])], size=3)
    ticks = shown_ticks(axes)
    assert_readable(ticks, min(2, len(layers)))
    assert all(text == str(int(text)) for _, text, _ in ticks)


def test_a_curve_of_one_point_is_a_mark(axes):
    draw_lines(axes, [Mark(1, SERIES[0], [(20, 3.0)]), Mark(2, SERIES[1], [(20, 2.0), (40, 1.0)])])
    marked = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_xydata().tolist() for line in marked] == [[[20, 3.0]]]
    assert marked[0].get_markersize() > 3


def dashes(line):
    """(offset, shown, hidden) in units of the line's width; None for a solid line."""
    offset, pattern = line._unscaled_dash_pattern
    return pattern and (offset, *pattern)


def test_lines_that_coincide_show_in_turn_where_they_do(axes):
    """The first segment is all three's, the second that of two, the third each line's own."""
    tails = {1: [5, 9], 2: [5, 7], 3: [2, 1]}
    marks = [Mark(n, SERIES[n], [(0, 1), (1, 3), *enumerate(tail, 2)]) for n, tail in tails.items()]
    draw_lines(axes, marks)
    found = {}
    for line in axes.lines:
        for start, end in pairwise(line.get_xdata()):
            found[SERIES.index(line.get_color()), start, end] = dashes(line)
    for members, start in (((1, 2, 3), 0), ((1, 2), 1)):
        patterns = [found[member, start, start + 1] for member in members]
        shown = patterns[0][1]
        assert {hidden for _, _, hidden in patterns} == {shown * (len(members) - 1)}
        assert [offset for offset, _, _ in patterns] == [shown * turn for turn in range(len(members))]
    assert all(found[key] is None for key in [(3, 1, 2), (1, 2, 3), (2, 2, 3), (3, 2, 3)])


def test_points_that_coincide_are_rings_of_different_sizes(axes):
    points = [(1.0, 1.0), (2.0, 1.0), (1.0, 1.0)]
    draw_points(axes, [Mark(n, SERIES[n], [point]) for n, point in enumerate(points, 1)], 6.5, filled=[1])
    sizes = {SERIES.index(line.get_markeredgecolor()): line.get_markersize() for line in axes.lines}
    assert sizes[1] > sizes[3] == sizes[2] == 6.5
    assert [line.get_markerfacecolor() for line in axes.lines].count("none") == 2


def test_numbers_of_points_that_coincide_are_one_text_and_none_overlap(axes):
    from matplotlib.text import Text

    ends = [1.0, 1.0, 1.1, 1.2, 5.0, 1.0]
    marks = [Mark(n, SERIES[n], [(0, 0), (1, end)]) for n, end in enumerate(ends, 1)]
    draw_lines(axes, marks)
    write_numbers(axes, marks)
    draw(axes)
    texts = {text.get_text(): text for text in axes.texts}
    assert set(texts) == {"1, 2, 6", "3", "4", "5"}
    assert texts["1, 2, 6"].get_color() == FOREGROUND
    assert texts["5"].get_color() == SERIES[5]
    boxes = [Text.get_window_extent(text) for text in texts.values()]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


def test_numbers_and_ticks_are_short():
    assert show_numbers([7, 1, 2, 3, 9, 10]) == "1-3, 7, 9, 10"
    assert [show_tick(value) for value in (0.5, 20, 1500, 2e6, 1e10)] == ["0.5", "20", "1.5k", "2M", "10G"]
