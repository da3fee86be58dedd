"""What several workers of a test run need is made by the first of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(name: str, make: Callable[[Path], object], factory: pytest.TempPathFactory) -> Path:
    """A folder of this name that ``make`` has filled, for all workers; the others wait until it is whole."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose own folder lies in that of the run
        root = root.parent
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = factory.mktemp(name)
            make(unfinished)
            unfinished.rename(folder)
    return folder
