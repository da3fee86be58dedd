"""Sections of a report's page about cost, and about single layers; empty where nothing was measured."""

from __future__ import annotations

from typing import Any

from deepseek_attn.experiments.report import plots
from deepseek_attn.experiments.report.parts import figures, fold, name_cell, number, table
from deepseek_attn.experiments.report.sections_quality import tasks, with_task
from deepseek_attn.experiments.report.table import show_length

Report = dict[str, Any]

COST_PLOTS = {
    "sequence_bytes": "cache bytes of a sequence",
    "read_bytes": "cache bytes read by a query",
    "flops": "FLOPs of a query, all attention layers",
    "decode_ms": "decode ms, all attention layers",
    "prefill_ms": "prefill ms, all attention layers",
}


def costs(report: Report) -> str:
    """Bytes, FLOPs and times of attention, as counted and as measured."""
    variants = [variant for variant in report["variants"] if "cost" in variant]
    if not variants:
        return ""
    items, rows = [], []
    for name, caption in COST_PLOTS.items():
        series = [
            (variant, [(row["context"], row[name]) for row in variant["cost"]["contexts"] if row[name] is not None])
            for variant in variants
        ]
        series = [(variant, points) for variant, points in series if points]
        if series:
            items.append((f"cost-{name}", caption, plots.lines(series, "context", caption, log="xy")))
    for variant in variants:
        for row in variant["cost"]["contexts"]:
            cells = "".join(number(row[name]) for name in COST_PLOTS)
            rows.append(
                f'{name_cell(variant)}<td data-value="{row["context"]}">{show_length(row["context"])}</td>{cells}'
            )
    note = (
        "<p>Times are measured, layer by layer, where the caches fit the device; a dash is a length that does not.</p>"
    )
    found = [note, figures(items), fold("All costs", table(["#", "variant", "context", *COST_PLOTS.values()], rows))]
    return "<h2>Cost against context length</h2>\n" + "\n".join(found)


def model_times(report: Report) -> str:
    """Measured steps of the base model."""
    rows = []
    for variant in report["variants"]:
        for row in variant.get("model_time", {}).get("times", []):
            cells = number(row["decode_ms"]) + number(row["prefill_ms"])
            rows.append(
                f'{name_cell(variant)}<td data-value="{row["context"]}">{show_length(row["context"])}</td>{cells}'
            )
    if not rows:
        return ""
    headers = ["#", "variant", "context", "decode ms", "prefill ms"]
    return f"<h2>Whole steps of the base model</h2>\n{fold('Times', table(headers, rows))}"


RECALL = {
    "token_mass": "dense attention covered by what is read",
    "entry_mass": "attention to entries kept by the indexer",
    "index_recall": "indexer recall@k",
}


def layers(report: Report) -> str:
    """Per layer: what is kept of attention, for every source of layers, and what a layer costs."""
    sources = {task: {v["name"]: v["tasks"][task]["layers"] for v in with_task(report, task)} for task in tasks(report)}
    sources["checkpoint"] = {v["name"]: v.get("checkpoint", {}).get("layers", []) for v in report["variants"]}
    items, rows = [], []
    for source, tables in sources.items():
        for metric, caption in RECALL.items():
            series = []
            for variant in report["variants"]:
                layers = tables.get(variant["name"], [])
                points = [(row["layer"], row[metric]) for row in layers if row[metric] is not None]
                if points:
                    series.append((variant, points))
            if series:
                label = f"{source}: {caption}, by layer"
                items.append((f"layer-{source}-{metric}", label, plots.lines(series, "layer", caption, whole=True)))
        for variant in report["variants"]:
            for row in tables.get(variant["name"], []):
                cells = "".join(number(row[name]) for name in (*RECALL, "index_recall_of_chance"))
                place = f'<td>{source}</td><td data-value="{row["layer"]}">{row["layer"]}</td><td>{row["kind"]}</td>'
                rows.append(name_cell(variant) + place + cells)
    found = [figures(items)] if items else []
    if rows:
        headers = ["#", "variant", "measured on", "layer", "kind", *RECALL.values(), "recall@k of chance"]
        found.append(fold("What each layer keeps", table(headers, rows)))
    found += _layer_costs(report)
    return "<h2>Per layer</h2>\n" + "\n".join(found) if found else ""


def _layer_costs(report: Report) -> list[str]:
    names = {"per_token": "bytes per token", "fixed": "fixed bytes", "read_bytes": "bytes read", "flops": "FLOPs"}
    names |= {"decode_ms": "decode ms", "prefill_ms": "prefill ms"}
    rows = []
    for variant in report["variants"]:
        for layer in variant.get("cost", {}).get("layers", []):
            place = f'<td data-value="{layer["layer"]}">{layer["layer"]}</td><td>{layer["kind"]}</td>'
            rows.append(name_cell(variant) + place + "".join(number(layer[name]) for name in names))
    if not rows:
        return []
    title = "What each layer costs (a query's reads, FLOPs and times at the longest context)"
    return [fold(title, table(["#", "variant", "layer", "kind", *names.values()], rows))]
