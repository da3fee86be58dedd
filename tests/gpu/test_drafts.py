"""DSpark on a GPU: text with drafts is the text without, of V4's revisions and of V4.1, in ragged batches."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.drafts import DraftedSource, complete
from tests.support.small_models import prompt
from tests.support.typed import of_type

NEAR = 0.05  # of the largest logit: closer choices may fall differently, where other kernels compute a step with drafts
LENGTHS = (3, 61, 140, 8, 129)  # with three places: prompts join decodes, and requests end one by one


def v4_config() -> ModelConfig:
    tiny = of_type(ModelConfig.from_preset("tiny_gpu"), ModelConfig)
    stages = {"num_nextn_predict_layers": 1, "compress_ratios": [*tiny.compress_ratios, 0, 0]}
    keys = {"dspark_block_size": 5, "dspark_noise_token_id": 2047, "dspark_markov_rank": 256}
    return tiny.replace(dspark_target_layer_ids=[3, 4, 5], **stages, **keys)


def v41_config() -> ModelConfig:
    """The roles of tiny_v41, at widths and heads that kernels take; Engram tables as wide as an FP8 block."""
    return ModelConfig.from_preset("tiny_v41").replace(
        hidden_size=512, num_attention_heads=64, head_dim=512, qk_rope_head_dim=64, q_lora_rank=256, o_groups=8,
        o_lora_rank=128, index_n_heads=32, index_head_dim=128, index_topk=64, sliding_window=128,
        moe_intermediate_size=256, n_routed_experts=16, num_experts_per_tok=6, candidate_topk_blocks=20,
        candidate_block_size=8, engram_n_heads=4, engram_num_embeddings=[1524, 2304],
    )  # fmt: skip


CONFIGS = {"v4": v4_config, "v41": v41_config}


def runner_of(family: str, device: torch.device, numerics: str, deterministic: bool) -> ModelRunner:
    config = CONFIGS[family]()
    return ModelRunner.from_source(
        config, DraftedSource(config, 1), device=device, numerics=numerics, deterministic=deterministic,
        max_model_len=256, max_num_seqs=3, max_num_batched_tokens=256, progress=False,
    )  # fmt: skip


def jobs_of(runner: ModelRunner, temperatures: tuple[float, ...]) -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            prompt(runner.config, length, seed=length),
            SamplingParams(
                temperature=temperatures[i % len(temperatures)], max_tokens=9 + 4 * i, ignore_eos=True, seed=4
            ),
        )
        for i, length in enumerate(LENGTHS)
    ]


def assert_same_text(runner: ModelRunner, tokens: list[int], text: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Greedy texts of one prompt agree up to their ends, or up to a choice between two close logits."""
    assert len(text) == len(other)
    first = next((i for i, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]), None)
    if first is None:
        return
    logits = runner.score([[*tokens, *text[:first]]])[0][-1]
    gap = float(logits.max() - logits[[text[first], other[first]]].min())
    assert gap <= NEAR * float(logits.abs().max()), f"token {first}: {text[first]} and {other[first]}, {gap} apart"


@pytest.fixture
def gpu(device: torch.device, needs_gpu) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a GPU; tests/runner/test_dspark.py has the same on a CPU")
    return device


@pytest.mark.parametrize("numerics", ["exact", "serving"])
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_text_is_the_same_in_fewer_steps(gpu, family, numerics):
    with runner_of(family, gpu, numerics, deterministic=False) as runner:
        jobs = jobs_of(runner, (0.0,))
        alone, plain = complete(runner, jobs, 0)
        for num_drafts in (1, 3, 5):
            together, stats = complete(runner, jobs, num_drafts)
            for (tokens, _), text, other in zip(jobs, alone, together, strict=True):
                assert_same_text(runner, tokens, text, other)
            assert stats.accepted > 3
            assert stats.steps < plain.steps


@pytest.mark.parametrize("family", CONFIGS)
def test_deterministic_text_is_the_same_to_the_token(gpu, family):
    """Greedy and sampled."""
    with runner_of(family, gpu, "serving", deterministic=True) as runner:
        jobs = jobs_of(runner, (0.0, 0.7))
        alone, _ = complete(runner, jobs, 0)
        together, stats = complete(runner, jobs, 3)
        assert together == alone
        assert stats.accepted > 0
