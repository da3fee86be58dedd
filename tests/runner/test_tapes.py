"""Decode steps of one token that repeat recorded operations have the bits of steps that are computed as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.runner import ModelRunner, tapes
from deepseek_attn.runner.sequence import Sequence
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.typed import required

V4 = small_config([0, 4, 128])
V32 = ModelConfig.from_preset("tiny_v32").replace(num_hidden_layers=2)


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "FIRST", 0)


def decode(runner: ModelRunner, texts: list[list[int]], starts: list[int]) -> list[list[torch.Tensor]]:
    """Logits of each text after its first ``starts`` tokens and after each later one; texts take turns."""
    sequences = [runner.sequence(text[:n]) for text, n in zip(texts, starts, strict=True)]
    results: list[list[torch.Tensor]] = [[] for _ in texts]
    for sequence, found in zip(sequences, results, strict=True):
        found.append(step(runner, sequence))
    for n in range(max(len(text) - start for text, start in zip(texts, starts, strict=True))):
        for text, start, sequence, found in zip(texts, starts, sequences, results, strict=True):
            if start + n < len(text):
                sequence.append(text[start + n])
                found.append(step(runner, sequence))
    for sequence in sequences:
        sequence.free()
    return results


def step(runner: ModelRunner, sequence: Sequence) -> torch.Tensor:
    [rows] = runner.step([(sequence, len(sequence.token_ids) - sequence.num_computed)]).rows
    return rows


def both(config: AnyConfig, **options: Any) -> tuple[ModelRunner, ModelRunner]:
    """A runner that repeats steps, and one that does not."""
    return small_runner(config, **options), small_runner(config, cuda_graphs=False, **options)


@pytest.mark.parametrize(
    ("config", "options", "repeats"),
    [
        (V4, {}, True),
        (V4, {"numerics": "official"}, False),
        (V4, {"dtype": "bfloat16"}, True),
        (V32, {}, True),
    ],
    ids=["v4", "v4_official", "v4_bfloat16", "v32"],
)
def test_bits(config: AnyConfig, options: dict[str, Any], repeats: bool) -> None:
    """Windows close, index selections begin, and two sequences use the same tape in turn."""
    texts, starts = [prompt(config, 150, 0), prompt(config, 60, 1)], [1, 17]
    taped, plain = both(config, **options)
    for found, expected in zip(decode(taped, texts, starts), decode(plain, texts, starts), strict=True):
        assert all(map(torch.equal, found, expected))
    assert plain.tapes is None
    assert taped.tapes is not None
    assert (taped.tapes.problem == "") is repeats, taped.tapes.problem


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_deterministic_bits(config: AnyConfig) -> None:
    """Tokens of prompts and of several requests repeat the tape, too, each at its own position."""
    texts = [prompt(config, 150, 0), prompt(config, 60, 1)]
    taped, plain = both(config, deterministic=True)
    found = [in_chunks(runner, texts, (40, 1, 1, 7, 80)) for runner in (taped, plain)]
    assert len(found[0]) == 10
    assert all(map(torch.equal, *found))
    tape = required(taped.tapes)
    assert (tape.steps, tape.problem, plain.tapes) == (129 + 60, "", None)


def in_chunks(runner: ModelRunner, texts: list[list[int]], sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits after chunks of the texts, which share steps."""
    sequences, rows = [runner.sequence(text) for text in texts], []
    for size in sizes:
        left = [(sequence, len(sequence.token_ids) - sequence.num_computed) for sequence in sequences]
        rows += runner.step([(sequence, min(size, n)) for sequence, n in left if n]).rows
    for sequence in sequences:
        sequence.free()
    return rows
