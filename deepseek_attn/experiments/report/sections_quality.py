"""Sections of a report's page about quality; each is HTML, or empty where nothing was measured."""

from __future__ import annotations

from html import escape
from typing import Any

from deepseek_attn.experiments.report import plots
from deepseek_attn.experiments.report.parts import figures, name_cell, number, table
from deepseek_attn.experiments.report.table import summary as summary_rows

Report = dict[str, Any]


def head(report: Report) -> str:
    """Title, and how much of the experiment is done."""
    units, seeds = report["units"], ", ".join(map(str, report["seeds"]))
    missing = f" Missing: {escape('; '.join(units['missing'][:5]))}." if units["missing"] else ""
    base, cost = report["base"], report["cost_model"]
    about = f"Quality is that of a model with {_shape(base)}."
    if cost is not None:
        about += (
            f" Costs are counted and timed for the attention layers of {escape(cost['name'])} ({_shape(cost)}; "
            f"numerics {cost['numerics']}). A decode step is one token each of {cost['batch']} sequences, a prefill "
            f"{cost['prefill']} new tokens of one."
        )
    done = f"{units['done']} of {units['total']} pieces of work done.{missing}"
    device = escape(report["device"])
    return (
        f"<h1>{escape(report['title'])}</h1>\n<p>{len(report['variants'])} schedules, seeds {seeds}, on {device}; "
        f"{done}</p>\n<p>{about}</p>"
    )


def _shape(model: Report) -> str:
    return (
        f"{model['num_hidden_layers']} layers, {model['num_attention_heads']} heads of {model['head_dim']} channels, a "
        f"window of {model['sliding_window']} tokens and top {model['index_topk']}"
    )


def summary(report: Report) -> str:
    """The main table: every schedule with its costs and qualities."""
    headers, rows = summary_rows(report)
    best = {name for front in report["fronts"] for name in front["variants"] if front["cost"] == "bytes_per_token"}
    cells = []
    for variant, (_, name, *values) in zip(report["variants"], rows, strict=True):
        mark = '<td class="mark">●</td>' if name in best else "<td></td>"
        cells.append(name_cell(variant) + mark + "".join(number(value, std) for value, std in values))
    note = (
        "<p>Numbers name the schedules in all plots. A dot marks those on the Pareto front of a quality against bytes: "
        "no other schedule is both cheaper and better. ± is the standard deviation over seeds.</p>"
    )
    return f"<h2>Schedules</h2>\n{note}\n{table([*headers[:2], 'front', *headers[2:]], cells)}{_beyond_window(report)}"


def _beyond_window(report: Report) -> str:
    """The comparison that long-range entries are for: synthetic tasks with and without them."""
    rows = []
    for values in report["beyond_window"]:
        cells = [
            f"<td>{escape(values['task'])}</td>{number(values['gap'])}{number(values['window'])}{number(values['reach'])}",
            f'<td class="name">{escape(values["window_only"])}</td>',
            number(values["window_only_accuracy"]["mean"], values["window_only_accuracy"]["std"]),
            f'<td class="name">{escape(values["best"])}</td>',
            number(values["best_accuracy"]["mean"], values["best_accuracy"]["std"]),
        ]
        rows.append("".join(cells))
    if not rows:
        return ""
    headers = ["task", "gap", "window", "window x layers", "best window-only", "accuracy"]
    headers += ["best with long-range entries", "accuracy"]
    note = (
        "<p>Answers lie at least a gap of tokens back. Layers pass on what their window holds, so that without "
        "long-range entries nothing from farther back than window x layers can arrive.</p>"
    )
    return f"\n<h2>Beyond the window</h2>\n{note}\n{table(headers, rows)}"


def scatters(report: Report) -> str:
    """Quality against each cost, with the Pareto fronts."""
    titles = {"bytes_per_token": "KV bytes per token", "decode_ms": "decode time", "prefill_ms": "prefill time"}
    items = [
        (f"front{i}", f"{front['quality']} against {titles[front['cost']]}", plots.scatter(report, front))
        for i, front in enumerate(report["fronts"])
    ]
    note = "<p>Filled points are on the Pareto front (the line). Bars span the seeds.</p>"
    return f"<h2>Quality against cost</h2>\n{note}\n{figures(items)}" if items else ""


def tasks(report: Report) -> list[str]:
    return list(dict.fromkeys(task for variant in report["variants"] for task in variant.get("tasks", {})))


def with_task(report: Report, task: str) -> list[Report]:
    return [variant for variant in report["variants"] if task in variant.get("tasks", {})]


def distance(report: Report) -> str:
    """Quality against context length: at other lengths, and by position in the sequence."""
    items = []
    for task in tasks(report):
        metric = "loss" if task == "text" else "accuracy"
        rows = [
            (variant, [(row["seq_len"], row[metric]) for row in variant["tasks"][task]["by_length"]])
            for variant in with_task(report, task)
        ]
        if len(rows[0][1]) > 1:
            caption = f"{task}: {metric} by context length"
            items.append((f"length-{task}", caption, plots.lines(rows, "tokens", f"{task} {metric}", log="x")))
        by_position = [
            (variant, [(row["end"], row["loss"]) for row in variant["tasks"][task]["by_position"]])
            for variant in with_task(report, task)
        ]
        if len(by_position[0][1]) > 1:
            caption = f"{task}: loss by position in the sequence"
            items.append((f"position-{task}", caption, plots.lines(by_position, "position", f"{task} loss", log="x")))
    return f"<h2>Quality against context length</h2>\n{figures(items)}" if items else ""


def training(report: Report) -> str:
    """Loss curves of every task."""
    items = [
        (
            f"curve-{task}",
            f"{task}: training loss, mean and range over seeds",
            plots.curves(with_task(report, task), task),
        )
        for task in tasks(report)
    ]
    return f"<h2>Training</h2>\n{figures(items)}" if items else ""


def checkpoint(report: Report) -> str:
    """Quality of the loaded checkpoint under each schedule."""
    own = report["own"]
    if own is None:
        return ""
    own_cells = "".join(number(own[name]) for name in ("loss", "kl", "top1"))
    rows = [f'<td></td><td class="name">own schedule</td>{own_cells}<td></td>']
    for variant in (variant for variant in report["variants"] if "checkpoint" in variant):
        found = variant["checkpoint"]
        cells = "".join(number(found.get(name)) for name in ("loss", "kl", "top1"))
        rows.append(f'{name_cell(variant)}{cells}<td class="name">{escape(found.get("reason", ""))}</td>')
    note = "<p>Weights as loaded, schedule changed without training: derived where the checkpoint has none.</p>"
    headers = ["#", "variant", "loss", "KL from own", "top-1 agreement", "why not"]
    return f"<h2>A loaded checkpoint under other schedules</h2>\n{note}\n{table(headers, rows)}"
