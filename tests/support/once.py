"""What several workers of a test run need is made by the first of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepseek_attn.utils.files import appearing, lock_file


def made_once(name: str, make: Callable[[Path], object], factory: pytest.TempPathFactory) -> Path:
    """A folder of this name that ``make`` has filled, for all workers; the others wait until it is whole."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose own folder lies in that of the run
        root = root.parent
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        lock_file(lock, wait=True)
        if not folder.exists():
            with appearing(folder, directory=True) as unfinished:
                make(unfinished)
    return folder
