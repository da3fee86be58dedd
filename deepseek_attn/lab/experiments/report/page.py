"""The report as one HTML file: no files beside it, readable on a phone, on a dark screen and without scripts.

Every number in it is a value of the report's JSON, which is embedded at the end.
"""

from __future__ import annotations

from pathlib import Path

from deepseek_attn.lab.bench.plots import SERIES
from deepseek_attn.lab.experiments.report import figures
from deepseek_attn.lab.experiments.report.comparisons import FAMILIES, FAMILY_COSTS, priced
from deepseek_attn.lab.experiments.report.schema import Report, recall_rows, tasks, with_task
from deepseek_attn.lab.experiments.report.table import COST_NAMES, show_length, show_number, summary, timing_note
from deepseek_attn.utils.files import write_text
from deepseek_attn.utils.pages import page_templates, script_data


def write_page(report: Report, path: Path) -> None:
    """Writes the page; it appears complete or not at all."""
    write_text(path, make_page(report))


def make_page(report: Report) -> str:
    """The whole page, by ``page.html.jinja``.

    Raises:
        ValueError: matplotlib is not installed.
    """
    environment = page_templates("deepseek_attn.lab.experiments.report")
    environment.filters |= {"for_people": show_number, "tokens": show_length}
    plots = {
        section.__name__: [(figure.caption, figure.svg()) for figure in section(report)]
        for section in (
            figures.main,
            figures.fronts,
            figures.distances,
            figures.training,
            figures.costs,
            figures.layers,
        )
    }
    return environment.get_template("page.html.jinja").render(
        report=report,
        summary=summary(report, notes=False),
        timing_note=timing_note(report),
        recall=list(recall_rows(report)),
        families=FAMILIES,
        priced={family: priced(report, family) for family in (*FAMILY_COSTS, "layers")},
        cost_names=FAMILY_COSTS | COST_NAMES,
        tasks={task: with_task(report, task) for task in tasks(report)},
        plots=plots,
        num_colors=len(SERIES),
        cost_captions=figures.COST_CAPTIONS,
        recall_captions=figures.RECALL_CAPTIONS,
        data=script_data(report),
    )
