"""Small runners of all families, and the logits of their next tokens."""

from __future__ import annotations

from functools import lru_cache

import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.runner import ModelRunner, Sequence, StepOptions
from tests.support.small_models import small_config, small_runner
from tests.support.typed import required

NUMERICS = ("exact", "official", "serving")


@lru_cache(maxsize=8)
def runner_of(family: str, numerics: str = "exact", seed: int = 0, **options) -> ModelRunner:
    if family in ("v32", "v41"):
        config = ModelConfig.from_preset(f"tiny_{family}")
    else:
        ratios = {"mixed": (0, 4, 128, 16), "overlap": (4,), "window": (0, 0), "odd": (3, 5, 7)}[family]
        overlap = {"compress_overlap": {"3": True}} if family == "odd" else {}
        config = small_config(list(ratios), mtp=1, **overlap)
    return small_runner(
        config, RandomSource(config, seed), numerics=numerics,
        **{"max_snapshots": 6, "max_num_seqs": 4, "max_model_len": 640} | options,
    )  # fmt: skip


def compute(runner: ModelRunner, sequence: Sequence, *sizes: int, mtp: bool = True) -> torch.Tensor:
    """Logits, and those of the MTP layer if there is one, of the next tokens."""
    parts, mtp = [], mtp and runner.has_mtp
    for n in sizes:
        out = runner.step([(sequence, n)], StepOptions(all_logits=True, mtp=mtp))
        parts += [required(out.logits)[0], *(out.mtp_logits or [])]
    return torch.cat(parts)


def poison_free_pages(runner: ModelRunner, held: list) -> None:
    for pool in runner.pools:
        kept = {page for cache in held for page in cache.tables[pool.spec.group]}
        free = [page for page in range(len(pool.tensor)) if page not in kept]
        pool.tensor[free] = float("nan") if pool.tensor.is_floating_point() else 0xFF
