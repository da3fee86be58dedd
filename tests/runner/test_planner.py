"""The planner predicts what is allocated, to the byte."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import PRESETS, numerics_for
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.planner import make_plan, sequences_that_fit, tokens_that_fit
from deepseek_attn.utils.workspace import aligned_bytes
from tests.support.small_models import two_layers
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

LIMITS: dict[str, Any] = {"max_model_len": 1031, "max_num_seqs": 3, "max_num_batched_tokens": 200}


def attention_layers(runner: ModelRunner) -> list[DeepseekV4MLAAttention]:
    return [module for module in runner.model.modules() if isinstance(module, DeepseekV4MLAAttention)]


@pytest.mark.parametrize(
    ("numerics", "dtype"), [(each, torch.bfloat16) for each in PRESETS] + [("exact", torch.float32)], ids=str
)
def test_plan_equals_allocation(numerics, dtype):
    config = two_layers()
    runner = ModelRunner.from_config(config, numerics=numerics, dtype=dtype, device="cpu", max_rollback=5, **LIMITS)
    plan = make_plan(config, PRESETS[numerics], dtype, *LIMITS.values(), max_rollback=5)
    allocated = sum(pool.tensor.untyped_storage().nbytes() for pool in runner.pools)
    assert plan.caches == allocated
    layers = attention_layers(runner)
    topk = next(layer.topk_indices_buffer for layer in layers if layer.indexer is not None)
    assert plan.workspace == runner.workspace.nbytes() + required(topk).numel() * required(topk).element_size()
    ropes = {id(layer.rope): layer.rope.cos_sin for layer in layers}
    assert plan.rope == sum(table.numel() * table.element_size() for table in ropes.values())


@pytest.mark.parametrize(
    "schedule",
    tiered([[0, 8, 2, 16, 128, 0, 0], [4] * 6 + [0], [1, 256, 4, 4, 0, 64, 0]], [[1, 256, 4, 4, 0, 64, 0]]),
    ids=str,
)
def test_plan_equals_allocation_for_other_schedules(schedule):
    config = ModelConfig.from_preset("tiny").replace(compress_ratios=schedule)
    runner = ModelRunner.from_config(config, numerics="serving", dtype="bfloat16", device="cpu", **LIMITS)
    plan = make_plan(config, PRESETS["serving"], torch.bfloat16, *LIMITS.values())
    assert plan.caches == runner.pools.nbytes()


@pytest.mark.parametrize("preset", ["tiny", "tiny_v32"])
@pytest.mark.parametrize("numerics", tiered(["exact", "serving"], ["serving"]))
def test_plan_equals_allocation_with_a_budget_and_snapshots(preset, numerics):
    config = ModelConfig.from_preset(preset)
    options: dict[str, Any] = {"max_snapshots": 5, "kv_cache_bytes": 30_000_000}
    runner = ModelRunner.from_config(config, numerics=numerics, dtype="float32", device="cpu", **LIMITS, **options)
    plan = make_plan(config, numerics_for(config, numerics), torch.float32, *LIMITS.values(), **options)
    assert plan.caches == runner.pools.nbytes() <= 30_000_000
    assert required(plan.layout.capacity) >= LIMITS["max_model_len"]


@pytest.mark.parametrize("preset", ["tiny", "v4_flash", "v32"])
def test_a_budget_is_used_up(preset):
    """One page more of any group that grows with the tokens would not fit, or the groups hold what others cannot."""
    config = ModelConfig.from_preset(preset)
    numerics = numerics_for(config, "serving")
    least = make_plan(config, numerics, torch.bfloat16, 4096, 4, 512, kv_cache_bytes=1 << 50).layout
    for budget in (2 << 30, 3 << 30, 10 << 30):
        layout = make_plan(config, numerics, torch.bfloat16, 4096, 4, 512, kv_cache_bytes=budget).layout
        page = sum(pool.page_bytes for pool in layout.pools if pool.group in layout.growing)
        assert budget - page < layout.nbytes() <= budget
        assert 4096 <= required(layout.capacity) < required(least.capacity)


def test_a_budget_for_less_than_one_sequence_is_refused():
    config = ModelConfig.from_preset("v4_flash")
    arguments = (config, PRESETS["serving"], torch.bfloat16, 65536, 8, 2048)
    message = r"kv_cache_bytes=1000 is too little: .* take (\d+) bytes; raise kv_cache_bytes, or"
    with pytest.raises(ValueError, match=message) as error:
        make_plan(*arguments, kv_cache_bytes=1000)
    least = int(required(re.search(r"take (\d+) bytes", str(error.value)))[1])
    plan = make_plan(*arguments, kv_cache_bytes=least)
    assert plan.caches <= least
    assert required(plan.layout.capacity) >= 65536
    with pytest.raises(ValueError, match="too little"):
        make_plan(*arguments, kv_cache_bytes=least - 1)


def test_snapshots_cost_what_the_plan_says():
    config = ModelConfig.from_preset("v4_flash")
    plans = [
        make_plan(config, PRESETS["serving"], torch.bfloat16, 8192, 2, 2048, max_snapshots=count) for count in (0, 7)
    ]
    assert plans[1].caches - plans[0].caches == plans[1].snapshots - plans[0].snapshots
    assert plans[0].snapshots == 0
    assert plans[1].snapshots / 7 < 6e6  # a ring page alone would be 16 MB


def test_fixed_and_marginal_parts_add_up():
    """A sequence that fills whole pages costs its fixed part plus the marginal bytes of its tokens."""
    config = ModelConfig.from_preset("v4_flash")
    tokens = 8192  # a whole number of pages for C4A (256 tokens) and C128A (4096 tokens)
    one, two = (make_plan(config, PRESETS["serving"], torch.bfloat16, tokens, count, 2048) for count in (1, 2))
    assert two.caches - one.caches == one.fixed + one.per_token * tokens
    assert one.caches == one.shared + one.fixed + one.per_token * tokens


def test_flash_marginal_bytes_by_hand():
    """C4A: a 64-entry page of 37440 B and an index page of 8640 B per 256 tokens; C128A: 19008 B per 4096 tokens."""
    plan = make_plan(ModelConfig.from_preset("v4_flash"), PRESETS["serving"], torch.bfloat16, 8192, 1, 2048)
    by_kind = {layer.kind: layer.per_token for layer in plan.layers}
    assert by_kind == {"SWA": 0.0, "C4A": (37440 + 8640) / 256, "C128A": -(-32 * 584 // 576) * 576 / 4096}
    assert plan.per_token == 21 * by_kind["C4A"] + 20 * by_kind["C128A"]
    assert sum(layer.index_per_token for layer in plan.layers) == 21 * 8640 / 256


@exhaustive_on_cpu
def test_what_fits_is_the_most_that_fits():
    config = ModelConfig.from_preset("v4_flash")

    def plan_for(max_model_len, max_num_seqs):
        return make_plan(config, PRESETS["serving"], torch.bfloat16, max_model_len, max_num_seqs, 2048)

    memory = 7 * 10**9
    count = sequences_that_fit(plan_for, memory, 65536)
    assert count > 1
    assert plan_for(65536, count).total <= memory < plan_for(65536, count + 1).total
    length = tokens_that_fit(plan_for, memory, 5, config.max_position_embeddings)
    assert plan_for(length, 5).total <= memory < plan_for(length + 1, 5).total
    assert sequences_that_fit(plan_for, 10**6, 65536) == 0


BESIDE = [lambda n: 0, lambda n: 10**9 + 3 * 10**6 * n, lambda n: 4 * 10**8 * n.bit_length()]


@pytest.mark.parametrize("beside", tiered(BESIDE, BESIDE[1:2]))
def test_what_fits_beside_other_parts_fits_and_is_the_most_to_a_percent(beside):
    config, memory = ModelConfig.from_preset("v4_flash"), 7 * 10**9
    totals = []

    def plan_for(max_model_len, max_num_seqs):
        return make_plan(config, PRESETS["serving"], torch.bfloat16, max_model_len, max_num_seqs, 2048)

    def total_for(max_model_len, max_num_seqs):
        totals.append(max_num_seqs)
        return plan_for(max_model_len, max_num_seqs).caches + beside(max_num_seqs)

    count = sequences_that_fit(plan_for, memory, 1024, total_for=total_for)
    assert len(totals) < 20
    assert count > 100 or beside(200) > memory / 2
    assert total_for(1024, count) <= memory < total_for(1024, count + count // 100 + 1)
    length = tokens_that_fit(plan_for, memory, 5, 10**6, lambda length, _: total_for(length, 5))
    assert total_for(length, 5) <= memory
    assert sequences_that_fit(plan_for, 10**6, 1024, total_for=total_for) == 0


@exhaustive_on_cpu
@pytest.mark.parametrize("last", tiered([1, 4999, 70_000], [4999]))
def test_a_step_of_what_is_beside_is_found_in_few_tries(last):
    """Memory of an allocator grows by segments: between two of them it is the same for many lengths."""
    lengths = []

    def plan_for(max_model_len, max_num_seqs):
        config, limits = ModelConfig.from_preset("tiny"), (max_model_len, max_num_seqs, 2048)
        return make_plan(config, PRESETS["serving"], torch.bfloat16, *limits)

    def total_for(max_model_len, max_num_seqs):
        lengths.append(max_model_len)
        return plan_for(max_model_len, max_num_seqs).caches + (10**12 if max_model_len > last else 10**6)

    found = tokens_that_fit(plan_for, 7 * 10**9, 1, 10**6, total_for)
    assert found <= last <= found + found // 100
    assert len(lengths) <= 40


def test_million_tokens_keep_index_scores_bounded():
    plan = make_plan(ModelConfig.from_preset("v4_pro"), PRESETS["serving"], torch.bfloat16, 1 << 20, 1, 8192)
    assert plan.index_logits <= 64 << 20


@pytest.mark.parametrize(
    "attention", [AttentionOptions(fp8_mode="mixed"), AttentionOptions(prefill_workspace_rows=2500)]
)
@pytest.mark.parametrize("preset", tiered(["tiny", "tiny_v32"], ["tiny_v32"]))
def test_options_of_attention_change_the_workspace_as_in_a_runner(preset, attention):
    config, sizes = ModelConfig.from_preset(preset), (1000, 3, 128)
    plan = make_plan(config, PRESETS["exact"], torch.float32, *sizes, attention=attention)
    runner = ModelRunner.from_config(
        config, device="cpu", max_model_len=1000, max_num_seqs=3, max_num_batched_tokens=128,
        fp8_mode=attention.fp8_mode, prefill_workspace_rows=attention.prefill_workspace_rows,
    )  # fmt: skip
    assert plan.workspace == runner.workspace.nbytes() + 128 * required(config.index_topk) * 4
    if attention.fp8_mode == "auto" and preset == "tiny":
        assert runner.workspace.nbytes() == aligned_bytes((2500, config.head_dim), torch.float32)
