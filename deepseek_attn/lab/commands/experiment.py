"""``deepseek-attn experiment``: runs, resumes and reports compress-ratio experiments."""

from __future__ import annotations

import argparse
import logging
import shlex
from pathlib import Path

from deepseek_attn.cli.terminal import say, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure the cost and quality of compress-ratio schedules, and write a report."
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
        command.add_argument(
            "--device",
            help="cpu, cuda, cuda:1 (default: that of the experiment, of the results, or a GPU if any)",
        )
        if name != "report":
            command.add_argument(
                "--minutes",
                type=float,
                metavar="N",
                help="start nothing after this time; running trainings save their state, and `resume` continues them",
            )
        if name == "report":
            command.add_argument("--against", metavar="DIR", help="compare with another folder of results")
        command.set_defaults(against=None, minutes=None, run=run, log_level=logging.INFO)


def run(args: argparse.Namespace) -> int:
    from deepseek_attn.config.options import parse_device
    from deepseek_attn.lab.bench.plots import HINT
    from deepseek_attn.lab.experiments.define.config import load_experiment
    from deepseek_attn.lab.experiments.report.compare import show_comparison
    from deepseek_attn.lab.experiments.report.table import show_table
    from deepseek_attn.lab.experiments.report.write import NUMBERS, PAGE, check_documents, write_report
    from deepseek_attn.lab.experiments.run.records import recorded_device
    from deepseek_attn.lab.experiments.run.run import run_experiment

    experiment = load_experiment(args.config)
    folder = Path(args.out) if args.out else Path("results") / experiment.name
    # results may come from a machine with another device: do not check this machine's device until there is work for it
    device = str(parse_device(args.device or experiment.device or recorded_device(folder)))
    failed, paused = [], 0
    check_documents(experiment, folder)
    if args.what != "report":
        try:
            outcome = run_experiment(experiment, folder, device, resume=args.what == "resume", minutes=args.minutes)
        except KeyboardInterrupt:
            say(f"\nstopped; what is done is kept: `{resume_command(args)}` goes on")
            raise
        failed, paused = outcome.failed, len(outcome.paused)
    elif not folder.is_dir():
        raise ValueError(f"no results in {str(folder)!r}: run the experiment first, or name its folder with --out")
    report = write_report(experiment, folder, device, None if args.against is None else Path(args.against))
    show(show_table(report))
    if "against" in report:
        show(f"\n{show_comparison(report['against'])}\n")
    if (folder / PAGE).is_file():
        show(f"report: {folder / PAGE}")
    else:
        show(f"numbers: {folder / NUMBERS}; for the page with plots, {HINT}, then `experiment report`")
    if paused:
        show(f"the time was over: {paused} pieces of work are left; `{resume_command(args)}` goes on")
    for failure in failed:
        show(f"failed: {failure.unit.name}: {failure.reason}")
    return 1 if failed else 0


def resume_command(args: argparse.Namespace) -> str:
    """The command that continues the experiment in the same folder."""
    flags = {"--out": args.out, "--device": args.device}
    given = [word for flag, value in flags.items() if value for word in (flag, value)]
    return shlex.join(["deepseek-attn", "experiment", "resume", args.config, *given])
