"""The command line: ``deepseek-attn generate | score | info | plan | bench | make-checkpoint | train | experiment``.

Each command is a module with ``add_parser(subparsers)``; it imports what it needs when it runs, so that ``--help`` is
quick. An error a user can mend is one message and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys

COMMANDS = ("generate", "score", "info", "plan", "bench", "make_checkpoint", "train", "experiment")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; ``run`` of what it parses runs one."""
    parser = argparse.ArgumentParser(prog="deepseek-attn", description="Run DeepSeek checkpoints.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        importlib.import_module(f"deepseek_attn.cli.{command}").add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code (2: wrong input, 130: interrupted)."""
    try:
        args = make_parser().parse_args(argv)
        return args.run(args) or 0
    except KeyboardInterrupt:
        if argv is None:  # the process ends here; pressed again, it must not break into the interpreter's own end
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output went away; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"deepseek-attn {args.command}: error: {error}", file=sys.stderr)
        return 2
