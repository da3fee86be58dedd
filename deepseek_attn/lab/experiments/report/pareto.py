"""Pareto fronts: variants that no other variant beats in both cost and quality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from deepseek_attn.lab.experiments.report.schema import Front, Report, Spread, TaskQuality, VariantReport


def qualities(report: Report) -> dict[str, bool]:
    """Names of the qualities a report has, and whether higher is better: ``text loss``, ``recall accuracy``, ...

    ``checkpoint KL`` is the divergence from the checkpoint's own schedule.
    """
    found: dict[str, bool] = {}
    for variant in report["variants"]:
        for task, quality in variant.get("tasks", {}).items():
            found[f"{task} {metric_of(quality)}"] = quality["kind"] != "text"
            for name in quality.get("lm_eval", {}):
                found[f"{task} {name}"] = "perplexity" not in name and "bits" not in name
        if "kl" in variant.get("checkpoint", {}):
            found["checkpoint KL"] = False
    return found


def metric_of(quality: TaskQuality) -> str:
    """The quality of a task: ``loss`` of a text, else ``accuracy``."""
    return "loss" if quality["kind"] == "text" else "accuracy"


def quality_of(variant: VariantReport, name: str) -> Spread | None:
    """``mean``, ``low`` and ``high`` of one quality; None if the variant has no such measurement."""
    if name == "checkpoint KL":
        value = variant.get("checkpoint", {}).get("kl")
        return None if value is None else {"mean": value, "low": value, "high": value}
    task, _, metric = name.partition(" ")
    found = variant.get("tasks", {}).get(task, {})
    return found[metric] if metric in ("loss", "accuracy") and found else found.get("lm_eval", {}).get(metric)


def answers_of(variant: VariantReport, name: str) -> int | None:
    """Answers per seed that an accuracy is over; None for other qualities."""
    task, _, metric = name.partition(" ")
    return variant.get("tasks", {}).get(task, {}).get("answers") if metric == "accuracy" else None


def chance_of(report: Report, name: str) -> float | None:
    """The chance level of a quality; None if unknown."""
    task, _, metric = name.partition(" ")
    found = [variant.get("tasks", {}).get(task, {}).get("chance") for variant in report["variants"]]
    return next((chance for chance in found if chance is not None), None) if metric == "accuracy" else None


def bound_of(report: Report, name: str) -> float | None:
    """The best quality of dense attention, with a window layer or without; None if it was not measured."""
    found = [quality_of(variant, name) for variant in report["variants"] if variant.get("attention") == "dense"]
    means = [quality["mean"] for quality in found if quality is not None]
    return (min if name.endswith("loss") else max)(means, default=None)


def costs(report: Report) -> tuple[str, ...]:
    """Names of the costs a report has: ``bytes_per_token``, ``read_bytes``, ``decode_ms``, ``prefill_ms``."""
    names = ("bytes_per_token", "read_bytes", "decode_ms", "prefill_ms")
    return tuple(name for name in names if context_of(report, name) is not None)


def context_of(report: Report, name: str) -> int | None:
    """The longest context at which every variant with this cost has a value; None without such a context."""
    lengths = [
        {row["context"] for row in variant.get("cost", {}).get("contexts", []) if row.get(name) is not None}
        for variant in report["variants"]
    ]
    measured = [found for found in lengths if found]
    common = set.intersection(*measured) if measured else set()
    return max(common, default=None)


def error_of(quality: Spread, answers: int | None = None) -> float:
    """Standard error of a mean over the seeds; at least the binomial error of ``answers`` per seed, if given."""
    seeds = len(quality.get("values", [0]))
    variance = quality.get("std", 0.0) ** 2 / seeds
    if answers:
        drawn = answers * seeds
        share = (quality["mean"] * drawn + 1) / (drawn + 2)  # not 0 or 1, whose error would be 0
        variance = max(variance, share * (1 - share) / drawn)
    return math.sqrt(variance)


def is_equal(one: float, error: float, other: float, other_error: float) -> bool:
    """Whether two means differ by no more than twice the standard error of their difference."""
    return abs(one - other) <= 2 * math.hypot(error, other_error)


def front(points: dict[str, tuple[float, float]], higher: bool, errors: Mapping[str, float] | None = None) -> list[str]:
    """Names of the points ``(cost, quality)`` that no other point beats, cheapest first.

    A point is beaten if another is at least as good in both and better in one. With ``errors``, a difference in quality
    within the errors counts as equal (`is_equal`).
    """
    kept, errors, sign = [], errors or {}, 1 if higher else -1
    for name, (cost, quality) in points.items():
        beaten = False
        for rival, (other_cost, other) in points.items():
            equal = is_equal(quality, errors.get(name, 0.0), other, errors.get(rival, 0.0))
            better = sign * other > sign * quality and not equal
            beaten |= (other_cost < cost and (better or equal)) or (other_cost == cost and better)
        if not beaten:
            kept.append(name)
    return sorted(kept, key=lambda name: points[name])


def mark_front(report: Report) -> list[Front]:
    """The front of every quality against every cost."""
    fronts: list[Front] = []
    for quality, higher in qualities(report).items():
        for cost in costs(report):
            found = [point for point in measured(report, quality, cost) if has_own_costs(point.variant)]
            points = {p.variant["name"]: (p.cost, p.quality["mean"]) for p in found}
            errors = {p.variant["name"]: error_of(p.quality, answers_of(p.variant, quality)) for p in found}
            context = context_of(report, cost)
            if points and context is not None:
                names = front(points, higher, errors)
                fronts.append(
                    {"quality": quality, "cost": cost, "context": context, "higher": higher, "variants": names}
                )
    return fronts


def has_own_costs(variant: VariantReport) -> bool:
    """False for controls, and for variants that share entries among more layers than their trained models."""
    return variant["selection"] == "learned" and not variant.get("other_depth", False)


class Point(NamedTuple):
    """A variant by its cost and its quality."""

    variant: VariantReport
    cost: float
    quality: Spread


def measured(report: Report, quality: str, cost: str) -> list[Point]:
    """The variants with both values, at the context of `context_of`."""
    context, points = context_of(report, cost), []
    for variant in report["variants"]:
        price, value = cost_at(variant, cost, context), quality_of(variant, quality)
        if price is not None and value is not None:
            points.append(Point(variant, price, value))
    return points


def cost_at(variant: VariantReport, name: str, context: int | None) -> float | None:
    """A cost of a variant at one context; None if it was not measured there."""
    rows = variant.get("cost", {}).get("contexts", [])
    return next((row[name] for row in rows if row["context"] == context), None)
