"""Fixtures for pytest. In a ``conftest.py``: ``from deepseek_attn.testing.fixtures import random_layer``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepseek_attn.testing.random_layer import RandomLayer


@pytest.fixture
def random_layer() -> Callable[..., RandomLayer]:
    """Makes a `RandomLayer` of these arguments: ``random_layer("v4_flash", 2, backend="triton", dtype="bfloat16")``."""
    return RandomLayer
