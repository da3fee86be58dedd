"""Records -> the numbers of a report: the one JSON document that tables, plots and the page are made from."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.lab.experiments.define.config import Experiment
from deepseek_attn.lab.experiments.define.results import CostResult, LengthRow, TimesResult, TrainedResult
from deepseek_attn.lab.experiments.define.settings import CostSettings
from deepseek_attn.lab.experiments.define.units import (
    CheckpointJob,
    CostJob,
    ModelTimeJob,
    TrainJob,
    Unit,
    layer_key,
    make_units,
)
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.report.comparisons import make_comparisons, make_limits
from deepseek_attn.lab.experiments.report.pareto import mark_front
from deepseek_attn.lab.experiments.report.schema import (
    CostModel,
    CostSection,
    LengthSpread,
    Report,
    Shape,
    Spread,
    TaskQuality,
    VariantReport,
)
from deepseek_attn.lab.experiments.run.records import MADE_BY, read_record


def build_report(experiment: Experiment, folder: Path, device: str) -> Report:
    """All numbers of an experiment as far as it has been run."""
    units = make_units(experiment, device)
    records = {unit.path: record for unit in units if (record := read_record(folder, unit)) is not None}
    results: dict[str, Any] = {path: record["result"] for path, record in records.items()}
    report: Report = {
        "made_by": MADE_BY,
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "command": f"deepseek-attn experiment run {experiment.origin}",
        "device": next((r["device"] for r in results.values() if "device" in r), device),
        "seeds": list(experiment.seeds),
        "base": _shape(experiment.base),
        "cost_model": None if experiment.cost is None else _cost_model(experiment.cost),
        "units": {
            "total": len(units),
            "done": len(records),
            "seconds": round(sum(record["seconds"] for record in records.values()), 1),
            "missing": [unit.name for unit in units if unit.path not in records],
        },
        "variants": [
            _variant(number, variant, experiment, units, results)
            for number, variant in enumerate(experiment.variants, 1)
        ],
        "own": results.get("checkpoint/own"),
        "fronts": [],
        "comparisons": [],
        "limits": [],
    }
    report["fronts"] = mark_front(report)
    report["comparisons"] = make_comparisons(report)
    report["limits"] = make_limits(report)
    return report


def _shape(config: AnyConfig) -> Shape:
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "sliding_window": _window(config),
        "index_topk": config.index_topk or 0,
        "vocab_size": config.vocab_size,
    }


def _window(config: AnyConfig) -> int:
    """Tokens of the window; 0 for V3.2, which has no window."""
    return config.sliding_window if isinstance(config, DeepseekV4Base) else 0


def _cost_model(cost: CostSettings) -> CostModel:
    return {
        "name": cost.name,
        **_shape(cost.model),
        "numerics": cost.numerics.name,
        "contexts": list(cost.contexts),
        "time_up_to": cost.time_up_to,
        "batch": cost.batch,
        "prefill": cost.prefill,
        "repeats": cost.repeats,
    }


def _variant(
    number: int, variant: ModelVariant, experiment: Experiment, units: list[Unit], results: dict[str, Any]
) -> VariantReport:
    """Shape, costs and qualities of one variant, as far as units have results."""
    config = variant.config(experiment.base)
    values: VariantReport = {
        "number": number,
        "name": variant.name,
        "schedule": variant.schedule,
        "attention": variant.attention,
        "selection": variant.selection,
        "twin": _name_of(replace(variant, selection="learned"), variant, experiment),
        "parent": _name_of(replace(variant, layers=None), variant, experiment),
        "ratios": [spec.ratio for spec in config.layers],
        "window": _window(config),
        "long_range": any(spec.ratio for spec in config.layers),
    }
    counted = experiment.cost and experiment.cost.model.num_hidden_layers
    if variant.v41 is not None and counted and counted != config.num_hidden_layers:
        values["other_depth"] = True
    runs: dict[str, dict[int, TrainedResult]] = {}
    for unit in units:
        if unit.path not in results:
            continue
        result = results[unit.path]
        match unit.job:
            case CostJob(of, settings) if of is variant:
                values["cost"] = _cost(result, variant, settings, results)
            case ModelTimeJob(of) if of is variant:
                values["model_time"] = result
            case CheckpointJob(of) if of is variant:
                values["checkpoint"] = result
            case TrainJob(of) as job if of is variant:
                runs.setdefault(job.task, {})[job.seed] = result
    if runs and experiment.train is not None:
        values["tasks"] = {task: _runs(runs[task], experiment, task) for task in experiment.train.tasks if task in runs}
    return values


def _name_of(wanted: ModelVariant, variant: ModelVariant, experiment: Experiment) -> str | None:
    """The name of another variant that has the values of ``wanted``, whatever it is called; None without one."""
    found = (other for other in experiment.variants if replace(wanted, name=other.name) == other)
    return next((other.name for other in found if other.name != variant.name), None)


def _cost(counted: CostResult, variant: ModelVariant, settings: CostSettings, results: dict[str, Any]) -> CostSection:
    """Counted costs, and times of a layer of each kind summed over the schedule."""
    config, preset = variant.config(settings.model), settings.numerics
    timed: list[TimesResult | None] = [
        results.get(f"layers/{layer_key(spec, config, variant, preset).lower()}") for spec in config.layers
    ]
    contexts = []
    for index, at in enumerate(counted["contexts"]):
        row: dict[str, Any] = {key: value for key, value in at.items() if key != "by_layer"}
        row["bytes_per_token"] = at["sequence_bytes"] / at["context"]
        for mode in ("decode_ms", "prefill_ms"):
            times = [None if layer is None else layer["times"][index][mode] for layer in timed]
            row[mode] = None if None in times else sum(filter(None, times))
        contexts.append(row)
    layers = []
    for layer, longest, times in zip(counted["layers"], counted["contexts"][-1]["by_layer"], timed, strict=True):
        row = {**layer, "read_bytes": longest["read_bytes"], "flops": longest["flops"]}
        for mode in ("decode_ms", "prefill_ms"):
            row[mode] = None if times is None else times["times"][-1][mode]
        layers.append(row)
    return {"per_token": counted["per_token"], "fixed": counted["fixed"], "contexts": contexts, "layers": layers}


def _runs(runs: dict[int, TrainedResult], experiment: Experiment, task: str) -> TaskQuality:
    """The runs of one task by seed, as means and spreads."""
    results = list(runs.values())
    train = experiment.train
    if train is None:
        raise ValueError(f"experiment {experiment.name} trains nothing, and has runs of task {task}")
    setup, lm_eval = train.tasks[task], [result["lm_eval"] for result in results if "lm_eval" in result]
    quality: TaskQuality = {
        "kind": setup.task,
        "size": setup.size,
        "answers": results[0]["answers"],
        "chance": results[0]["by_length"][0]["chance"],
        "seeds": list(runs),
        "parameters": results[0]["parameters"],
        "steps": [result["steps"] for result in results],
        "tokens": setup.steps * setup.batch * setup.seq_len,
        "loss": spread([result["metrics"]["loss"] for result in results]),
        "accuracy": spread([result["metrics"]["accuracy"] for result in results]),
        "curve": _curve([result["losses"] for result in results]),
        "by_length": [_length_row(rows) for rows in zip(*(result["by_length"] for result in results), strict=True)],
        "by_distance": _average_rows([result["by_distance"] for result in results], ("seq_len", "start", "end")),
        "by_depth": _average_rows([result["by_depth"] for result in results], ("seq_len", "depth")),
        "by_position": _average_rows([result["by_position"] for result in results], ("start", "end")),
        "layers": _average_rows([result["layers"] for result in results], ("layer", "kind")),
    }
    if len(lm_eval) == len(results):
        quality["lm_eval"] = {name: spread([found[name] for found in lm_eval]) for name in lm_eval[0]}
    return quality


def _length_row(rows: tuple[LengthRow, ...]) -> LengthSpread:
    losses, accuracies = [row["loss"] for row in rows], [row["accuracy"] for row in rows]
    trailing = [row["trailing"] for row in rows if row["trailing"] is not None]
    return {
        "seq_len": rows[0]["seq_len"], "chance": rows[0]["chance"],
        "trailing": statistics.fmean(trailing) if len(trailing) == len(rows) else None,
        "loss": statistics.fmean(losses), "loss_low": min(losses), "loss_high": max(losses),
        "accuracy": statistics.fmean(accuracies), "accuracy_low": min(accuracies), "accuracy_high": max(accuracies),
    }  # fmt: skip


def spread(values: list[float]) -> Spread:
    """``mean``, ``std`` (of a sample; 0 for one value), ``low``, ``high`` and the values themselves."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": statistics.fmean(values),
        "std": deviation,
        "low": min(values),
        "high": max(values),
        "values": values,
    }


def _curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """``[step, mean, low, high]`` at the steps that all curves have."""
    steps = sorted(set.intersection(*({step for step, _ in curve} for curve in curves)))
    tables = [{point[0]: point[1] for point in curve} for curve in curves]
    rows = []
    for step in steps:
        found = [table[step] for table in tables]
        rows.append([step, statistics.fmean(found), min(found), max(found)])
    return rows


def _average_rows(tables: list[list[Any]], keys: tuple[str, ...]) -> list[Any]:
    """Means of the rows that every table has, by ``keys``; None if a row has None."""
    indexed = [{tuple(row[key] for key in keys): row for row in table} for table in tables]
    rows = []
    for found in indexed[0]:
        if all(found in table for table in indexed):
            group = [table[found] for table in indexed]
            row = dict(zip(keys, found, strict=True))
            for name in group[0].keys() - set(keys):
                values = [item[name] for item in group]
                row[name] = None if None in values else statistics.fmean(values)
            rows.append({name: row[name] for name in group[0]})
    return rows
