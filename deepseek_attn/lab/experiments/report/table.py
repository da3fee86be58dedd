"""The main table of a report, and its text for a terminal."""

from __future__ import annotations

import csv
import io
from typing import NamedTuple

from deepseek_attn.lab.experiments.report.pareto import (
    answers_of,
    chance_of,
    context_of,
    cost_at,
    costs,
    qualities,
    quality_of,
)
from deepseek_attn.lab.experiments.report.schema import Report, VariantReport

COST_NAMES = {
    "bytes_per_token": "KV bytes per token",
    "read_bytes": "bytes read by a query",
    "decode_ms": "decode ms",
    "prefill_ms": "prefill ms",
}


def show_length(tokens: int | None) -> str:
    """``512``, ``64K``, ``1M``."""
    if tokens is None:
        return "?"
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def show_number(value: float | None) -> str:
    """Four digits are enough for people; None is a dash."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return str(int(value)) if value == int(value) else f"{value:.4g}"


class Cell(NamedTuple):
    """A number of the main table, None where nothing was measured; ``std`` over seeds, where there are any."""

    mean: float | None
    std: float | None = None


class SummaryRow(NamedTuple):
    """``on_front``: the variant is on a Pareto front of a quality against bytes."""

    variant: VariantReport
    on_front: bool
    cells: list[Cell]


class Summary(NamedTuple):
    """The main table: one row per variant; ``columns`` name the cells."""

    columns: list[str]
    rows: list[SummaryRow]


def summary(report: Report, notes: bool = True) -> Summary:
    """The costs and qualities of every variant; with ``notes``, columns say what guessing reaches."""
    names, wanted = costs(report), qualities(report)
    contexts = {name: context_of(report, name) for name in names}
    columns = [*(f"{COST_NAMES[name]} at {show_length(contexts[name])}" for name in names)]
    columns += [f"{name}{note_of(report, name) if notes else ''}" for name in wanted]
    best = {name for front in report["fronts"] for name in front["variants"] if front["cost"] == "bytes_per_token"}
    rows = []
    for variant in report["variants"]:
        cells = [Cell(cost_at(variant, name, contexts[name])) for name in names]
        found = [quality_of(variant, name) for name in wanted]
        cells += [Cell(None) if value is None else Cell(value["mean"], value.get("std")) for value in found]
        rows.append(SummaryRow(variant, variant["name"] in best, cells))
    return Summary(columns, rows)


def note_of(report: Report, quality: str) -> str:
    """`` (chance 0.0625, 512 answers a seed)`` where there are answers."""
    chance = chance_of(report, quality)
    counts = (answers_of(variant, quality) for variant in report["variants"])
    answers = {count for count in counts if count is not None}
    parts = [] if chance is None else [f"chance {show_number(chance)}"]
    parts += [f"{min(answers)} answers a seed"] if answers else []
    return f" ({', '.join(parts)})" if parts else ""


def timing_note(report: Report) -> str:
    """Note on contexts without times because of ``time_up_to``; empty if all have times."""
    cost = report["cost_model"]
    if cost is None or cost["time_up_to"] >= max(cost["contexts"]):
        return ""
    limit = f"time_up_to is {cost['time_up_to']}"
    if cost["time_up_to"] < min(cost["contexts"]):
        return f"Nothing was timed: {limit}, and the shortest context has {min(cost['contexts'])} tokens."
    return f"Contexts of more than {show_length(cost['time_up_to'])} tokens were counted, not timed: {limit}."


def show_table(report: Report) -> str:
    """The main table as aligned text; ``*`` marks variants on a Pareto front of a quality against bytes."""
    table = summary(report)
    lines = [["#", "variant", *table.columns]]
    for variant, on_front, cells in table.rows:
        texts = [f"{show_number(mean)}{f' ± {show_number(std)}' if std else ''}" for mean, std in cells]
        lines.append([str(variant["number"]), f"{variant['name']}{' *' if on_front else ''}", *texts])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for number, name, *texts in lines:
        aligned = [number.rjust(widths[0]), name.ljust(widths[1])]
        aligned += [text.rjust(width) for text, width in zip(texts, widths[2:], strict=True)]
        shown.append("  ".join(aligned).rstrip())
    units = report["units"]
    note = f"{units['done']} of {units['total']} pieces of work done"
    notes = [
        *show_comparisons(report),
        f"* on the Pareto front of a quality against bytes; {note}",
        timing_note(report),
    ]
    return "\n".join([*shown, "", *filter(None, notes)])


def show_comparisons(report: Report) -> list[str]:
    """How many paired differences of each family exceed the noise."""
    counts: dict[tuple[str, str], list[bool]] = {}
    for row in report["comparisons"]:
        if row["p"] is not None:
            counts.setdefault((row["quality"], row["family"]), []).append(row["exceeds"])
    return [
        f"{quality}, {family}: {sum(found)} of {len(found)} differences exceed the noise"
        for (quality, family), found in counts.items()
    ]


def make_csv(report: Report, mark: str) -> str:
    """The main table with exact numbers, a row per variant; the first column, named ``mark``, names the experiment."""
    table, out = summary(report), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [name for column in table.columns for name in (column, f"{column}, standard deviation")]
    rows = [[value for cell in row.cells for value in cell] for row in table.rows]
    kept = [place for place in range(len(names)) if any(row[place] is not None for row in rows)]
    writer.writerow([mark, "number", "variant", "schedule", *(names[place] for place in kept)])
    for (variant, _, _), row in zip(table.rows, rows, strict=True):
        numbers = ["" if row[place] is None else row[place] for place in kept]
        writer.writerow([report["name"], variant["number"], variant["name"], variant["schedule"], *numbers])
    return out.getvalue()
