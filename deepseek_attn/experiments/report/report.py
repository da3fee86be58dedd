"""Records -> the numbers of a report: one JSON document, from which tables and plots are made and nothing else."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.experiments.define.config import Experiment
from deepseek_attn.experiments.define.settings import CostSettings
from deepseek_attn.experiments.define.units import Unit, layer_key, make_units
from deepseek_attn.experiments.define.variant import Variant
from deepseek_attn.experiments.report.pareto import mark_front
from deepseek_attn.experiments.run.records import read_record

Values = dict[str, Any]
BASE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "sliding_window",
    "index_topk",
    "vocab_size",
)


def build_report(experiment: Experiment, folder: Path, device: str) -> Values:
    """All numbers of an experiment as far as it has been run.

    Returns:
        ``variants``: for each its schedule and, where measured, ``cost``, ``model_time``, ``checkpoint`` and ``tasks``;
        ``own``: quality of the checkpoint's own schedule; ``fronts``: the Pareto fronts; ``units``: how many pieces of
        work there are, how many are done, and which are not.
    """
    units = make_units(experiment, device)
    records = {unit.path: record for unit in units if (record := read_record(folder, unit)) is not None}
    results = {path: record["result"] for path, record in records.items()}
    variants = [
        _variant(number, variant, experiment, units, results) for number, variant in enumerate(experiment.variants, 1)
    ]
    report = {
        "name": experiment.name,
        "title": experiment.title,
        "device": next((r["device"] for r in results.values() if "device" in r), device),
        "seeds": list(experiment.seeds),
        "base": {name: getattr(experiment.base, name) for name in BASE},
        "cost_model": None if experiment.cost is None else _cost_model(experiment.cost),
        "units": {
            "total": len(units),
            "done": len(records),
            "seconds": round(sum(record["seconds"] for record in records.values()), 1),
            "missing": [unit.name for unit in units if unit.path not in records],
        },
        "variants": variants,
        "own": results.get("checkpoint/own"),
    }
    report["fronts"] = mark_front(report)
    report["beyond_window"] = _beyond_window(report, experiment)
    return report


def _cost_model(cost: CostSettings) -> Values:
    sizes = {name: getattr(cost, name) for name in ("numerics", "batch", "prefill", "repeats")}
    return {"name": cost.name, **{name: getattr(cost.model, name) for name in BASE}, **sizes}


def _variant(
    number: int, variant: Variant, experiment: Experiment, units: list[Unit], results: dict[str, Values]
) -> Values:
    config = variant.config(experiment.base)
    values: Values = {
        "number": number,
        "name": variant.name,
        "schedule": variant.schedule,
        "ratios": [spec.ratio for spec in config.layers],
        "window": config.sliding_window,
        "long_range": any(spec.ratio for spec in config.layers),
    }
    if f"variants/{variant.slug}/cost" in results:
        values["cost"] = _cost(variant, experiment, results)
    for part in ("model_time", "checkpoint"):
        if f"variants/{variant.slug}/{part}" in results:
            values[part] = results[f"variants/{variant.slug}/{part}"]
    tasks = experiment.train.tasks if experiment.train else {}
    for task in tasks:
        runs = {}
        for unit in units:
            if (
                unit.kind == "train"
                and unit.path.startswith(f"variants/{variant.slug}/{task}-")
                and unit.path in results
            ):
                runs[unit.inputs["seed"]] = results[unit.path]
        if runs:
            values.setdefault("tasks", {})[task] = _runs(runs)
    return values


def _cost(variant: Variant, experiment: Experiment, results: dict[str, Values]) -> Values:
    """Counted costs, and times of a layer of each kind summed over the schedule."""
    cost = results[f"variants/{variant.slug}/cost"]
    config = variant.config(experiment.cost.model)
    record = variant.numerics(get_numerics(experiment.cost.numerics)).kv_record
    timed = [results.get(f"layers/{layer_key(spec, config, record).lower()}") for spec in config.layers]
    contexts = []
    for index, row in enumerate(cost["contexts"]):
        row = {key: value for key, value in row.items() if key != "by_layer"}
        row["bytes_per_token"] = row["sequence_bytes"] / row["context"]
        for mode in ("decode_ms", "prefill_ms"):
            times = [None if layer is None else layer["times"][index][mode] for layer in timed]
            row[mode] = None if None in times else sum(times)
        contexts.append(row)
    by_layer = cost["contexts"][-1]["by_layer"]
    layers = []
    for layer, at_longest, times in zip(cost["layers"], by_layer, timed, strict=True):
        longest = {"decode_ms": None, "prefill_ms": None} if times is None else times["times"][-1]
        kept = {mode: longest[mode] for mode in ("decode_ms", "prefill_ms")}
        layers.append({**layer, "read_bytes": at_longest["read_bytes"], "flops": at_longest["flops"], **kept})
    return {"per_token": cost["per_token"], "fixed": cost["fixed"], "contexts": contexts, "layers": layers}


def _runs(runs: dict[int, Values]) -> Values:
    """The runs of one task with different seeds, as means and spreads."""
    results = list(runs.values())
    values: Values = {
        "seeds": list(runs),
        "parameters": results[0]["parameters"],
        "steps": [r["steps"] for r in results],
    }
    for metric in ("loss", "accuracy"):
        values[metric] = spread([result["metrics"][metric] for result in results])
    values["curve"] = _curve([result["losses"] for result in results])
    values["by_length"] = _average_rows([result["by_length"] for result in results], ("seq_len",))
    values["by_position"] = _average_rows([result["by_position"] for result in results], ("start", "end"))
    values["layers"] = _average_rows([result["layers"] for result in results], ("layer", "kind"))
    return values


def spread(values: list[float]) -> Values:
    """``mean``, ``std`` (of a sample; 0 for one value), ``low``, ``high`` and the values themselves."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": statistics.fmean(values),
        "std": deviation,
        "low": min(values),
        "high": max(values),
        "values": values,
    }


def _curve(curves: list[list[list[float]]]) -> list[list[float]]:
    """``[step, mean, low, high]`` at the steps that all curves have."""
    steps = sorted(set.intersection(*({step for step, _ in curve} for curve in curves)))
    tables = [dict(map(tuple, curve)) for curve in curves]
    rows = []
    for step in steps:
        found = [table[step] for table in tables]
        rows.append([step, statistics.fmean(found), min(found), max(found)])
    return rows


def _average_rows(tables: list[list[Values]], keys: tuple[str, ...]) -> list[Values]:
    """Means of rows that agree in ``keys``; a value that is None in one of them stays None."""
    rows = []
    for group in zip(*tables, strict=False):
        row: Values = {key: group[0][key] for key in keys}
        for name in group[0]:
            if name not in keys:
                values = [item[name] for item in group]
                row[name] = None if None in values else statistics.fmean(values)
        rows.append(row)
    return rows


def _beyond_window(report: Values, experiment: Experiment) -> list[Values]:
    """For each task with a gap: the best window-only variant and the best one with long-range entries.

    ``gap`` is how far back answers lie at least, in tokens; ``reach`` how far the window-only one can hear of them
    through all of its layers, each of which passes on what its window holds.
    """
    rows = []
    for task, settings in (experiment.train.tasks if experiment.train else {}).items():
        gap = settings.options.get("gap")
        kinds: dict[bool, list[Values]] = {False: [], True: []}
        for variant in report["variants"]:
            if task in variant.get("tasks", {}):
                kinds[variant["long_range"]].append(variant)
        if gap is None or not all(kinds.values()):
            continue
        near, far = (
            max(kinds[kind], key=lambda variant: variant["tasks"][task]["accuracy"]["mean"]) for kind in (False, True)
        )
        rows.append(
            {
                "task": task,
                "gap": gap,
                "window": near["window"],
                "reach": near["window"] * len(near["ratios"]),
                "window_only": near["name"],
                "window_only_accuracy": near["tasks"][task]["accuracy"],
                "best": far["name"],
                "best_accuracy": far["tasks"][task]["accuracy"],
            }
        )
    return rows
