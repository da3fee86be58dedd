"""``--report``: which tensors of a checkpoint were loaded, and by which rule others were left out."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepseek_attn.runner.model_runner import ModelRunner


def add_report_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--report",
        action="store_true",
        help="say on standard error what was loaded, the name of each tensor that was left out, and the defaults of "
        "generation_config.json",
    )


def show_report(runner: ModelRunner, args: argparse.Namespace) -> None:
    """Prints the whole report with ``--report``; else one line if tensors were left out of a whole model."""
    report = runner.report
    if args.report:
        print(f"{report!r}\n{runner.generation!r}", file=sys.stderr)
        for rule, names in report.ignored.items():
            print("\n".join([f"left out ({rule}):", *(f"  {name!r}" for name in names)]), file=sys.stderr)
    elif report.left_out:
        counts = "; ".join(f"{len(names)} {rule}" for rule, names in report.left_out.items())
        print(f"left out of the checkpoint's tensors: {counts} (--report names them)", file=sys.stderr)
