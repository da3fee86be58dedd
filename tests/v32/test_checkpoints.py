"""Checkpoints of DeepSeek-V3.2 and V3: names, formats, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource, SafetensorsSource, write_checkpoint
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.oracle_v32 import Tensors, TransformersV32Oracle, float32_weights, pack_experts
from tests.support.small_models import prompt
from tests.support.tiers import exhaustive_on_cpu
from tests.support.typed import of_type
from tests.support.v32_cases import make_runner, small


@pytest.fixture(params=["deepseek_v32", "deepseek_v3"])
def model_type(request) -> str:
    return request.param


def test_checkpoints_round_trip(tmp_path, model_type):
    config = small(model_type, num_nextn_predict_layers=1, vocab_size=300)
    path = write_checkpoint(RandomSource(config, 4), config, tmp_path / "ckpt", num_shards=3)
    runner = ModelRunner.from_pretrained(path, device="cpu", max_model_len=640, progress=False)
    assert runner.config == config
    assert runner.report.mtp_loaded
    assert {rule: len(names) for rule, names in runner.report.ignored.items()} == {
        "mtp.*emb* / mtp.*head.weight copies": 2
    }
    tokens = prompt(config, 50)
    made = ModelRunner.from_config(config, seed=4, device="cpu", max_model_len=640)
    for a, b in zip(runner.score_mtp([tokens]), made.score_mtp([tokens]), strict=True):
        assert torch.equal(a[0], b[0])


def test_published_names_and_formats():
    config = ModelConfig.from_preset("v32")
    entries = RandomSource(config, 0).entries()
    assert len(entries) == 3 * 27 + 58 * 1565 + 1571 + 3
    expected = {
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("F8_E4M3", (576, 7168)),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": ("F32", (5, 56)),
        "model.layers.60.self_attn.kv_b_proj.weight_scale_inv": ("F32", (256, 4)),
        "model.layers.60.self_attn.indexer.wk.weight_scale_inv": ("F32", (1, 56)),
        "model.layers.61.self_attn.indexer.k_norm.bias": ("F32", (128,)),
        "model.layers.61.self_attn.indexer.weights_proj.weight": ("BF16", (64, 7168)),
        "model.layers.2.mlp.down_proj.weight": ("F8_E4M3", (7168, 18432)),
        "model.layers.3.mlp.gate.e_score_correction_bias": ("F32", (256,)),
        "model.layers.3.mlp.experts.255.up_proj.weight": ("F8_E4M3", (2048, 7168)),
        "model.layers.3.mlp.shared_experts.gate_proj.weight_scale_inv": ("F32", (16, 56)),
        "model.layers.61.eh_proj.weight": ("BF16", (7168, 14336)),
        "model.layers.61.shared_head.norm.weight": ("BF16", (7168,)),
        "model.layers.61.shared_head.head.weight": ("BF16", (129280, 7168)),
        "lm_head.weight": ("BF16", (129280, 7168)),
    }
    assert {name: (entries[name].dtype, entries[name].shape) for name in expected} == expected


def test_what_transformers_saves_loads_equally(tmp_path):
    """Packed experts, float32, no MTP layer, and transformers' own config.json."""
    config = small(num_nextn_predict_layers=1)
    source = RandomSource(config, 0)
    hf = TransformersV32Oracle(config, source)
    hf.model.save_pretrained(tmp_path / "hf")
    loaded = ModelRunner.from_pretrained(tmp_path / "hf", device="cpu", max_model_len=640, progress=False)
    packed = Tensors(pack_experts(float32_weights(source), config))
    tokens = prompt(config, 60)
    expected = make_runner(config, source).score([tokens])[0]
    for runner in (loaded, make_runner(config, packed)):
        assert not runner.has_mtp
        assert torch.equal(runner.score([tokens])[0], expected)


def test_scales_in_other_formats_load_equally():
    """``weight_scale_inv`` as e8m0 bytes or bf16; powers of two are exact in both."""
    config = small()
    source = RandomSource(config, 0)
    tensors = {name: source.read(name) for name in source.entries()}
    tokens = prompt(config, 60)
    expected = make_runner(config, Tensors(tensors)).score([tokens])[0]
    for convert in (lambda s: (s.log2() + 127).to(torch.uint8), torch.Tensor.bfloat16):
        other = {n: convert(t) if n.endswith("_scale_inv") else t for n, t in tensors.items()}
        assert torch.equal(make_runner(config, Tensors(other)).score([tokens])[0], expected)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("model.layers.1.self_attn.kv_b_proj.weight_scale_inv", r"missing scales \(1\): layers\.1\.attn\.wkv_b\."),
        (
            "model.layers.0.self_attn.indexer.k_norm.bias",
            r"missing tensors \(1\): layers\.0\.attn\.indexer\.k_norm",
        ),
        ("model.layers.1.mlp.gate.e_score_correction_bias", r"missing tensors \(1\): layers\.1\.ffn\.gate\.bias"),
    ],
)
def test_a_missing_tensor_is_named(drop, message):
    config = small()
    with pytest.raises(ValueError, match=message):
        make_runner(config, Tensors.of(RandomSource(config, 0), drop))


def test_models_and_checkpoints_of_different_kinds():
    """A V3 checkpoint has no indexer for a V3.2 config; a V3.2 checkpoint has one too many for a V3 config."""
    v32, v3 = small(), small("deepseek_v3")
    with pytest.raises(ValueError, match=r"missing tensors \(10\): layers\.0\.attn\.indexer\.wq_b\.weight"):
        make_runner(v32, RandomSource(v3, 0))
    with pytest.raises(ValueError, match=r"does not have \(14\).*\(stored as model\.layers\.0\.self_attn\.indexer"):
        make_runner(v3, RandomSource(v32, 0))


def test_a_layer_past_the_last_is_no_decoder_layer():
    """``model.layers.{num_hidden_layers}`` is the MTP layer: never one more block, and ignored where there is none."""
    config = small(num_nextn_predict_layers=1)
    source = RandomSource(config, 0)
    runner = make_runner(config.replace(num_nextn_predict_layers=0), source)
    assert list(runner.model.layers) == ["0", "1"]
    ignored = [name for names in runner.report.ignored.values() for name in names]
    assert ignored
    assert all(name.startswith("mtp.0.") for name in ignored)
    tokens = prompt(config, 30)
    assert torch.equal(runner.score([tokens])[0], make_runner(config, source).score([tokens])[0])


def test_some_layers_or_their_attention_only():
    config = small(num_nextn_predict_layers=1)
    source = RandomSource(config, 0)
    runner = make_runner(config, source, layers=[1])
    assert list(runner.model.layers) == ["1"]
    assert {pool.spec.layer for pool in runner.pools} == {"layers.1"}
    assert runner.score([prompt(config, 20)])[0].isfinite().all()
    runner = make_runner(config, source, layers=[0], attention_only=True)
    assert runner.report.loaded
    assert all(name.startswith("layers.0.attn") for name in runner.report.loaded)


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match=r"unknown backend 'tritonn': supported are auto, .*flashinfer"):
        make_runner(small(), backend="tritonn")


def test_safetensors_source_reads_published_scales(tmp_path):
    config = small(vocab_size=300)
    source = RandomSource(config, 0)
    with SafetensorsSource(write_checkpoint(source, config, tmp_path / "ckpt")) as stored:
        assert stored.entries().keys() == source.entries().keys()
        for name in source.entries():
            assert torch.equal(stored.read(name).view(torch.uint8), source.read(name).view(torch.uint8)), name


@exhaustive_on_cpu
def test_what_transformers_saves_loads(tmp_path):
    config = of_type(ModelConfig.from_preset("tiny_v32"), DeepseekV32Config)
    oracle = TransformersV32Oracle(config, RandomSource(config, seed=0))
    oracle.model.save_pretrained(tmp_path)
    runner = ModelRunner.from_pretrained(tmp_path, device="cpu", progress=False)
    prompt = torch.randint(config.vocab_size, (77,)).tolist()
    expected = oracle(prompt)
    assert (runner.score([prompt])[0] - expected).abs().max() <= 1e-4 * expected.abs().max()
