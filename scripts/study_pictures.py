#!/usr/bin/env python3
"""Pictures of an experiment's report as SVG files of their own, for documents.

    python scripts/study_pictures.py results/study/report.json docs/data/study

They are the report's plots: every quality against bytes and decode time, by context length and over the training.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib import resources
from pathlib import Path

from deepseek_attn.experiments.report.figures import Figure, Line, curves, lines, scatter
from deepseek_attn.experiments.report.schema import Report, tasks, with_task


def pictures(report: Report) -> list[Figure]:
    """The plots, named as their files."""
    found = []
    for front in report["fronts"]:
        if front["cost"] != "prefill_ms":
            name = f"{front['quality']}-{front['cost']}".replace(" ", "-").replace("_", "-")
            found.append(Figure(name, name, scatter(report, front)))
    for task in tasks(report):
        variants = with_task(report, task)
        metric = "loss" if task == "text" else "accuracy"
        rows = [Line(v, [(row["seq_len"], row[metric]) for row in v["tasks"][task]["by_length"]]) for v in variants]
        name = f"{task}-by-length"
        found.append(Figure(name, name, lines(rows, "tokens", f"{task} {metric}", log="x")))
        found.append(Figure(f"{task}-training", f"{task}-training", curves(variants, task)))
    return found


def standalone(svg: str) -> str:
    """An ``<svg>`` element as a file: with the page's colours, light or dark as the reader's screen is."""
    style = resources.files("deepseek_attn.experiments.report").joinpath("page.css").read_text(encoding="utf-8")
    colours = style[: style.index("* {")]
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{colours}</style>", svg, count=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path, help="report.json of an experiment")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    try:
        report = json.loads(args.report.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"{args.report}: {error}")
    args.out.mkdir(parents=True, exist_ok=True)
    for figure in pictures(report):
        (args.out / f"{figure.name}.svg").write_text(standalone(figure.svg()), encoding="utf-8")
        print(args.out / f"{figure.name}.svg")


if __name__ == "__main__":
    main()
