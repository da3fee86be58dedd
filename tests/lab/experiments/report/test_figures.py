"""What the plots of a report show."""

from deepseek_attn.lab.experiments.report.figures import one_of_each_size
from tests.support.typed import untyped


def test_a_size_has_one_task_the_first_of_its_kind():
    sizes = {"recall": None, "recall-10m": "10m", "recall-50m": "50m", "recall-lr": None, "recall-10m-lr": "10m"}
    found = {task: {"kind": "recall", "size": size} for task, size in sizes.items()}
    found["needle"] = {"kind": "needle", "size": "1m"}
    report = untyped({"variants": [{"tasks": {"recall": found["recall"]}}, {}, {"tasks": found}]})
    assert one_of_each_size(report, "recall") == ["recall", "recall-10m", "recall-50m"]
