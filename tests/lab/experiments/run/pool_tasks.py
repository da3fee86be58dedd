"""Tasks of worker processes, in a file without slow imports. What a unit does is the first part of its path."""

import os
import signal
import sys
import time
from pathlib import Path


def act(unit, report):
    """Prints to the log, reports progress, then ends as the unit's path says."""
    action = unit.path.split("/")[0]
    print("act", unit.path, flush=True)
    report(0.5)
    if action == "variable":
        print(os.environ["POOL_TEST"], flush=True)
        time.sleep(0.5)  # others start meanwhile
    if action == "crash":
        os._exit(7)
    if action == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hang":
        time.sleep(600)
    if action == "full":  # the disk that the log is on
        sys.stderr = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    if action in ("error", "full"):
        raise ValueError("no")


class CannotStart:
    """A task whose process ends when it is received."""

    def __reduce__(self):
        return os._exit, (3,)
