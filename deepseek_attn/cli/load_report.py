"""``--report``: the loaded tensors of a checkpoint, and the skipped tensors with the rule that skipped them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from deepseek_attn.cli.terminal import say

if TYPE_CHECKING:
    from deepseek_attn.runner.model_runner import ModelRunner


def add_report_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--report",
        action="store_true",
        help="report on standard error the loaded tensors, the name of each tensor that was left out, and the defaults "
        "of generation_config.json",
    )


def show_report(runner: ModelRunner, args: argparse.Namespace) -> None:
    """Prints the whole report with ``--report``; otherwise one line, if tensors were skipped that no flag skips."""
    report = runner.report
    if args.report:
        say(f"{report!r}\n{runner.generation!r}")
        for rule, names in report.ignored.items():
            say("\n".join([f"left out ({rule}):", *(f"  {name!r}" for name in names)]))
    elif report.left_out:
        counts = "; ".join(f"{len(names)} {rule}" for rule, names in report.left_out.items())
        say(f"left out of the checkpoint's tensors: {counts} (--report names them)")
