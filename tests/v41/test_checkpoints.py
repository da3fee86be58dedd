"""Checkpoints of DeepSeek-V4.1: names and formats, what is left out, partial loads, and caches of a plan."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.checkpoint.selection import CONFIDENCE, OTHER_LAYERS, VISION
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.planner import make_plan
from tests.checkpoint.fabricate import MemorySource
from tests.support.small_models import prompt
from tests.support.tiers import tiered
from tests.support.typed import of_type
from tests.support.v41_cases import make_runner, tiny


def test_published_names_and_formats():
    """All of the 96085 published tensors but 43 bias_vl, the confidence head of the drafter and the vision part."""
    entries = RandomSource(ModelConfig.from_preset("v41_flash")).entries()
    assert len(entries) == 96085 - 43 - 1 - 266
    expected = {
        "layers.0.attn.wq_b.weight": ("F8_E4M3", (32768, 1280)),
        "layers.0.attn.wq_b.scale": ("F8_E8M0", (1024, 40)),
        "layers.2.attn.compressor.wgate.weight": ("BF16", (512, 5120)),
        "layers.2.attn.indexer.wk.weight": ("BF16", (128, 512)),
        "layers.20.attn.compressor.norm.weight": ("BF16", (512,)),
        "layers.36.attn.indexer.wq_b.scale": ("F8_E8M0", (128, 40)),
        "layers.36.attn.indexer.weights_proj.weight": ("BF16", (32, 5120)),
        "layers.39.ffn.experts.383.w2.weight": ("I8", (5120, 1152)),
        "layers.39.ffn.experts.383.w2.scale": ("F8_E8M0", (5120, 72)),
        "layers.39.ffn.shared_experts.w1.scale": ("F8_E8M0", (72, 160)),
        "layers.14.engram.embed.weight": ("F8_E4M3", (384016682, 256)),
        "layers.14.engram.embed.scale": ("F8_E8M0", (384016682, 8)),
        "layers.14.engram.wkv.scale": ("F8_E8M0", (800, 192)),
        "layers.1.engram.q_weight": ("BF16", (4, 5120)),
        "mtp.0.main_proj.scale": ("F8_E8M0", (160, 480)),
        "mtp.1.ffn.experts.127.w1.weight": ("I8", (2304, 2560)),
        "mtp.2.markov_head.embed.weight": ("BF16", (129280, 256)),
    }
    assert {name: (entries[name].dtype, entries[name].shape) for name in expected} == expected
    for absent in ("20.attn.compressor.wgate", "24.attn.indexer.wk", "24.attn.compressor.wkv", "3.attn.indexer.wq_b"):
        assert f"layers.{absent}.weight" not in entries
    assert not any(name.startswith("hc_head") or ".ape" in name for name in entries)


def test_a_written_checkpoint_and_what_is_left_out(tmp_path):
    config = tiny()
    made = RandomSource(config, 4)
    source = MemorySource.of(made)
    confidence, biases = "mtp.2.confidence_head.proj.weight", ("layers.3.ffn.gate.bias_vl", "mtp.0.ffn.gate.bias_vl")
    vision = ("vision.norm.weight", "aligner.w2.bias", "image_newline", *biases)
    for name in (confidence, *vision):
        source.put(name, "BF16", torch.zeros(4, dtype=torch.bfloat16))
    path = write_checkpoint(source, config, tmp_path / "model", num_shards=3)
    options = {"device": "cpu", "max_model_len": 100, "progress": False}
    runner = ModelRunner.from_pretrained(path, **options)
    assert runner.config == config
    assert {rule: set(names) for rule, names in runner.report.ignored.items()} == {
        CONFIDENCE: {confidence}, VISION: set(vision),
    }  # fmt: skip
    assert len(runner.report.loaded) + len(runner.report.by_row) == len(made.entries())
    tokens = prompt(config, 60)
    assert torch.equal(runner.score([tokens])[0], make_runner(config, made).score([tokens])[0])
    assert runner.has_mtp
    part = ModelRunner.from_pretrained(path, layers=[4, 6], attention_only=True, **options)
    assert set(part.report.loaded) == {
        name for name in made.entries()
        if name.startswith(("layers.4.attn.", "layers.6.attn.", "layers.4.attn_norm", "layers.6.attn_norm"))
    }  # fmt: skip
    assert len(part.report.ignored[OTHER_LAYERS]) > 100
    assert torch.equal(part.model.layers["4"].attn.wq_b.weight, runner.model.layers["4"].attn.wq_b.weight)


def test_blocks_of_128_are_refused():
    made = RandomSource(tiny(engram_layer_ids=None), 4)
    source = MemorySource.of(made)
    source.put("layers.0.attn.wq_b.scale", "F8_E8M0", torch.full((1, 1), 127, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"layers.0.attn.wq_b.scale is \[1, 1\], expected \[12, 1\]"):
        make_runner(of_type(made.config, DeepseekV41Config), source)


PER_ENTRY = [("exact", 1280), ("official", 288 + 68), ("serving", 584 + 132)]


@pytest.mark.parametrize(("numerics", "entry"), tiered(PER_ENTRY, PER_ENTRY[2:], quick_on_gpu=PER_ENTRY[:2]))
def test_plans_count_shared_caches_once(numerics, entry):
    """Three groups of layers with an entry and an index key per pair of tokens, and one with one per token."""
    config = ModelConfig.from_preset("v41_flash")
    plan = make_plan(config, numerics_for(config, numerics), torch.bfloat16, 8192, 2, 256)
    assert plan.per_token == pytest.approx(2.5 * entry, rel=0.02)  # pages are padded
    assert [layer.name for layer in plan.layers if layer.per_token] == [f"layers.{i}" for i in (2, 8, 14, 20)]
    config = tiny(moe_intermediate_size=128, hidden_size=128, q_lora_rank=128, num_attention_heads=8, o_lora_rank=64)
    config = config.replace(engram_layer_ids=None)
    runner = make_runner(config, numerics=numerics)
    plan = make_plan(config, runner.numerics, torch.float32, 320, 16, 2048)
    assert plan.caches == runner.pools.nbytes()
    assert {pool.spec.kind for pool in runner.pools} == {"window", "compressed", "index", "state"}
    assert {pool.spec.layer for pool in runner.pools if pool.spec.kind == "state"} == {"layers.1"}
