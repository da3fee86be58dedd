"""Everything in a folder of results that is made from its records, made anew as a whole."""

from __future__ import annotations

from pathlib import Path

from deepseek_attn.bench.plots import have_matplotlib
from deepseek_attn.experiments.define.config import Experiment
from deepseek_attn.experiments.report.page import write_page
from deepseek_attn.experiments.report.report import build_report
from deepseek_attn.experiments.report.schema import Report
from deepseek_attn.experiments.run.records import write_json

NUMBERS, PAGE = "report.json", "report.html"


def write_report(experiment: Experiment, folder: Path, device: str) -> Report:
    """Writes ``report.json``, one document per variant and, where matplotlib is installed, ``report.html``.

    Nothing older is left beside them: no page of other numbers, and no documents of variants that are gone.
    """
    report = build_report(experiment, folder, device)
    for old in (folder / PAGE, folder / NUMBERS, *(folder / "variants").glob("*.json")):
        old.unlink(missing_ok=True)
    for variant, values in zip(experiment.variants, report["variants"], strict=True):
        write_json(folder / "variants" / f"{variant.slug}.json", values)
    write_json(folder / NUMBERS, report)
    if have_matplotlib():
        write_page(report, folder / PAGE)
    return report
