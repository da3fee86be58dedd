"""The whole model in exact numerics against two oracles that share no code with it.

transformers covers the published schedules, the brute-force oracle everything: any ratio, overlap and indexer on or
off, and the MTP layer. Seeds are chosen so that no choice of experts or entries is left to rounding, and each test
checks that.
"""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.oracle_dense import DenseOracle
from tests.support.oracle_transformers import TransformersOracle
from tests.support.small_models import (
    assert_close,
    assert_no_near_tie,
    prompt,
    recorded_choices,
    small_config,
    small_runner,
)
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import of_type, required

LENGTHS = (1, 3, 4, 5, 15, 16, 17, 127, 128, 129, 257)
LONG = (255, 256, 300, 530)
QUICK_LENGTHS = [("tiny", n) for n in LENGTHS]


class Tiny:
    """The tiny preset: one checkpoint, two prompts with their references, all lengths scored in one batch."""

    def __init__(self, lengths: tuple[int, ...]):
        self.config = of_type(ModelConfig.from_preset("tiny"), ModelConfig)
        self.source = RandomSource(self.config, 0)
        self.runner = small_runner(self.config, self.source, max_model_len=530, max_num_seqs=len(lengths))
        self.prompts = [prompt(self.config, max(lengths), seed) for seed in (0, 1)]
        oracle = TransformersOracle(self.config, self.source)
        self.references = [oracle(tokens) for tokens in self.prompts]
        # neighbours in the batch have different tokens, so that reading another request's cache would show
        batch = [self.prompts[i % 2][:length] for i, length in enumerate(lengths)]
        self.scores = dict(zip(lengths, self.runner.score(batch), strict=True))


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny(LENGTHS)


@pytest.fixture(scope="module")
def long() -> Tiny:
    return Tiny(LONG)


@pytest.mark.parametrize(("model", "length"), tiered(QUICK_LENGTHS + [("long", n) for n in LONG], QUICK_LENGTHS))
def test_tiny_equals_transformers(request, model, length):
    model = request.getfixturevalue(model)
    reference = model.references[list(model.scores).index(length) % 2]
    assert_no_near_tie(reference)
    assert_close(model.scores[length], reference.logits[:length])


@pytest.mark.parametrize("which", tiered([0, 1], [1]))
def test_tiny_choices_equal_transformers(tiny, which):
    reference = tiny.references[which]
    with recorded_choices(tiny.runner) as found:
        tiny.runner.score([tiny.prompts[which]])
    assert set(found.experts) == set(reference.experts) == set(range(6))
    for layer, experts in reference.experts.items():
        assert torch.equal(found.experts[layer], experts), f"layer {layer}"
    assert set(found.entries) == set(reference.entries) == {1, 3}
    for layer, entries in reference.entries.items():
        assert torch.equal(found.entries[layer], entries), f"layer {layer}"
        assert entries.sum(1).max() == tiny.config.index_topk < entries.shape[1]


@pytest.mark.exhaustive
def test_brute_force_equals_transformers(tiny):
    tokens = tiny.prompts[0]
    dense = DenseOracle(tiny.config, tiny.source)(tokens)
    reference = tiny.references[0]
    assert_close(required(dense.logits), reference.logits[:300])
    for layer, experts in reference.experts.items():
        assert torch.equal(dense.experts[layer], experts[:300]), f"layer {layer}"
    for layer, entries in reference.entries.items():
        assert torch.equal(dense.entries[layer], entries[:300, :75]), f"layer {layer}"


def random_config(seed: int) -> tuple[ModelConfig, str | None]:
    """A config that transformers can express, and the format of its experts."""
    draw = random.Random(seed)
    groups = draw.choice([1, 2, 4])
    ratios = [draw.choice([0, 4, 4, 128]) for _ in range(draw.choice([2, 3]))]
    yarn = {"type": "yarn", "factor": draw.choice([4, 16]), "original_max_position_embeddings": 64}
    changes = {
        "compress_ratios": ratios,
        "num_hidden_layers": len(ratios),
        "num_hash_layers": draw.randint(0, len(ratios)),
        "num_nextn_predict_layers": 0,
        "vocab_size": draw.choice([33, 128, 257]),
        "hidden_size": draw.choice([64, 96, 160]),
        "num_attention_heads": groups * draw.choice([1, 3]),
        "head_dim": draw.choice([64, 96]),
        "qk_rope_head_dim": draw.choice([32, 64]),
        "q_lora_rank": draw.choice([48, 64]),
        "o_groups": groups,
        "o_lora_rank": draw.choice([16, 24]),
        "sliding_window": draw.choice([1, 5, 16, 64, 128]),
        "index_n_heads": draw.choice([16, 24]),
        "index_head_dim": draw.choice([64, 128]),
        "index_topk": draw.choice([3, 20, 512]),
        "n_routed_experts": draw.choice([5, 8]),
        "num_experts_per_tok": draw.choice([1, 3]),
        "moe_intermediate_size": draw.choice([32, 96]),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "swiglu_limit": draw.choice([2.0, 10.0]),
        "hc_mult": draw.choice([2, 3, 4]),
        "hc_sinkhorn_iters": draw.choice([1, 3, 20]),
        "hc_eps": draw.choice([1e-6, 1e-3]),
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "rope_theta": draw.choice([1000.0, 10000.0]),
        "compress_rope_theta": draw.choice([40000.0, 160000.0]),
        "rope_scaling": draw.choice([None, yarn, yarn]),
    }
    experts = draw.choice(["fp4", "fp8", "bf16", None])
    if experts is None:
        changes["quantization_config"] = None
    return ModelConfig.from_preset("tiny").replace(**changes), experts


@pytest.mark.parametrize("seed", tiered(range(14), [1]))
def test_random_configs_equal_transformers(seed):
    config, experts = random_config(seed)
    source = RandomSource(config, seed, expert_dtype=experts)
    tokens = prompt(config, 270, seed)
    reference = TransformersOracle(config, source)(tokens)
    assert_no_near_tie(reference)
    runner = small_runner(config, source)
    with recorded_choices(runner) as found:
        whole = runner.score([tokens])[0]
    assert_close(whole, required(reference.logits))
    assert set(found.experts) == set(reference.experts)
    for layer, chosen in reference.experts.items():
        assert torch.equal(found.experts[layer], chosen), f"layer {layer}"
    assert_close(runner.score([tokens], chunk_size=41)[0], required(reference.logits), what="in chunks of 41")


RATIOS = (1, 2, 4, 8, 16, 128)
BRANCHES = [(ratio, overlap, indexer) for ratio in RATIOS for overlap in (False, True) for indexer in (False, True)]
QUICK = [(1, True, False), (2, False, False), (8, False, True), (16, True, True)]


@pytest.mark.parametrize(
    ("ratio", "overlap", "indexer"), tiered([(0, False, False), *BRANCHES], QUICK[::2], quick_on_gpu=QUICK)
)
def test_any_branch_equals_brute_force(ratio, overlap, indexer):
    switches = {"compress_overlap": {str(ratio): overlap}, "compress_indexer": {str(ratio): indexer}} if ratio else {}
    topk = 1 if ratio == 128 else 6
    with pytest.warns(UserWarning, match="one entry per token") if ratio == 1 else nullcontext():
        config = small_config([ratio, ratio], mtp=1, index_topk=topk, **switches)
    assert [(s.ratio, s.overlap, s.has_indexer) for s in config.layers] == [(ratio, overlap, indexer)] * 2
    source = RandomSource(config, 1)
    # three windows and some tokens; the tokens of the last, open window are read through the sliding window only
    tokens = prompt(config, max(3 * ratio, 64) + 3, seed=1)
    reference = DenseOracle(config, source)(tokens)
    assert_no_near_tie(reference)
    runner = small_runner(config, source)
    for chunk_size in (None, 37):
        logits, drafts = runner.score_mtp([tokens], chunk_size)
        assert_close(logits[0], required(reference.logits), what=f"in chunks of {chunk_size}")
        assert_close(drafts[0], required(reference.mtp_logits), what=f"MTP in chunks of {chunk_size}")


@exhaustive_on_cpu
def test_mixed_schedule_equals_brute_force():
    ratios = [1, 2, 4, 4, 8, 16, 128, 0]
    config = small_config(
        ratios,
        mtp=1,
        num_hash_layers=3,
        compress_overlap=[False, True, True, False, True, False, True, False],
        compress_indexer=[True, False, True, False, False, True, True, False],
    )
    source = RandomSource(config, 0)
    tokens = prompt(config, 150, seed=4)
    reference = DenseOracle(config, source)(tokens)
    assert_no_near_tie(reference)
    logits, drafts = small_runner(config, source).score_mtp([tokens, tokens[:130]], chunk_size=100)
    assert_close(logits[0], required(reference.logits))
    assert_close(logits[1], required(reference.logits)[:130])
    assert_close(drafts[0], required(reference.mtp_logits))
    assert_close(drafts[1], required(reference.mtp_logits)[:129])


@pytest.mark.parametrize("ratio", tiered([2, 4, 16, 128], [4, 128]))
def test_every_short_length_equals_brute_force(ratio):
    """Prompts of 1 to 2 R + 1 tokens in one prefill: the first windows, complete or not."""
    config = small_config([ratio, ratio])
    source = RandomSource(config, 1)
    tokens = prompt(config, 2 * ratio + 1, seed=1)
    reference = DenseOracle(config, source)(tokens)
    assert_no_near_tie(reference)
    near = [n for n in range(1, len(tokens) + 1) if ratio < 128 or n < 4 or n % ratio in (ratio - 2, ratio - 1, 0, 1)]
    scores = small_runner(config, source, max_num_seqs=len(near)).score([tokens[:n] for n in near])
    for n, logits in zip(near, scores, strict=True):
        assert_close(logits, required(reference.logits)[:n], what=f"{n} tokens")


def test_another_router_equals_brute_force():
    config = small_config([0, 0], scoring_func="sigmoid")
    source = RandomSource(config, 0)
    tokens = prompt(config, 40)
    reference = DenseOracle(config, source)(tokens)
    assert_no_near_tie(reference)
    assert_close(small_runner(config, source).score([tokens])[0], required(reference.logits))


def test_drafts_of_short_prompts():
    """A prompt of n tokens has n - 1 MTP rows, none of which another prompt of the batch changes."""
    config = small_config([0, 4], mtp=1)
    source = RandomSource(config, 0)
    tokens = prompt(config, 30, seed=1)
    reference = DenseOracle(config, source)(tokens)
    _, drafts = small_runner(config, source).score_mtp([tokens[:n] for n in (1, 2, 3, 30)])
    assert [len(rows) for rows in drafts] == [0, 1, 2, 29]
    for rows in drafts:
        assert_close(rows, required(reference.mtp_logits)[: len(rows)])


@pytest.mark.exhaustive
def test_what_transformers_saves_loads(tmp_path):
    """`save_pretrained` has names of its own (``attn.norm`` for the kv_norm) and its own spelling of the config."""
    config = of_type(ModelConfig.from_preset("tiny"), ModelConfig)
    oracle = TransformersOracle(config, RandomSource(config, seed=0))
    oracle.model.save_pretrained(tmp_path)
    runner = ModelRunner.from_pretrained(tmp_path, device="cpu", progress=False)
    prompt = torch.randint(config.vocab_size, (77,)).tolist()
    expected = required(oracle(prompt).logits)
    assert not runner.has_mtp  # transformers drops it
    assert (runner.score([prompt])[0] - expected).abs().max() <= 1e-4 * expected.abs().max()
