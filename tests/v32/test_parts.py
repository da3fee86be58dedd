"""Parts of DeepSeek-V3.2 alone: half-split rotation, group-limited routing, layer norm, cache layout, plan."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass

import pytest
import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.attention.decode_builder import build_decode_metadata
from deepseek_attn.cache.layout import make_layout
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig, RopeSpec
from deepseek_attn.config.numerics import get_numerics, numerics_for
from deepseek_attn.kernels.common.norm_rope import apply_rope_half_split
from deepseek_attn.layers.rope import RotaryTable, apply_rope
from deepseek_attn.layers.weights import checkpoint_slots
from deepseek_attn.models.moe import GroupLimitedGate
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.planner import make_plan
from deepseek_attn.v32.backends import FlashMLASparseMetadata, FlashMLASparseMetadataBuilder
from tests.support.decode_batches import decode_batch
from tests.support.typed import untyped

SPEC = RopeSpec(10000.0, 8)


@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 20), (0, 3, 20)], ids=str)
def test_half_split_rotates_the_first_channels(shape):
    x, table = torch.randn(shape), RotaryTable(SPEC, 50)
    positions = torch.tensor([0, 7, 7, 49, 3])[: shape[0]]
    out = apply_rope_half_split(x, table.at(positions))
    for t, position in enumerate(positions.tolist()):
        for i in range(4):
            angle = position * 10000.0 ** (-i / 4)
            a, b = x[t, ..., i], x[t, ..., i + 4]
            torch.testing.assert_close(out[t, ..., i], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(out[t, ..., i + 4], b * math.cos(angle) + a * math.sin(angle))
    assert torch.equal(out[..., 8:], x[..., 8:])


def test_half_split_is_the_interleaved_rotation_of_permuted_channels():
    x, freqs_cis = torch.randn(6, 8), RotaryTable(SPEC, 50).at(torch.arange(6))
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    torch.testing.assert_close(apply_rope_half_split(x, freqs_cis)[:, order], apply_rope(x[:, order], freqs_cis))


def test_half_split_keeps_bfloat16():
    x, freqs_cis = torch.randn(6, 2, 16).bfloat16(), RotaryTable(SPEC, 50).at(torch.arange(6))
    out = apply_rope_half_split(x, freqs_cis)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rope_half_split(x.float(), freqs_cis).bfloat16())


def gate(bias: list[float], **changes) -> GroupLimitedGate:
    experts = len(bias)
    config = ModelConfig.from_preset("tiny_v32").replace(n_routed_experts=experts, hidden_size=experts, **changes)
    module = GroupLimitedGate(config, config.layers[-1])
    for slot, value in zip(
        untyped(checkpoint_slots(module)).values(), (torch.eye(experts), torch.tensor(bias)), strict=True
    ):
        slot.load(value)
    return module


def logits(scores: list[float]) -> torch.Tensor:
    return torch.tensor([scores]).logit()


def test_a_group_counts_as_its_two_best():
    """Group 1 has the best expert, group 0 the best pair, group 2 the best three."""
    scores = [0.6, 0.6, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1, 0.55, 0.55, 0.55, 0.55]
    experts, weights = gate([0.0] * 12, n_group=3, topk_group=1, num_experts_per_tok=2)(logits(scores), None)
    assert sorted(experts[0].tolist()) == [0, 1]
    torch.testing.assert_close(weights.sum(), torch.tensor(2.5))


def test_the_bias_chooses_and_does_not_weigh():
    scores = [0.2, 0.3, 0.6, 0.5]
    experts, weights = gate([1.0, 1.0, 0.0, 0.0], n_group=2, topk_group=1, num_experts_per_tok=2)(logits(scores), None)
    found = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert found == pytest.approx({0: 2.5 * 0.2 / 0.5, 1: 2.5 * 0.3 / 0.5})


def test_left_out_groups_stay_out_when_all_biased_scores_are_negative():
    scores = [0.5, 0.5, 0.2, 0.1, 0.3, 0.3, 0.3, 0.3]
    bias = [-3.0] * 4 + [-4.0] * 4
    experts, _ = gate(bias, n_group=2, topk_group=1, num_experts_per_tok=4)(logits(scores), None)
    assert sorted(experts[0].tolist()) == [0, 1, 2, 3]


def test_weights_without_normalisation():
    scores = [0.2, 0.3, 0.6, 0.5]
    module = gate([0.0] * 4, n_group=1, topk_group=1, num_experts_per_tok=2, norm_topk_prob=False)
    _, weights = module(logits(scores), None)
    torch.testing.assert_close(weights.sort().values, 2.5 * torch.tensor([[0.5, 0.6]]))


def test_token_layout():
    config = ModelConfig.from_preset("tiny_v32")
    layout = make_layout(config, get_numerics("serving"), torch.bfloat16, 130, 3, 64)
    assert layout.pages == {"tokens": 1 + 3 * 3}
    assert layout.spans == {"tokens": (64, 1)}
    assert (layout.ratios, layout.window) == ((), 0)
    assert [(p.layer, p.kind) for p in layout.pools[-2:]] == [("mtp.0", "latent"), ("mtp.0", "index")]
    assert {p.page_bytes for p in layout.pools if p.kind == "latent"} == {64 * (128 + 4 + 128)}
    dense = make_layout(config.replace(model_type="deepseek_v3"), get_numerics("exact"), torch.float32, 130, 3, 64)
    assert {p.kind for p in dense.pools} == {"latent"}
    assert {p.page_bytes for p in dense.pools} == {64 * 192 * 4}


def test_records_that_do_not_fit():
    config = ModelConfig.from_preset("tiny_v32").replace(kv_lora_rank=96, index_head_dim=16, qk_rope_head_dim=16)
    with pytest.raises(ValueError, match="does not fit this config") as error:
        make_layout(config, get_numerics("official"), torch.bfloat16, 100, 1, 10)
    assert "kv_lora_rank is 96" in str(error.value)
    assert "index_head_dim is 16" in str(error.value)


@pytest.mark.parametrize("numerics", ["exact", "official", "serving"])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v3"])
def test_a_plan_is_what_a_runner_allocates(model_type, numerics):
    config = ModelConfig.from_preset("tiny_v32").replace(model_type=model_type)
    plan = make_plan(config, numerics_for(config, numerics), torch.float32, 300, 3, 128)
    runner = ModelRunner.from_source(
        config, RandomSource(config, 0), device="cpu", numerics=numerics, max_model_len=300, max_num_seqs=3,
        max_num_batched_tokens=128, progress=False,
    )  # fmt: skip
    buffer = 0 if model_type == "deepseek_v3" else 128 * config.index_topk * 4
    assert plan.caches == runner.pools.nbytes()
    assert plan.workspace == runner.workspace.nbytes() + buffer
    assert plan.fixed == 0
    assert plan.per_token * 64 == sum(pool.spec.page_bytes for pool in runner.pools)


@pytest.mark.parametrize("mixed", [False, True])
def test_step_metadata(mixed):
    """Two decodes, then a longer request whose last token is padding."""
    config = ModelConfig.from_preset("tiny_v32")
    layout = make_layout(config, get_numerics("serving"), torch.bfloat16, 130, 3, 64)
    builder = FlashMLASparseMetadataBuilder(config.layers, layout, mixed=mixed)
    step = StepInput(
        query_lens=torch.tensor([1, 2, 4]),
        seq_lens=torch.tensor([70, 65, 6]),
        block_tables={"tokens": torch.tensor([[7, 3], [2, 9], [5, 0]], dtype=torch.int32)},
        token_valid=torch.tensor([True] * 6 + [False]),
        decode_threshold=2,
    )
    meta = builder.build(step)
    assert meta.positions.tolist() == [69, 63, 64, 2, 3, 4, 5]
    counts = meta.entry_counts(1, 16)
    assert counts.visible.tolist() == [70, 64, 65, 3, 4, 5, 0]
    assert counts.selected.tolist() == [16, 16, 16, 3, 4, 5, 0]
    assert set(meta.sparse) == {1}
    assert type(meta.sparse[1]) is FlashMLASparseMetadata
    slots = [3 * 64 + 5, 2 * 64 + 63, 9 * 64, 5 * 64 + 2, 5 * 64 + 3, 5 * 64 + 4, -1]
    assert meta.sparse[1].slot_mapping.tolist() == slots
    assert (meta.sparse[1].block_size, meta.swa, meta.compressor) == (64, None, {})
    assert (meta.num_decodes, meta.num_decode_tokens, meta.num_prefills) == ((3, 7, 0) if mixed else (2, 3, 1))
    assert meta.decode_query_len == 0
    assert {ratio: lens.tolist() for ratio, lens in meta.prefill_entry_lens.items()} == ({} if mixed else {1: [6]})


def test_decode_metadata_on_the_device_is_that_of_the_scheduled_batch():
    config = ModelConfig.from_preset("tiny_v32")
    layout = make_layout(config, get_numerics("serving"), torch.bfloat16, 130, 3, 64)
    table = {"tokens": torch.tensor([[7, 3], [2, 9]], dtype=torch.int32)}
    valid = torch.tensor([True, True, True, False])
    step = StepInput(torch.tensor([2, 2]), torch.tensor([70, 65]), table, valid, decode_threshold=2)
    expected = FlashMLASparseMetadataBuilder(config.layers, layout).build(step)
    batch = decode_batch(torch.tensor([68, 69, 63, 64]), valid, table, 70)
    assert_same_step(build_decode_metadata(config.layers, layout, batch), expected)
    assert expected.decode_query_len == 2


def assert_same_step(got, expected):
    for field in fields(expected):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if is_dataclass(b):
            assert_same_step(a, b)
        elif isinstance(b, dict) and b and is_dataclass(next(iter(b.values()))):
            assert a.keys() == b.keys()
            for key in b:
                assert type(a[key]) is type(b[key])
                assert_same_step(a[key], b[key])
        elif isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype, field.name
            assert torch.equal(a, b), field.name
        elif not isinstance(b, dict):
            assert a == b, field.name


def test_official_numerics_of_each_family():
    v32, v4 = ModelConfig.from_preset("v32"), ModelConfig.from_preset("v4_flash")
    assert numerics_for(v4, "official") == get_numerics("official")
    assert numerics_for(v32, "official").index_record == "fp8"
    assert numerics_for(v32, "exact") == get_numerics("exact")
    own = get_numerics("official")
    assert numerics_for(v32, own) is own
