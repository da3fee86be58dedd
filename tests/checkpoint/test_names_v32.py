"""Names of DeepSeek-V3 and V3.2 tensors: the checkpoint's, which are transformers', and the model's."""

import pytest

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.names_v32 import canonical_name_v32, published_name_v32
from deepseek_attn.config.model import ModelConfig


@pytest.mark.parametrize(
    ("published", "ours"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.layers.0.input_layernorm.weight", "layers.0.attn_norm.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "layers.0.ffn_norm.weight"),
        ("model.layers.0.self_attn.q_a_proj.weight", "layers.0.attn.wq_a.weight"),
        ("model.layers.0.self_attn.q_a_layernorm.weight", "layers.0.attn.q_norm.weight"),
        ("model.layers.0.self_attn.q_b_proj.weight_scale_inv", "layers.0.attn.wq_b.scale"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "layers.0.attn.wkv_a.weight"),
        ("model.layers.0.self_attn.kv_a_layernorm.weight", "layers.0.attn.kv_norm.weight"),
        ("model.layers.0.self_attn.kv_b_proj.weight_scale_inv", "layers.0.attn.wkv_b.scale"),
        ("model.layers.0.self_attn.o_proj.weight", "layers.0.attn.wo.weight"),
        ("model.layers.0.self_attn.indexer.wq_b.weight_scale_inv", "layers.0.attn.indexer.wq_b.scale"),
        ("model.layers.0.self_attn.indexer.wk.weight", "layers.0.attn.indexer.wk.weight"),
        ("model.layers.0.self_attn.indexer.k_norm.bias", "layers.0.attn.indexer.k_norm.bias"),
        ("model.layers.0.mlp.gate_proj.weight", "layers.0.ffn.w1.weight"),
        ("model.layers.3.mlp.gate.weight", "layers.3.ffn.gate.weight"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
        ("model.layers.3.mlp.experts.7.down_proj.weight_scale_inv", "layers.3.ffn.experts.7.w2.scale"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "layers.3.ffn.shared_experts.w3.weight"),
        ("model.layers.61.self_attn.o_proj.weight", "mtp.0.attn.wo.weight"),
        ("model.layers.61.eh_proj.weight", "mtp.0.eh_proj.weight"),
        ("model.layers.61.enorm.weight", "mtp.0.enorm.weight"),
        ("model.layers.61.shared_head.norm.weight", "mtp.0.norm.weight"),
        ("model.layers.62.hnorm.weight", "mtp.1.hnorm.weight"),
    ],
)
def test_each_name_both_ways(published, ours):
    assert canonical_name_v32(published, 61) == ours
    assert canonical_name_v32(published.removeprefix("model."), 61) == ours
    assert canonical_name_v32(ours, 61) == ours
    assert published_name_v32(ours, 61) == published


def test_packed_experts_of_transformers():
    name = "model.layers.3.mlp.experts.gate_up_proj"
    assert canonical_name_v32(name, 61) == "layers.3.ffn.experts.gate_up_proj"
    assert canonical_name_v32(f"{name}_scale_inv", 61) == "layers.3.ffn.experts.gate_up_proj.scale"
    assert canonical_name_v32("model.layers.3.mlp.experts.down_proj_scale_inv", 61) == "layers.3.ffn.experts.w2.scale"


def test_copies_are_seen_as_copies():
    """Of the embedding and the head, in the MTP layer: the loader's rule for ``mtp.*`` copies names them."""
    source = RandomSource(ModelConfig.from_preset("tiny_v32"), 0)
    for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        name = f"model.layers.4.{copy}.weight"
        assert source.read(name).equal(source.read(f"{original}.weight"))
        assert canonical_name_v32(name, 4).startswith("mtp.0.")


@pytest.mark.parametrize(("name", "changes"), [("v32", {"n_routed_experts": 16}), ("tiny_v32", {})])
def test_every_name_of_a_checkpoint_round_trips(name, changes):
    config = ModelConfig.from_preset(name).replace(**changes)
    layers, copies = config.num_hidden_layers, 0
    seen = set()
    for published in RandomSource(config, 0).entries():
        ours = canonical_name_v32(published, layers)
        seen.add(ours)
        if "embed" in ours and ours.startswith("mtp."):
            copies += 1
            continue
        assert published_name_v32(ours, layers) == published
    assert len(seen) == len(RandomSource(config, 0).entries())
    assert copies == 1
