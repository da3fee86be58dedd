"""Comparison of two folders of results: the same variants, the same quantities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepseek_attn.lab.experiments.report.pareto import (
    answers_of,
    context_of,
    cost_at,
    costs,
    error_of,
    is_equal,
    qualities,
    quality_of,
)
from deepseek_attn.lab.experiments.report.schema import Comparison, Difference, Report
from deepseek_attn.lab.experiments.report.table import COST_NAMES, show_length, show_number
from deepseek_attn.utils.json_files import read_json
from deepseek_attn.utils.typed_json import find_problem


def read_report(path: Path) -> Report:
    """The ``report.json`` of another folder.

    Raises:
        ValueError: the file is missing, or `write_report` did not write it.
    """
    try:
        report = read_json(path, str(path), max_bytes=None)
    except OSError as error:
        raise ValueError(
            f"--against: {str(path)!r} cannot be read ({error.strerror}): run `experiment report`"
        ) from error
    if problem := find_problem(report, Report, "report"):
        raise ValueError(f"--against: {str(path)!r}: {problem}; write it again by `experiment report`")
    return report


def compare(report: Report, other: Report, name: str) -> Comparison:
    """Costs at the context lengths of ``report``, and qualities, of the variants whose names both have."""
    others, rows = {variant["name"]: variant for variant in other["variants"]}, []
    for variant in report["variants"]:
        there = others.get(variant["name"])
        if there is None:
            continue
        head = {"number": variant["number"], "variant": variant["name"]}
        for cost in costs(report):
            context = context_of(report, cost)
            here, other_cost = cost_at(variant, cost, context), cost_at(there, cost, context)
            if here is not None and other_cost is not None:
                label = f"{COST_NAMES[cost]} at {show_length(context)}"
                rows.append(_difference(head, label, here, other_cost, equal=here == other_cost))
        for quality in qualities(report):
            one, two = quality_of(variant, quality), quality_of(there, quality)
            if one is not None and two is not None:
                errors = error_of(one, answers_of(variant, quality)), error_of(two, answers_of(there, quality))
                equal = is_equal(one["mean"], errors[0], two["mean"], errors[1])
                rows.append(_difference(head, quality, one["mean"], two["mean"], equal=equal))
    return {"name": name, "rows": rows}


def _difference(head: dict[str, Any], quantity: str, here: float, there: float, *, equal: bool) -> Difference:
    number, variant = head["number"], head["variant"]
    return {
        "number": number, "variant": variant, "quantity": quantity, "here": here, "there": there,
        "difference": here - there, "equal": equal,
    }  # fmt: skip


def show_comparison(comparison: Comparison) -> str:
    """One line per variant and quantity, for a terminal."""
    lines = [["#", "variant", "quantity", "here", comparison["name"], "difference"]]
    for row in comparison["rows"]:
        numbers = [show_number(row[name]) for name in ("here", "there", "difference")]
        numbers[2] += " (equal)" if row["equal"] else ""
        lines.append([str(row["number"]), row["variant"], row["quantity"], *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        pairs = zip(line, widths, strict=True)
        shown.append("  ".join(text.ljust(w) if i < 3 else text.rjust(w) for i, (text, w) in enumerate(pairs)).rstrip())
    return "\n".join(shown)
