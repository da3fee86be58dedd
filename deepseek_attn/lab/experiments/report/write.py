"""Everything in a folder of results that is made from its records, made anew as a whole."""

from __future__ import annotations

from pathlib import Path

from deepseek_attn.lab.bench.plots import have_matplotlib
from deepseek_attn.lab.experiments.define.config import Experiment
from deepseek_attn.lab.experiments.define.units import make_units
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.report.compare import compare, read_report
from deepseek_attn.lab.experiments.report.page import write_page
from deepseek_attn.lab.experiments.report.report import build_report
from deepseek_attn.lab.experiments.report.schema import Report
from deepseek_attn.lab.experiments.report.table import make_csv
from deepseek_attn.lab.experiments.run.records import MADE_BY, check_folder, write_json
from deepseek_attn.utils.files import check_replaceable, has_mark, write_text

NUMBERS, PAGE, TABLE = "report.json", "report.html", "report.csv"


def made_files(folder: Path) -> list[Path]:
    return [folder / name for name in (PAGE, NUMBERS, TABLE)]


def document_path(folder: Path, variant: ModelVariant) -> Path:
    return folder / "variants" / f"{variant.slug}.json"


def check_documents(experiment: Experiment, folder: Path) -> None:
    """ValueError if a document would replace a file that this library did not write."""
    for path in (*made_files(folder), *(document_path(folder, variant) for variant in experiment.variants)):
        check_replaceable(path, MADE_BY)


def write_report(experiment: Experiment, folder: Path, device: str, against: Path | None = None) -> Report:
    """Writes ``report.json``, ``report.csv``, a document per variant and, where matplotlib is, ``report.html``.

    Older documents are removed: a page with other numbers, and documents of variants that no longer exist. Files of
    other writers stay.

    Args:
        against: another folder of results, which is compared with this one.

    Raises:
        ValueError: the folder belongs to another experiment, or a document would replace a file of another writer.
    """
    check_documents(experiment, folder)
    check_folder(folder, experiment, make_units(experiment, device))
    other = None if against is None else read_report(against / NUMBERS)
    report = build_report(experiment, folder, device)
    if against is not None and other is not None:
        report["against"] = compare(report, other, against.name or str(against))
    for old in (*made_files(folder), *(folder / "variants").glob("*.json")):
        if has_mark(old, MADE_BY):
            old.unlink()
    for variant, values in zip(experiment.variants, report["variants"], strict=True):
        write_json(document_path(folder, variant), {"made_by": MADE_BY, **values})
    write_json(folder / NUMBERS, report)
    write_text(folder / TABLE, make_csv(report, MADE_BY))
    if have_matplotlib():
        write_page(report, folder / PAGE)
    return report
