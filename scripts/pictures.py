#!/usr/bin/env python3
"""Pictures for the documents, as SVG files of their own.

    python scripts/pictures.py study results/study/report.json docs/data/study
    python scripts/pictures.py decode docs/data

``study`` draws the plots of an experiment's report: every quality against bytes and decode time, by context length and
over the training. ``decode`` draws decode times beside vLLM's and FlashMLA's, from h200_beside_vllm33.json and
h200_attention_decode.json of the given folder, and writes decode.svg there.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepseek_attn.lab.bench.plots import FOREGROUND, MUTED, SERIES, svg_element
from deepseek_attn.lab.experiments.report.figures import Figure, by_length, curves, forest, scatter, sizes
from deepseek_attn.lab.experiments.report.pareto import metric_of
from deepseek_attn.lab.experiments.report.schema import Report, tasks, with_task
from deepseek_attn.utils.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCHES = (1, 8, 32, 128)
KINDS = {"swa": "SWA, Flash", "c4a": "C4A, Flash", "c128a": "C128A at 128K, Flash"}


class Beside(NamedTuple):
    """Two times of the same work, in microseconds."""

    label: str
    ours: float
    theirs: float


def pictures(report: Report) -> list[Figure]:
    """The plots, named as their files."""
    found = []
    for front in report["fronts"]:
        if front["cost"] != "prefill_ms":
            name = f"{front['quality']}-{front['cost']}"
            found.append(Figure(name, name, scatter(report, front)))
    for task in tasks(report):
        variants = with_task(report, task)
        found.append(renamed(by_length(report, task), f"{task}-by-length"))
        found.append(Figure(f"{task}-training", f"{task}-training", curves(variants, task)))
    for first in tasks(report)[:1]:
        quality = f"{first} {metric_of(with_task(report, first)[0].quality)}"
        found += [renamed(figure, f"{first}-by-size") for figure in sizes(report, first)]
        found += [renamed(figure, f"{first}-differences") for figure in forest(report, quality)]
    return found


def renamed(figure: Figure, name: str) -> Figure:
    """The figure as a file of its own."""
    return replace(figure, name=name, caption=name)


def standalone(svg: str) -> str:
    """An ``<svg>`` element as a file: with the page's colours, light or dark as the reader's screen is."""
    style = resources.files("deepseek_attn.utils").joinpath("style.css").read_text(encoding="utf-8")
    colours = style[: style.index("* {")]
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{colours}</style>", svg, count=1) + "\n"


def layers_beside_vllm(points: list[dict]) -> list[Beside]:
    """V4-Flash's attention layers, a decode step at 128K tokens."""
    chosen = {(p["kind"], p["batch"]): p for p in points
              if (p["model"], p["phase"], p["context"]) == ("flash", "decode", 131072)}  # fmt: skip
    return [Beside(f"{kind.upper()}, batch {batch}", chosen[kind, batch]["ours_us"], chosen[kind, batch]["vllm_us"])
            for kind in KINDS for batch in BATCHES]  # fmt: skip


def kernels_beside_flashmla(results: list[dict]) -> list[Beside]:
    """The attention of these layers alone."""
    chosen = {(row["row"], row["batch"]): row for row in results}
    found = []
    for kind, name in KINDS.items():
        for batch in BATCHES:
            row = chosen[name, batch]
            found.append(Beside(f"{kind.upper()}, batch {batch}", row["triton"]["us"], row["flashmla"]["us"]))
    return found


def decode_picture(folder: Path) -> str:
    """Our time divided by the competitor's: a bar per case, shorter than the line at 1 where we are faster."""
    groups = {
        "attention layer, beside vLLM 0.33": layers_beside_vllm(read(folder / "h200_beside_vllm33.json")["layers"]),
        "attention alone, beside FlashMLA": kernels_beside_flashmla(
            read(folder / "h200_attention_decode.json")["results"]
        ),
    }

    def paint(axes: Axes) -> None:
        place, ticks = 0, []
        for colour, (name, cases) in zip(SERIES, groups.items(), strict=False):
            for index, case in enumerate(cases):
                ratio = case.ours / case.theirs
                axes.barh(place, ratio, color=colour, label=name if index == 0 else None)
                axes.text(
                    max(ratio, 1) + 0.02,
                    place,
                    f"{case.ours:.0f} us, theirs {case.theirs:.0f}",
                    va="center",
                    fontsize=7,
                )
                ticks.append((place, case.label))
                place += 1
            place += 1
        axes.axvline(1, color=FOREGROUND, linewidth=1)
        axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=7)
        axes.set_xlim(0, 1.35)
        axes.set_ylim(place - 1, -1)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("our time / their time", color=MUTED)
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, frameon=False, fontsize=8)

    return svg_element(
        paint, "V4-Flash decode on one H200 at 128K tokens, beside vLLM 0.33 and FlashMLA", "decode", (7.6, 6)
    )


def read(path: Path) -> dict:
    """Raises ValueError with the file's name, also if the file is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def write(path: Path, svg: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, standalone(svg))
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    study = commands.add_parser("study", help="the plots of an experiment's report")
    study.add_argument("report", type=Path, help="report.json of an experiment")
    study.add_argument("out", type=Path, help="folder for the pictures")
    decode = commands.add_parser("decode", help="decode times beside vLLM's and FlashMLA's")
    decode.add_argument("folder", type=Path, help="folder of the measurements, and for the picture")
    args = parser.parse_args()
    try:
        if args.command == "decode":
            write(args.folder / "decode.svg", decode_picture(args.folder))
        else:
            report: Any = read(args.report)  # as `Report` describes it
            for figure in pictures(report):
                name = re.sub(r"[^A-Za-z0-9]+", "-", figure.name)  # it comes from the report
                write(args.out / f"{name}.svg", figure.svg())
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
