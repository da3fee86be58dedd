"""The table of a report, as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepseek_attn.experiments.report.pareto import context_of, cost_at, costs, qualities, quality_of

COST_NAMES = {"bytes_per_token": "KV bytes per token", "decode_ms": "decode ms", "prefill_ms": "prefill ms"}


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
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def summary(report: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Headers and rows of the main table: one row per variant, of ``(value, std)`` pairs after number and name."""
    names, wanted = costs(report), qualities(report)
    contexts = {name: context_of(report, name) for name in names}
    headers = ["#", "variant", *(f"{COST_NAMES[name]} at {show_length(contexts[name])}" for name in names)]
    headers += list(wanted)
    rows = []
    for variant in report["variants"]:
        prices = [(cost_at(variant, name, contexts[name]), None) for name in names]
        found = [quality_of(variant, name) for name in wanted]
        values = [(None, None) if value is None else (value["mean"], value.get("std")) for value in found]
        rows.append([variant["number"], variant["name"], *prices, *values])
    return headers, rows


def show_table(report: dict[str, Any]) -> str:
    """The main table as aligned text; ``*`` marks variants on a Pareto front of quality against bytes."""
    headers, rows = summary(report)
    best = {name for front in report["fronts"] if front["cost"] == "bytes_per_token" for name in front["variants"]}
    lines = [[str(header) for header in headers]]
    for number, name, *cells in rows:
        texts = [f"{show_number(value)}{f' ± {show_number(std)}' if std else ''}" for value, std in cells]
        lines.append([str(number), f"{name}{' *' if name in best else ''}", *texts])
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    justify: list[Callable[[str, int], str]] = [str.rjust, str.ljust] + [str.rjust] * (len(headers) - 2)
    shown = [
        "  ".join(place(cell, width) for place, cell, width in zip(justify, line, widths, strict=True)).rstrip()
        for line in lines
    ]
    units = report["units"]
    note = f"{units['done']} of {units['total']} pieces of work done"
    return "\n".join([*shown, "", f"* on the Pareto front of a quality against bytes; {note}"])
