"""Fixtures of all tests: a device, and a seed of its own for each test."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch

# Small products gain nothing from more threads, and test workers would fight over the cores; so would their children.
# One number of threads also means the same last bits in every process.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Kernels compile a fifth faster without the lines they come from.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")


@pytest.fixture
def device() -> torch.device:
    """Where the tests that take it run: ``DEEPSEEK_ATTN_TEST_DEVICE`` (default: cpu)."""
    return torch.device(os.environ.get("DEEPSEEK_ATTN_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch from the test's id, so that each case can be repeated alone."""
    value = int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "little")
    torch.manual_seed(value)
    return value
