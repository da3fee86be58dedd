"""Runners of small models and ways to drive their sequences, for tests of what must not matter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from deepseek_attn.runner import ModelRunner, Sequence, StepOptions
from tests.support.small_models import small_config, small_runner

COMPRESSED = (4, 128)  # ratios of published checkpoints, tested in every way; the others in some
OTHERS = (0, 2, 8, 16)
NUMERICS = ("exact", "official", "serving")
MIXED = (4, 128, 16)  # a layer of each kind of compression
KINDS = {"exact": MIXED, "official": (4, 128), "serving": (4, 128)}
SAME = 1e-5  # of the largest logit: one float32 program at two batch shapes; measured 6e-7


@lru_cache(maxsize=4)
def shared_runner(ratios: tuple[int, ...], numerics: str = "exact", mtp: int = 0) -> ModelRunner:
    """Runners are reused, so each test also starts from caches that others have left full."""
    return small_runner(small_config(list(ratios), mtp=mtp), numerics=numerics, max_model_len=320, max_num_seqs=36)


@contextmanager
def pages_returned(runner: ModelRunner) -> Iterator[None]:
    before = runner.manager.available_pages()
    yield
    assert runner.manager.available_pages() == before


def advance(runner: ModelRunner, sequence: Sequence, sizes: list[int]) -> torch.Tensor:
    """Logits of the next ``sum(sizes)`` tokens, computed in steps of these sizes."""
    return torch.cat([runner.step([(sequence, n)], StepOptions(all_logits=True)).rows[0] for n in sizes])


def extend(sequence: Sequence, tokens: list[int]) -> None:
    for token in tokens:
        sequence.append(token)


def fresh(runner: ModelRunner, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of a new sequence computed in steps of these sizes; its pages are returned."""
    sequence = runner.sequence(tokens)
    logits = advance(runner, sequence, sizes)
    sequence.free()
    return logits
