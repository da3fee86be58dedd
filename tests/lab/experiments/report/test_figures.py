"""What the plots of a report show."""

from deepseek_attn.lab.experiments.report.figures import Level, Line, levels, one_of_each_size
from tests.support.typed import untyped


def test_a_size_has_one_task_the_first_of_its_kind():
    sizes = {"recall": None, "recall-10m": "10m", "recall-50m": "50m", "recall-lr": None, "recall-10m-lr": "10m"}
    found = {task: {"kind": "recall", "size": size} for task, size in sizes.items()}
    found["needle"] = {"kind": "needle", "size": "1m"}
    report = untyped({"variants": [{"tasks": {"recall": found["recall"]}}, {}, {"tasks": found}]})
    assert one_of_each_size(report, "recall") == ["recall", "recall-10m", "recall-50m"]


def test_bounds_are_chance_and_the_best_dense_attention():
    tasks = {"recall": {"chance": 0.1}}
    found = [{"attention": kind, "tasks": tasks} for kind in ("compressed", "dense", "dense")]
    heights = ((1.0, 1.0), (0.5, 0.7), (0.8, 0.6))
    series = [Line(untyped(variant), list(enumerate(values))) for variant, values in zip(found, heights, strict=True)]
    report = untyped({"variants": found})
    assert levels(report, "recall accuracy", series) == [
        Level("chance", [(0.0, 0.1)]),
        Level("dense", [(0, 0.8), (1, 0.6)]),
    ]
    assert levels(report, "recall loss", series) == [Level("dense", [(0, 0.5), (1, 0.7)])]
    assert levels(untyped({"variants": []}), "recall accuracy", series[:1]) == []
