"""Which differences between variants exceed the noise of the seeds, and limits that a reader has to know."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, groupby, pairwise
from typing import NamedTuple

from deepseek_attn.lab.experiments.report.pareto import (
    context_of,
    cost_at,
    has_own_costs,
    qualities,
    quality_of,
)
from deepseek_attn.lab.experiments.report.schema import (
    PairedDifference,
    Report,
    Spread,
    VariantReport,
    tasks,
    with_task,
)
from deepseek_attn.lab.experiments.report.statistics import holm, paired
from deepseek_attn.lab.experiments.report.table import show_length, show_number

EQUAL = 0.1  # costs that differ by less count as equal
NOISE = 0.05  # p of a difference that counts
LEAST_SEEDS = 3  # of a difference that counts: two that happen to agree have an interval of no width
ENOUGH_SEEDS = 5
FAMILIES = {
    "bound": "what a schedule loses against dense attention",
    "selection": "what the indexer loses against an oracle, and gains over a random selection",
    "front": "each schedule on the Pareto front of a quality against bytes less the next cheaper one",
    "equal bytes": "schedules whose KV bytes differ by less than 10 %",
    "equal reads": "schedules whose queries read as many bytes, within 10 %",
    "layers": "schedules with one changed layer less the schedule itself",
}
FAMILY_COSTS = {"front": "bytes_per_token", "equal bytes": "bytes_per_token", "equal reads": "read_bytes"}


class PricedDifference(NamedTuple):
    """A difference in quality, and the costs of both variants by `FAMILY_COSTS`; None where they are not counted."""

    row: PairedDifference
    one: float | None
    other: float | None


def make_comparisons(report: Report) -> list[PairedDifference]:
    """Paired differences by seed of every family of `FAMILIES`, for every quality that was measured over seeds."""
    rows: list[PairedDifference] = []
    for quality in qualities(report):
        task = quality.partition(" ")[0]
        if task not in tasks(report):
            continue
        for family, pairs in groupby(_pairs(report, quality, task), lambda pair: pair[0]):
            found = [_difference(quality, family, one, other) for _, one, other in pairs]
            rows += corrected([row for row in found if row is not None])
    return rows


def priced(report: Report, family: str) -> list[PricedDifference]:
    """The differences of a family, with costs."""
    variants, cost = {variant["name"]: variant for variant in report["variants"]}, FAMILY_COSTS.get(family)
    context = None if cost is None else context_of(report, cost)
    found = []
    for row in report["comparisons"]:
        if row["family"] == family:
            costs = [None if cost is None else cost_at(variants[row[n]], cost, context) for n in ("one", "other")]
            found.append(PricedDifference(row, *costs))
    return found


def corrected(rows: list[PairedDifference]) -> list[PairedDifference]:
    """The rows of a family, with p values corrected for the number of its comparisons."""
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] or 0.0 for row in tested]), strict=True):
        row["p"], row["exceeds"] = p, p < NOISE and len(row["seeds"]) >= LEAST_SEEDS
    return rows


def _pairs(report: Report, quality: str, task: str) -> Iterator[tuple[str, VariantReport, VariantReport]]:
    """(family, one, other), family by family."""
    trained = {variant["name"]: variant for variant, _ in with_task(report, task)}
    plain = [v for v in trained.values() if v["selection"] == "learned" and v["parent"] is None]
    compressed = [variant for variant in plain if variant["attention"] != "dense"]
    for bound in plain:
        if bound["attention"] == "dense":
            yield from (("bound", variant, bound) for variant in compressed)
    for control in trained.values():
        if control["twin"] in trained:
            yield "selection", trained[control["twin"]], control
    for front in report.get("fronts", []):
        if front["cost"] == FAMILY_COSTS["front"] and front["quality"] == quality:
            yield from (("front", trained[dearer], trained[cheaper]) for cheaper, dearer in pairwise(front["variants"]))
    for family in ("equal bytes", "equal reads"):
        cost = FAMILY_COSTS[family]
        context = context_of(report, cost)
        for one, other in combinations(filter(has_own_costs, compressed), 2):
            costs = [cost_at(variant, cost, context) for variant in (one, other)]
            if None not in costs and _close(costs[0] or 0.0, costs[1] or 0.0):
                yield family, one, other
    for variant in trained.values():
        if variant["parent"] in trained:
            yield "layers", variant, trained[variant["parent"]]


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= EQUAL * max(one, other)


def _difference(quality: str, family: str, one: VariantReport, other: VariantReport) -> PairedDifference | None:
    task = quality.partition(" ")[0]
    values = [_by_seed(variant, quality, task) for variant in (one, other)]
    seeds = [seed for seed in values[0] if seed in values[1]]
    if not seeds:
        return None
    found = paired([values[0][seed] - values[1][seed] for seed in seeds])
    return {
        "quality": quality, "family": family, "one": one["name"], "other": other["name"], "seeds": seeds,
        "mean": found.mean, "low": found.low, "high": found.high, "p": found.p, "exceeds": False,
    }  # fmt: skip


def _by_seed(variant: VariantReport, quality: str, task: str) -> dict[int, float]:
    spread: Spread | None = quality_of(variant, quality)
    seeds = variant.get("tasks", {})[task]["seeds"]
    return {} if spread is None else dict(zip(seeds, spread.get("values", [spread["mean"]]), strict=False))


def make_limits(report: Report) -> list[str]:
    """Sentences about the limits of the numbers."""
    found = []
    missing = report["units"]["missing"]
    if missing:
        found.append(f"{len(missing)} of {report['units']['total']} pieces of work have not been run.")
    for task in tasks(report):
        trained = with_task(report, task)
        counts = [len(quality["seeds"]) for _, quality in trained]
        quality = trained[0].quality
        found.append(
            f"{task}: models of {show_number(min(q['parameters'] for _, q in trained))} to "
            f"{show_number(max(q['parameters'] for _, q in trained))} parameters, trained on "
            f"{show_number(quality['tokens'])} tokens of sequences of {quality['by_length'][0]['seq_len']}."
        )
        if min(counts) < ENOUGH_SEEDS:
            few = sum(count < ENOUGH_SEEDS for count in counts)
            found.append(
                f"{task}: {few} of {len(counts)} variants have fewer than {ENOUGH_SEEDS} seeds and so wide intervals; "
                f"with fewer than {LEAST_SEEDS} no difference counts."
            )
    if report["cost_model"] is not None and tasks(report):
        longest = max(report["cost_model"]["contexts"])
        found.append(
            f"Costs are of {report['cost_model']['name']} at up to {show_length(longest)} tokens, qualities of the "
            "models that were trained: a pattern fits both depths, and its loss of quality at one depth may differ "
            "from that at the other."
        )
    shared = [variant["name"] for variant in report["variants"] if variant.get("other_depth", False)]
    if shared:
        found.append(
            f"{'; '.join(shared)}: layers share entries, in the counted model more of them than in the trained ones. "
            "Fronts and comparisons at equal costs leave them out."
        )
    if any(variant["selection"] != "learned" for variant in report["variants"]):
        found.append(
            "Oracle and random selections are controls: they have the entries and the costs of the learned one, and no "
            "engine runs them."
        )
    return found
