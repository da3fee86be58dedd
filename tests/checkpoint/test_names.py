"""Every spelling of a tensor name leads to the published one."""

import pytest
import torch

from deepseek_attn.checkpoint import CanonicalSource, RandomSource, canonical_name, hf_name, hf_state_dict, read_float32
from deepseek_attn.checkpoint.source import TensorInfo
from tests.checkpoint.fabricate import MemorySource, hf_packed, random_source, same_bits, tiny

PAIRS = [
    ("embed.weight", "model.embed_tokens.weight"),
    ("head.weight", "lm_head.weight"),
    ("norm.weight", "model.norm.weight"),
    ("hc_head_fn", "model.hc_head.hc_fn"),
    ("hc_head_base", "model.hc_head.hc_base"),
    ("hc_head_scale", "model.hc_head.hc_scale"),
    ("layers.7.attn_norm.weight", "model.layers.7.input_layernorm.weight"),
    ("layers.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
    ("layers.7.hc_attn_fn", "model.layers.7.attn_hc.fn"),
    ("layers.7.hc_attn_base", "model.layers.7.attn_hc.base"),
    ("layers.7.hc_attn_scale", "model.layers.7.attn_hc.scale"),
    ("layers.7.hc_ffn_fn", "model.layers.7.ffn_hc.fn"),
    ("layers.7.hc_ffn_base", "model.layers.7.ffn_hc.base"),
    ("layers.7.hc_ffn_scale", "model.layers.7.ffn_hc.scale"),
    ("layers.7.attn.wq_a.weight", "model.layers.7.self_attn.q_a_proj.weight"),
    ("layers.7.attn.wq_a.scale", "model.layers.7.self_attn.q_a_proj.weight_scale_inv"),
    ("layers.7.attn.q_norm.weight", "model.layers.7.self_attn.q_a_norm.weight"),
    ("layers.7.attn.wq_b.weight", "model.layers.7.self_attn.q_b_proj.weight"),
    ("layers.7.attn.wkv.weight", "model.layers.7.self_attn.kv_proj.weight"),
    ("layers.7.attn.kv_norm.weight", "model.layers.7.self_attn.kv_norm.weight"),
    ("layers.7.attn.wo_a.weight", "model.layers.7.self_attn.o_a_proj.weight"),
    ("layers.7.attn.wo_b.scale", "model.layers.7.self_attn.o_b_proj.weight_scale_inv"),
    ("layers.7.attn.attn_sink", "model.layers.7.self_attn.sinks"),
    ("layers.7.attn.compressor.wkv.weight", "model.layers.7.self_attn.compressor.kv_proj.weight"),
    ("layers.7.attn.compressor.wgate.weight", "model.layers.7.self_attn.compressor.gate_proj.weight"),
    ("layers.7.attn.compressor.ape", "model.layers.7.self_attn.compressor.position_bias"),
    ("layers.7.attn.compressor.norm.weight", "model.layers.7.self_attn.compressor.kv_norm.weight"),
    ("layers.7.attn.indexer.wq_b.weight", "model.layers.7.self_attn.compressor.indexer.q_b_proj.weight"),
    ("layers.7.attn.indexer.wq_b.scale", "model.layers.7.self_attn.compressor.indexer.q_b_proj.weight_scale_inv"),
    (
        "layers.7.attn.indexer.weights_proj.weight",
        "model.layers.7.self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    ("layers.7.attn.indexer.compressor.wkv.weight", "model.layers.7.self_attn.compressor.indexer.kv_proj.weight"),
    ("layers.7.attn.indexer.compressor.wgate.weight", "model.layers.7.self_attn.compressor.indexer.gate_proj.weight"),
    ("layers.7.attn.indexer.compressor.ape", "model.layers.7.self_attn.compressor.indexer.position_bias"),
    ("layers.7.attn.indexer.compressor.norm.weight", "model.layers.7.self_attn.compressor.indexer.kv_norm.weight"),
    ("layers.7.ffn.gate.weight", "model.layers.7.mlp.gate.weight"),
    ("layers.7.ffn.gate.bias", "model.layers.7.mlp.gate.e_score_correction_bias"),
    ("layers.7.ffn.gate.tid2eid", "model.layers.7.mlp.gate.tid2eid"),
    ("layers.7.ffn.shared_experts.w1.weight", "model.layers.7.mlp.shared_experts.gate_proj.weight"),
    ("layers.7.ffn.shared_experts.w2.weight", "model.layers.7.mlp.shared_experts.down_proj.weight"),
    ("layers.7.ffn.shared_experts.w3.scale", "model.layers.7.mlp.shared_experts.up_proj.weight_scale_inv"),
]
TOLERATED = [
    ("model.layers.2.attn.wq_a.weight", "layers.2.attn.wq_a.weight"),
    ("layers.2.self_attn.wq_a.weight_scale_inv", "layers.2.attn.wq_a.scale"),
    ("model.layers.2.mlp.experts.11.w1.weight_scale_inv", "layers.2.ffn.experts.11.w1.scale"),
    ("layers.2.mlp.gate.e_score_correction_bias", "layers.2.ffn.gate.bias"),
    ("model.mtp.0.self_attn.wkv.weight", "mtp.0.attn.wkv.weight"),
    ("model.hc_head_fn", "hc_head_fn"),
    ("something.else", "something.else"),
]


@pytest.mark.parametrize(("published", "other"), PAIRS, ids=[published for published, _ in PAIRS])
def test_transformers_names_both_ways(published, other):
    assert hf_name(published) == other
    assert canonical_name(other) == published
    assert canonical_name(published) == published


@pytest.mark.parametrize(("name", "published"), TOLERATED, ids=[name for name, _ in TOLERATED])
def test_tolerated_spellings(name, published):
    assert canonical_name(name) == published


def test_every_name_of_a_model_round_trips():
    names = list(RandomSource(tiny()).entries())
    spellings = [hf_name(name) for name in names]
    assert [canonical_name(name) for name in spellings] == names
    assert [canonical_name(f"model.{name}") for name in names] == names
    assert len(set(spellings)) == len(names)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", "bf16"])
def test_packed_experts_appear_one_by_one(expert_dtype):
    source = random_source(expert_dtype=expert_dtype)
    packed = CanonicalSource(hf_packed(source))
    expected = {name: info for name, info in source.entries().items() if not name.startswith("mtp.")}
    assert packed.entries() == expected
    assert all(same_bits(packed.read(name), source.read(name)) for name in expected)


def test_packed_experts_of_a_wrong_shape():
    source = MemorySource({})
    source.put("model.layers.0.mlp.experts.gate_up_proj", "BF16", torch.zeros(2, 5, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \[2, 5, 4\]: packed experts are"):
        CanonicalSource(source)


def test_two_spellings_of_one_tensor():
    info = TensorInfo("BF16", (4,), 8)
    source = MemorySource({"norm.weight": (info, None), "model.norm.weight": (info, None)})
    with pytest.raises(ValueError, match=r"norm.weight and model.norm.weight are both norm.weight"):
        CanonicalSource(source)


@pytest.mark.filterwarnings("ignore")
def test_state_dict_fits_transformers():
    transformers = pytest.importorskip("transformers.models.deepseek_v4")
    config = tiny()
    raw = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**raw))
    source = RandomSource(config)
    state = hf_state_dict(source)
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in model.state_dict().items()}
    gate_up = state["model.layers.1.mlp.experts.gate_up_proj"]
    expected = [read_float32(source, f"layers.1.ffn.experts.2.{w}.weight") for w in ("w1", "w3")]
    assert torch.equal(gate_up[2], torch.cat(expected))
