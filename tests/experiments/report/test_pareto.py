"""Pareto fronts, spreads and what a report says of them."""

import random

import pytest

from deepseek_attn.experiments.report.pareto import front
from deepseek_attn.experiments.report.report import _average_rows, _curve, spread


@pytest.mark.parametrize("higher", [False, True])
def test_front_against_brute_force(higher):
    """Few distinct values, so that there are ties in cost, in quality and in both."""
    generator = random.Random(3)
    for _ in range(200):
        points = {str(i): (generator.randrange(4), generator.randrange(4)) for i in range(generator.randrange(1, 8))}
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
    assert spread([5.0])["std"] == 0.0


def test_curves_are_joined_where_all_have_a_point():
    assert _curve([[[20, 4.0], [40, 2.0], [50, 1.0]], [[20, 2.0], [40, 4.0]]]) == [
        [20, 3.0, 2.0, 4.0],
        [40, 3.0, 2.0, 4.0],
    ]


def test_rows_are_averaged_by_key():
    tables = [[{"layer": 0, "a": 1.0, "b": None}], [{"layer": 0, "a": 3.0, "b": 2.0}]]
    assert _average_rows(tables, ("layer",)) == [{"layer": 0, "a": 2.0, "b": None}]
