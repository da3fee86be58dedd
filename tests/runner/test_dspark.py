"""The DSpark drafter: its drafts are those of a brute force, and text with it is the text without."""

from __future__ import annotations

from functools import cache, lru_cache

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource, read_float32
from deepseek_attn.checkpoint.selection import CONFIDENCE, DRAFTER, MTP_UNUSED, VISION
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.model_runner import ModelRunner
from tests.checkpoint.fabricate import MemorySource
from tests.support.drafts import DraftedSource, complete, draft_after
from tests.support.oracle_dspark import V4Drafts, V41Drafts
from tests.support.small_models import assert_close, prompt, small_config, small_runner
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import of_type, required
from tests.support.v41_cases import shallow

KEYS = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_markov_rank": 12,
}


@lru_cache
def config_of(family: str) -> AnyConfig:
    if family == "v4":
        return small_config([0, 4, 8], sliding_window=9, mtp=3, **KEYS)
    return shallow()


@lru_cache
def runner_of(family: str) -> ModelRunner:
    config = config_of(family)
    return small_runner(config, DraftedSource(config, 1), dtype="float32", numerics="exact", max_model_len=160)


@lru_cache
def oracle_of(family: str) -> V4Drafts | V41Drafts:
    config, source = config_of(family), DraftedSource(config_of(family), 1)
    if family == "v4":
        return V4Drafts(of_type(config, ModelConfig), source)
    config = of_type(config, DeepseekV41Config)
    count = required(config.engram).engram_compressed_vocab_size

    @cache
    def tensor(name: str) -> torch.Tensor:
        if name.endswith(".embed.weight") and "engram" in name:
            values, scales = source.read(name), source.read(name.replace("weight", "scale"))
            return values.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
        return read_float32(source, name).double()

    return V41Drafts(config, tensor, source.token_numbers(count, config.vocab_size))


FAMILIES = ["v4", "v41"]


@pytest.mark.parametrize("family", tiered(FAMILIES, ["v41"]))
@pytest.mark.parametrize(
    "chunks", tiered([[1], [2, 1], [8], [9], [10], [5, 1, 1, 7], [30]], quick=[[5, 1, 1, 7]]), ids=str
)
def test_drafts_are_those_of_the_brute_force(family, chunks):
    runner, tokens = runner_of(family), prompt(config_of(family), sum(chunks), seed=3)
    found = draft_after(runner, tokens, chunks, newest=11)
    drafts, logits = oracle_of(family).drafts(tokens, 11)
    assert_close(found.logits.double(), logits[:1], what="logits of the first draft")
    assert found.tokens[0].tolist() == drafts


@exhaustive_on_cpu
@pytest.mark.parametrize("family", tiered(FAMILIES, ["v41"]))
@pytest.mark.parametrize("num_drafts", tiered([1, 3, 5], quick=[3]))
def test_text_is_the_same_in_fewer_steps(family, num_drafts):
    runner = runner_of(family)
    # this seed's random numbers are 0.02 and more from where another token would be sampled
    greedy, sampled = (SamplingParams(temperature=t, max_tokens=14, ignore_eos=True, seed=2) for t in (0, 0.7))
    jobs = [(prompt(runner.config, n, seed=n), params) for n, params in ((3, greedy), (20, sampled), (143, greedy))]
    before = runner.manager.available_pages()
    alone, plain = complete(runner, jobs, 0)
    together, stats = complete(runner, jobs, num_drafts)
    assert together == alone
    assert stats.accepted > 3
    assert stats.steps < plain.steps
    assert runner.manager.available_pages() == before


def test_more_drafts_than_a_block_are_refused():
    with pytest.raises(ValueError, match="6 drafts per step: dspark_block_size 5 is the most"):
        MTPSpeculation(runner_of("v4"), 6)


def test_a_checkpoint_with_the_other_drafter_loads_without():
    """By its tensors: a config may name DSpark beside an MTP layer, or not name it beside DSpark stages."""
    dspark, mtp = config_of("v4"), small_config([0, 4, 8], sliding_window=9, mtp=1)
    stages, layer = (MemorySource.of(RandomSource(config)) for config in (dspark, mtp))
    for config, source, rule in ((mtp, stages, DRAFTER), (dspark, layer, MTP_UNUSED)):
        runner = small_runner(config, source)
        assert not runner.has_mtp
        assert runner.report.ignored.keys() == {rule}


def test_parts_of_the_drafter_that_text_does_not_need_are_named():
    source = MemorySource.of(RandomSource(config_of("v4")))
    source.put("mtp.2.confidence_head.proj.weight", "BF16", torch.zeros(1, 140, dtype=torch.bfloat16))
    source.put("mtp.1.ffn.gate.bias_vl", "F32", torch.zeros(4))
    runner = small_runner(config_of("v4"), source)
    assert runner.has_mtp
    assert runner.report.ignored.keys() == {CONFIDENCE, VISION}
