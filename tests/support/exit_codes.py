"""Exit codes of commands that run in this process."""

from __future__ import annotations

from collections.abc import Callable


def exit_code(command: Callable[..., int], *args) -> int | str | None:
    """What ``command(*args)`` returns, or exits with where argparse refuses the flags."""
    try:
        return command(*args)
    except SystemExit as end:
        return end.code
