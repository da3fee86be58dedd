"""Checks that need a GPU and FlashMLA. Without them a small part runs on a CPU, against a stand-in.

    DEEPSEEK_ATTN_TEST_DEVICE=cuda DEEPSEEK_ATTN_GPU_RESULTS=errors.json pytest tests/gpu

Every case draws random data, fills what nothing may read with NaN, and compares with float32 torch on the same cached
bytes. ``DEEPSEEK_ATTN_GPU_RESULTS`` names a file for all errors; leave ``-n`` out then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepseek_attn.impls import flash_mla
from tests.gpu.report import Report
from tests.support import fake_flash_mla

RESULTS = "DEEPSEEK_ATTN_GPU_RESULTS"
COMMAND = f"DEEPSEEK_ATTN_TEST_DEVICE=cuda {RESULTS}=FILE pytest tests/gpu"


@pytest.fixture(scope="session")
def everything() -> Iterator[Report]:
    report = Report()
    yield report
    if RESULTS in os.environ:
        report.write(Path(os.environ[RESULTS]), COMMAND)


@pytest.fixture
def report(everything: Report) -> Iterator[Report]:
    """Collects the errors of a test, which ends with ``assert not report.failed``."""
    report = Report()
    yield report
    everything += report


@pytest.fixture
def checked(device: torch.device, request: pytest.FixtureRequest, monkeypatch) -> Iterator[torch.device]:
    """The device of the tests if FlashMLA runs there; a CPU, with a stand-in for the package, for small cases."""
    usable, reason = flash_mla.supported(device)
    if not usable and request.node.get_closest_marker("on_cpu") is None:
        pytest.skip(reason)
    if not usable:
        device = torch.device("cpu")
        monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla.make("sgl"))
    flash_mla.flavour.cache_clear()
    yield device
    monkeypatch.undo()
    flash_mla.flavour.cache_clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
