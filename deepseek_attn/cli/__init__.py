"""The command line: ``deepseek-attn generate | score | info | plan | bench | make-checkpoint | train | experiment``.

Each command is a module with ``add_parser(subparsers)`` that imports torch only when it runs, so that ``--help`` is
quick. An error that a user can correct is one message and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from deepseek_attn.cli import bench, experiment, generate, info, make_checkpoint, plan, score, train

COMMANDS = (generate, score, info, plan, bench, make_checkpoint, train, experiment)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; a parsed namespace's ``run(namespace)`` runs the command."""
    parser = argparse.ArgumentParser(prog="deepseek-attn", description="Run DeepSeek checkpoints.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code (2: wrong input, 130: interrupted)."""
    try:
        args = make_parser().parse_args(argv)
        return args.run(args) or 0
    except KeyboardInterrupt:
        if argv is None:  # the process is about to exit: another Ctrl-C must not interrupt the interpreter's shutdown
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of the output is gone; the interpreter must not fail again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"deepseek-attn {args.command}: error: {error}", file=sys.stderr)
        return 2
