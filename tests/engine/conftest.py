"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from tests.support.small_models import two_layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a layer of each kind and an MTP layer, with random weights and a tokenizer."""
    config = two_layers()
    return write_checkpoint(RandomSource(config, seed=3), config, tmp_path_factory.mktemp("model") / "tiny")
