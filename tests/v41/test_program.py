"""``official`` numerics in bfloat16, beside a transcription of DeepSeek's program: every rounding is in its place.

Roundings make models chaotic: one that falls differently re-rounds all FP8 inputs behind it, and may change which
entries a query reads. So the cosines of logits are compared, by their median and mean over positions and models.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from deepseek_attn.checkpoint import RandomSource
from tests.support.program_v41 import ROUNDINGS, V41Program
from tests.support.small_models import prompt
from tests.support.tiers import tiered
from tests.support.v41_cases import make_runner, tiny

LENGTH, SEEDS = 150, range(3)
NO_CANDIDATES = {"candidate_source_layer_id": None, "candidate_topk_blocks": None, "candidate_block_size": None}
CANDIDATES = {"candidate_source_layer_id": 0, "candidate_topk_blocks": 4, "candidate_block_size": 4}


def schedule(ratios: list[int], index_sources: list[int], candidates: dict) -> dict:
    return {
        "num_hidden_layers": len(ratios), "compress_ratios": ratios, "index_topk": 8, "sliding_window": 16,
        "kv_source_layer_ids": index_sources[:1], "index_source_layer_ids": index_sources, "engram_layer_ids": None,
        "num_nextn_predict_layers": 0, "dspark_target_layer_ids": None, **candidates,
    }  # fmt: skip


MODELS = {
    "window": schedule([0], [], NO_CANDIDATES),
    "tokens": schedule([1], [0], NO_CANDIDATES),
    "pairs": schedule([2], [0], NO_CANDIDATES),
    "three layers of tokens": schedule([1, 1, 1], [0, 1], CANDIDATES),
    "three layers of pairs": schedule([2, 2, 2], [0, 1], CANDIDATES),
}


@cache
def logits(model: str, seed: int) -> Tensor:
    config = tiny(**MODELS[model])
    source = RandomSource(config, seed)
    return make_runner(config, source, numerics="official", dtype="bfloat16").score([prompt(config, LENGTH, seed)])[0]


@cache
def cosines(model: str, left_out: tuple[str, ...] = ()) -> Tensor:
    """Cosines of logits with the program's, ``[seeds, LENGTH]``."""
    config, found = tiny(**MODELS[model]), []
    for seed in SEEDS:
        program = V41Program(config, RandomSource(config, seed), left_out)
        expected = program(prompt(config, LENGTH, seed))
        found.append(torch.cosine_similarity(logits(model, seed).double(), expected.double(), dim=1))
    return torch.stack(found)


@pytest.mark.parametrize("model", tiered(MODELS, ["three layers of tokens"]))
def test_logits_are_the_programs(model):
    found = cosines(model)
    assert float(found.median()) > 0.9995
    assert float(found.mean()) > 0.997 if "three" in model else float(found.mean()) > 0.999


@pytest.mark.parametrize("rounding", tiered(ROUNDINGS, ["scores"]))
def test_each_rounding_is_the_programs(rounding):
    """A program without one of its roundings is further away."""
    model = "three layers of tokens"
    assert float(cosines(model, (rounding,)).mean()) < float(cosines(model).mean())
