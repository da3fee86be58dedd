"""Paired differences: intervals and p values against published tables, and the families that a report compares."""

from typing import Any

import pytest

from deepseek_attn.lab.experiments.report.comparisons import make_comparisons, make_limits, priced
from deepseek_attn.lab.experiments.report.pareto import mark_front
from deepseek_attn.lab.experiments.report.report import spread
from deepseek_attn.lab.experiments.report.statistics import holm, paired, t_quantile, t_within
from tests.support.typed import required


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (10, 2.2281), (29, 2.0452)],
)
def test_quantiles_are_those_of_the_tables(freedom, expected):
    assert t_quantile(0.95, freedom) == pytest.approx(expected, abs=5e-5)
    assert t_within(expected, freedom) == pytest.approx(0.95, abs=1e-5)


def test_the_interval_of_a_mean_of_five():
    """Standard error 0.7071, times 2.7764."""
    found = paired([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert (found.low, found.high) == pytest.approx((1.0368, 4.9632), abs=1e-4)
    assert found.p == pytest.approx(0.01324, abs=1e-5)


def test_one_seed_has_no_interval_and_equal_differences_no_width():
    assert paired([0.5]) == (0.5, None, None, None)
    assert paired([0.5, 0.5]) == (0.5, 0.5, 0.5, 0.0)
    assert paired([0.0, 0.0]).p == 1.0
    with pytest.raises(ValueError, match="needs a seed"):
        paired([])


def test_holm_is_the_method_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def variant(number, name, values, **fields):
    """A variant of a report with accuracies by seed."""
    task = {"kind": "recall", "seeds": list(range(len(values))), "accuracy": spread(values), "answers": 100,
            "parameters": 1000, "tokens": 5, "by_length": [{"seq_len": 8}]}  # fmt: skip
    costs = fields.pop("costs", None)
    defaults = {"attention": "compressed", "selection": "learned", "twin": None, "parent": None}
    found = {"number": number, "name": name, "tasks": {"recall": task}} | defaults | fields
    if costs:
        found["cost"] = {"contexts": [{"context": 64, "bytes_per_token": costs[0], "read_bytes": costs[1]}]}
    return found


def report(*variants) -> Any:
    return {"variants": list(variants), "units": {"missing": [], "total": 1}, "cost_model": None}


def test_families_of_comparisons():
    found = make_comparisons(
        report(
            variant(1, "dense", [0.9, 0.91, 0.9], attention="dense", costs=(100, 1000)),
            variant(2, "learned", [0.7, 0.72, 0.71], costs=(10, 50)),
            variant(3, "oracle", [0.75, 0.76, 0.75], selection="oracle", twin="learned", costs=(10, 50)),
            variant(4, "equal", [0.5, 0.75, 0.7], costs=(10.5, 80)),
            variant(5, "changed", [0.71, 0.72, 0.7], parent="learned"),
        )
    )
    pairs = {(row["family"], row["one"], row["other"]): row for row in found}
    assert set(pairs) == {
        ("bound", "learned", "dense"), ("bound", "equal", "dense"), ("selection", "learned", "oracle"),
        ("equal bytes", "learned", "equal"), ("layers", "changed", "learned"),
    }  # fmt: skip
    loss = pairs["bound", "learned", "dense"]
    assert loss["mean"] == pytest.approx(-0.19333, abs=1e-5)
    assert loss["exceeds"]
    assert required(loss["low"]) < loss["mean"] < required(loss["high"]) < 0
    assert not pairs["equal bytes", "learned", "equal"]["exceeds"]
    assert not pairs["layers", "changed", "learned"]["exceeds"]


def test_what_more_bytes_buy_follows_the_front():
    trained = report(
        variant(1, "dense", [0.9, 0.91, 0.9], attention="dense", costs=(100, 1000)),
        variant(2, "learned", [0.7, 0.72, 0.71], costs=(10, 50)),
        variant(3, "window", [0.1, 0.12, 0.11], costs=(1, 5)),
        variant(4, "changed", [0.6, 0.61, 0.62], parent="learned"),
    )
    trained["fronts"] = mark_front(trained)
    trained["comparisons"] = make_comparisons(trained)
    steps = [(found.row["one"], found.one, found.row["other"], found.other) for found in priced(trained, "front")]
    assert steps == [("learned", 10, "window", 1), ("dense", 100, "learned", 10)]
    assert all(found.row["mean"] > 0 and found.row["exceeds"] for found in priced(trained, "front"))
    assert [(found.row["one"], found.one, found.other) for found in priced(trained, "layers")] == [
        ("changed", None, None)
    ]


def test_entries_shared_at_another_depth_have_no_comparable_costs():
    trained = report(
        variant(1, "dense", [0.9, 0.91, 0.9], attention="dense", costs=(100, 1000)),
        variant(2, "learned", [0.7, 0.72, 0.71], costs=(10, 50)),
        variant(3, "shared", [0.9, 0.92, 0.9], costs=(10, 50), other_depth=True),
    )
    assert [front["variants"] for front in mark_front(trained)] == [["learned", "dense"]] * 2
    trained["fronts"] = mark_front(trained)
    pairs = {(row["family"], row["one"], row["other"]) for row in make_comparisons(trained)}
    assert pairs == {("bound", "learned", "dense"), ("bound", "shared", "dense"), ("front", "dense", "learned")}
    assert "shared: layers share entries" in " ".join(make_limits(trained))


def test_p_values_are_corrected_within_a_family():
    dense = variant(1, "dense", [0.9, 0.91, 0.9], attention="dense")
    one = [variant(2, "a", [0.8, 0.83, 0.81])]
    many = one + [variant(number, f"v{number}", [0.9, 0.9, 0.91]) for number in range(3, 12)]
    alone, among = (
        next(row for row in make_comparisons(report(dense, *others)) if row["one"] == "a") for others in (one, many)
    )
    assert among["p"] == pytest.approx(10 * required(alone["p"]))


def test_seeds_are_paired_by_their_number():
    dense, other = variant(1, "dense", [0.9, 0.5], attention="dense"), variant(2, "a", [0.4, 0.8])
    other["tasks"]["recall"]["seeds"] = [1, 0]
    [row] = make_comparisons(report(dense, other))
    assert row["seeds"] == [1, 0]
    assert row["mean"] == pytest.approx(-0.1)


def test_limits_name_what_was_not_run_and_too_few_seeds():
    found = " ".join(make_limits(report(variant(1, "a", [0.5] * 3)) | {"units": {"missing": ["b"], "total": 9}}))
    assert "1 of 9 pieces of work have not been run" in found
    assert "1 of 1 variants have fewer than 5 seeds" in found


def test_two_seeds_that_agree_are_not_enough():
    pairs = make_comparisons(
        report(
            variant(1, "dense", [0.9, 0.8], attention="dense", costs=(100, 1000)),
            variant(2, "learned", [0.7, 0.6], costs=(10, 50)),
        )
    )
    assert [(row["seeds"], row["exceeds"]) for row in pairs] == [([0, 1], False)]
