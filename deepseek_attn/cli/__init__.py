"""The command line, ``deepseek-attn COMMAND``.

`COMMANDS` names each command's module, which is imported when the command is run. The module's
``add_arguments(parser)`` adds the flags and sets ``run``; torch is imported only when a command runs, so that
``--help`` is quick. An error that a user can correct is one message and exit code 2.

This module imports little before `main` can end an interrupted command without a traceback.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

from deepseek_attn.cli.terminal import say
from deepseek_attn.utils.version import __version__

if TYPE_CHECKING:
    import argparse


class Command(NamedTuple):
    """A command: the path of its module, and its line in ``deepseek-attn --help``."""

    module: str
    help: str


LABORATORY = "deepseek_attn.lab"
COMMANDS = {
    "generate": Command("deepseek_attn.cli.generate", "complete a prompt"),
    "score": Command("deepseek_attn.cli.score", "logits of given tokens"),
    "inspect": Command(f"{LABORATORY}.commands.inspect", "the cache entries that each token of a prompt reads"),
    "info": Command(
        "deepseek_attn.cli.info", "machine, versions, backends; with --plans the kernels of a model's steps"
    ),
    "plan": Command(
        "deepseek_attn.cli.plan", "KV cache bytes per layer, sequence and token; memory and step times on GPUs"
    ),
    "warmup": Command("deepseek_attn.cli.warmup", "compile a model's kernels ahead"),
    "bench": Command(f"{LABORATORY}.commands.bench", "time ops, layers and models"),
    "make-checkpoint": Command("deepseek_attn.cli.make_checkpoint", "random weights in the published format"),
    "crop": Command("deepseek_attn.cli.crop", "a smaller checkpoint of some layers and experts"),
    "port-check": Command(f"{LABORATORY}.commands.port_check", "compare another implementation with golden results"),
    "train": Command(f"{LABORATORY}.commands.train", "train a small model from scratch"),
    "experiment": Command(f"{LABORATORY}.commands.experiment", "compare compress-ratio schedules"),
}
FULL = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}  # of a write
BROKEN_PIPE = 128 + 13  # the exit code of a process that SIGPIPE ends


class Terminated(KeyboardInterrupt):
    """Raised by a signal that ends the process, other than SIGINT. The argument is the signal's number."""


def make_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of the command line; a parsed namespace's ``run(namespace)`` runs the command.

    Args:
        words: the arguments to parse; only the command that they name gets its flags. None: all commands get theirs.

    Raises:
        ValueError: a command of the laboratory was named, and the laboratory is not installed.
    """
    from deepseek_attn.cli.options import Parser

    parser = Parser(prog="deepseek-attn", description="Run DeepSeek checkpoints.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    named = next((word for word in words or () if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        own = subparsers.add_parser(name, help=command.help)
        if words is None or name == named:
            command_module(name).add_arguments(own)
    return parser


def command_module(name: str) -> ModuleType:
    """Imports the module of a command; ValueError for a laboratory command if the laboratory is not installed."""
    try:
        return importlib.import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        if error.name != LABORATORY:
            raise
        raise ValueError(
            f"{name} belongs to the laboratory, the package {LABORATORY}, which is missing here; install the whole "
            "library: pip install deepseek-attn"
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments; None: the arguments of the process, and SIGTERM and SIGHUP then end it as Ctrl-C does.

    Returns:
        The exit code. 1: something failed; 2: wrong input, or an output that cannot be written; 128 + n: ended by
        signal n, or by SIGPIPE because the reader of the output is gone.
    """
    stops: list[int] = [signal.SIGINT] if argv is None else []
    try:
        if argv is None:
            open_standard_streams()
            stops += handle_signals()
        return run_command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as stop:
        ignore_signals(stops)
        say("")
        return 128 + (stop.args[0] if isinstance(stop, Terminated) else signal.SIGINT)
    finally:
        ignore_signals(stops)
        drop_unwritten_output()


def run_command(words: Sequence[str]) -> int:
    """Runs the command of these arguments; returns the exit code. An interruption passes, also of these imports."""
    program = "deepseek-attn"
    try:
        from deepseek_attn.cli.log import logged
        from deepseek_attn.cli.options import check_bounds, check_files

        try:
            args = make_parser(words).parse_args(words)
            args.command_line = words  # for processes that run the same command
            program += f" {args.command}"
            check_bounds(args)
            check_files(args)
            with logged(getattr(args, "log_level", logging.WARNING)):
                return args.run(args) or 0
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        return BROKEN_PIPE
    except Exception as error:
        message = explanation(error)
        if message is None:
            raise
        say(f"{program}: error: {message}")
        return 2


def open_standard_streams() -> None:
    """Opens the null device for each closed standard stream, so that no later file gets its number.

    Python's ``sys.stdin`` stays None: a command that reads it reports that.
    """
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            if number:
                name = ("stdout", "stderr")[number - 1]
                setattr(sys, name, os.fdopen(opened, "w", closefd=False))


def handle_signals() -> list[int]:
    """Lets the signals that end a process end it as Ctrl-C does, so that files and processes are cleaned up.

    Signals that are ignored (``nohup``) or handled stay so. A rank ends at once: it may wait for others in a
    collective, where Python handles no signal.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal's encoding lacks are written as escapes
            stream.reconfigure(errors="backslashreplace")
    names = ("SIGTERM", "SIGHUP") if os.environ.get("WORLD_SIZE", "1") == "1" else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, terminate)
    return numbers


def ignore_signals(numbers: list[int]) -> None:
    """Ignores signals while the interpreter shuts down: an interrupted exit callback would print a traceback."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def explanation(error: Exception) -> str | None:
    """The message of an error that a user can correct; None for any other."""
    if "Invalid log settings" in str(error):  # raised while torch is imported; pages of settings follow the first line
        value = os.environ.get("TORCH_LOGS", "")
        return f"the environment variable TORCH_LOGS is {value[:80]!r}, which torch refuses: TORCH_LOGS=help lists more"
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
        return f"standard output, or another open file, cannot be written: {error.strerror}"
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    from deepseek_attn.config.options import is_out_of_memory  # imports torch

    reason = str(error).split("\n")[0]
    return f"out of memory: use smaller sizes ({reason})" if is_out_of_memory(error) else None


def drop_unwritten_output() -> None:
    """Discards output that could not be written, so that the interpreter does not fail again when it ends."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
