"""Pareto fronts, spreads and what a report says of them."""

import random

import pytest

from deepseek_attn.lab.experiments.report.pareto import error_of, front, is_equal
from deepseek_attn.lab.experiments.report.report import _average_rows, _curve, _length_row, spread
from tests.support.typed import untyped


@pytest.mark.parametrize("higher", [False, True])
def test_front_against_brute_force(higher):
    """Few distinct values, so that there are ties in cost, in quality and in both."""
    generator = random.Random(3)
    for _ in range(200):
        points: dict[str, tuple[float, float]] = {
            str(i): (generator.randrange(4), generator.randrange(4)) for i in range(generator.randrange(1, 8))
        }
        expected = set()
        for name, (cost, quality) in points.items():
            better = [
                (c, q)
                for c, q in points.values()
                if c <= cost and (q >= quality if higher else q <= quality) and (c, q) != (cost, quality)
            ]
            if not better:
                expected.add(name)
        found = front(points, higher)
        assert set(found) == expected
        assert [points[name][0] for name in found] == sorted(points[name][0] for name in found)


def test_spread_is_of_a_sample():
    assert spread([1.0, 3.0]) == {"mean": 2.0, "std": 2**0.5, "low": 1.0, "high": 3.0, "values": [1.0, 3.0]}
    assert untyped(spread([5.0]))["std"] == 0.0


def test_curves_are_joined_where_all_have_a_point():
    assert _curve([[[20, 4.0], [40, 2.0], [50, 1.0]], [[20, 2.0], [40, 4.0]]]) == [
        [20, 3.0, 2.0, 4.0],
        [40, 3.0, 2.0, 4.0],
    ]


def test_rows_are_averaged_by_key():
    tables = [[{"layer": 0, "a": 1.0, "b": None}], [{"layer": 0, "a": 3.0, "b": 2.0}]]
    assert _average_rows(tables, ("layer",)) == [{"layer": 0, "a": 2.0, "b": None}]
    tables[1].insert(0, {"layer": 1, "a": 9.0, "b": 9.0})  # not in both
    assert _average_rows(tables, ("layer",)) == [{"layer": 0, "a": 2.0, "b": None}]


def test_errors_are_those_of_seeds_or_of_so_many_answers():
    assert error_of(spread([0.4, 0.6])) == pytest.approx(0.1)
    assert error_of(spread([0.5]), answers=400) == pytest.approx(0.025)
    assert error_of(spread([0.4, 0.6]), answers=400) == pytest.approx(0.1)
    assert error_of(spread([0.0, 0.0]), answers=10) > 0.04, "no answer of twenty right is not certainty"
    assert is_equal(0.5, 0.03, 0.59, 0.04)
    assert not is_equal(0.5, 0.03, 0.61, 0.04)


def test_a_dearer_point_must_be_better_by_more_than_errors_explain():
    points = {"cheap": (1.0, 0.50), "noise": (2.0, 0.53), "better": (3.0, 0.70), "twin": (3.0, 0.69)}
    errors = dict.fromkeys(points, 0.02)
    assert set(front(points, True)) == {"cheap", "noise", "better"}
    assert set(front(points, True, errors)) == {"cheap", "better", "twin"}
    losses = {name: (cost, -quality) for name, (cost, quality) in points.items()}
    assert set(front(losses, False, errors)) == {"cheap", "better", "twin"}


def test_lengths_have_the_range_over_the_seeds():
    rest = {"seq_len": 8, "chance": 0.25}
    rows = (
        {"loss": 1.0, "accuracy": 0.5, "trailing": 1.0, **rest},
        {"loss": 3.0, "accuracy": 0.25, "trailing": 2.0, **rest},
    )
    assert _length_row(untyped(rows)) == {
        "seq_len": 8, "chance": 0.25, "trailing": 1.5, "loss": 2.0, "loss_low": 1.0, "loss_high": 3.0,
        "accuracy": 0.375, "accuracy_low": 0.25, "accuracy_high": 0.5,
    }  # fmt: skip
