"""``deepseek-attn experiment``: runs, resumes and reports compress-ratio experiments."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "experiment",
        help="compare compress-ratio schedules",
        description="Measure the cost and quality of compress-ratio schedules, and write a report.",
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    helps = {
        "run": "run all measurements, into an empty folder",
        "resume": "run the measurements that are missing or failed",
        "report": "write the report again from the results in the folder",
    }
    for name, text in helps.items():
        command = what.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("config", metavar="CONFIG", help="an experiment's JSON file, or a shipped one by name")
        command.add_argument("--out", metavar="DIR", help="folder of the results (default: results/NAME)")
        command.add_argument("--device", help="cpu, cuda, cuda:1 (default: the experiment's, or a GPU if there is one)")
        command.set_defaults(run=run, log_level=logging.INFO)


def run(args: argparse.Namespace) -> int:
    from deepseek_attn.bench.plots import HINT, have_matplotlib
    from deepseek_attn.config.options import pick_device
    from deepseek_attn.experiments.define.config import load_experiment
    from deepseek_attn.experiments.report.page import write_page
    from deepseek_attn.experiments.report.report import build_report
    from deepseek_attn.experiments.report.table import show_table
    from deepseek_attn.experiments.run.records import write_json
    from deepseek_attn.experiments.run.run import run_experiment

    experiment = load_experiment(args.config)
    folder = Path(args.out) if args.out else Path("results") / experiment.name
    device = args.device or experiment.device
    if args.what != "report" or device is None:  # a report is written anywhere, also of runs on another machine
        device = str(pick_device(device))
    failed = []
    if args.what != "report":
        outcome = run_experiment(experiment, folder, device, resume=args.what == "resume")
        failed = outcome.failed
    elif not (folder / "records").is_dir():
        raise ValueError(f"no results in {str(folder)!r}: run the experiment first, or name its folder with --out")
    report = build_report(experiment, folder, device)
    for variant, values in zip(experiment.variants, report["variants"], strict=True):
        write_json(folder / "variants" / f"{variant.slug}.json", values)
    write_json(folder / "report.json", report)
    print(show_table(report))
    if have_matplotlib():
        write_page(report, folder / "report.html")
        print(f"report: {folder / 'report.html'}")
    else:
        print(f"numbers: {folder / 'report.json'}; for the page with plots, {HINT}, then `experiment report`")
    for failure in failed:
        print(f"failed: {failure.unit.name}: {failure.reason}")
    return 1 if failed else 0
