"""The report as one HTML file: no scripts, no files beside it, readable on a phone and on a dark screen.

Every number in it is a value of the report's JSON, which is embedded at the end.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from deepseek_attn.experiments.report import sections_cost as cost
from deepseek_attn.experiments.report import sections_quality as quality
from deepseek_attn.utils.files import write_text

Report = dict[str, Any]


def write_page(report: Report, path: Path) -> None:
    """Writes the page; it appears complete or not at all."""
    write_text(path, make_page(report))


def make_page(report: Report) -> str:
    """The whole page.

    Raises:
        ValueError: matplotlib is not installed.
    """
    style = resources.files("deepseek_attn.experiments.report").joinpath("page.css").read_text(encoding="utf-8")
    parts = [quality.head, quality.summary, quality.scatters, quality.distance, quality.training]
    parts += [cost.costs, cost.model_times, cost.layers, quality.checkpoint]
    sections = [part(report) for part in parts]
    data = json.dumps(report).replace("</", "<\\/")
    title = escape(report["title"])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + f'\n</main>\n<script type="application/json" id="report">{data}</script>\n</body>\n</html>\n'
    )
