"""DeepSeek-V3.2 and V3 configs: dispatch, both spellings, and every problem at once."""

import json
from importlib import resources

import pytest

from deepseek_attn.config.model import ModelConfig, RopeSpec
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec
from tests.support.typed import of_type

YARN = RopeSpec(10000.0, 64, 40.0, 128, 32.0, 1.0)


def raw_preset(name: str) -> dict:
    return json.loads(resources.files("deepseek_attn.configs").joinpath(f"{name}.json").read_text())


@pytest.fixture
def tiny() -> dict:
    return raw_preset("tiny_v32")


@pytest.fixture
def tiny_hf(tiny) -> dict:
    """The tiny preset as transformers spells it."""
    scaling = tiny.pop("rope_scaling")
    kind = scaling.pop("type")
    tiny["rope_parameters"] = {**scaling, "rope_type": kind, "rope_theta": tiny.pop("rope_theta")}
    for key in ("first_k_dense_replace", "moe_layer_freq", "scoring_func", "topk_method", "torch_dtype"):
        del tiny[key]
    tiny |= {"dtype": "bfloat16", "head_dim": 64, "qk_head_dim": 128, "mlp_bias": False, "use_cache": True}
    tiny["mlp_layer_types"] = ["dense"] * 2 + ["sparse"] * 2
    tiny["layer_types"] = ["indexed_attention"] * 4
    return tiny


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
def test_layer_types_of_transformers(tiny_hf, name):
    """transformers 5.24 writes the first name, 5.17 the second; one kind for all layers."""
    expected = ModelConfig.from_dict(tiny_hf)
    assert ModelConfig.from_dict(tiny_hf | {"layer_types": [name] * 4}) == expected
    (problem,) = problems_of(tiny_hf | {"layer_types": [name] * 3 + ["full_attention"]})
    assert "supported is 'indexed_attention' or 'deepseek_sparse_attention' for each of 4 layers" in problem


def problems_of(raw: dict) -> list[str]:
    with pytest.raises(ValueError, match=r"^invalid config \(dict\), ") as error:
        ModelConfig.from_dict(raw)
    head, *problems = str(error.value).split("\n  - ")
    assert head.endswith(f"{len(problems)} problem{'s' * (len(problems) != 1)}:")
    return problems


@pytest.mark.parametrize("name", ["v32", "tiny_v32"])
def test_presets_round_trip(name, tmp_path):
    config = ModelConfig.from_preset(name)
    assert isinstance(config, DeepseekV32Config)
    assert config.to_dict() == raw_preset(name)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert ModelConfig.from_pretrained(tmp_path) == config == ModelConfig.from_pretrained(name)
    assert hash(config) == hash(ModelConfig.from_preset(name))


def test_layers_of_tiny(tiny):
    config = ModelConfig.from_dict(tiny)
    assert config.layers == tuple(V32LayerSpec(i, i < 2, True, YARN) for i in range(4))
    assert config.mtp_layers == (V32LayerSpec(0, False, True, YARN, is_mtp=True),)
    assert [spec.name for spec in config.all_layers] == ["layers.0", "layers.1", "layers.2", "layers.3", "mtp.0"]
    assert {spec.kind for spec in config.all_layers} == {"DSA"}


def test_real_values():
    config = of_type(ModelConfig.from_preset("v32"), DeepseekV32Config)
    assert config.head_dim == 576
    assert config.qk_head_dim == 192
    assert config.softmax_scale == pytest.approx(0.1352338, rel=1e-6)
    assert [spec.dense_ffn for spec in config.layers] == [True] * 3 + [False] * 58
    assert config.eos_token_ids == (1,)


def test_v3_has_no_indexer(tiny):
    config = ModelConfig.from_dict(tiny).replace(model_type="deepseek_v3")
    assert not config.has_indexer
    assert (config.index_topk, config.index_n_heads, config.index_head_dim) == (None,) * 3
    assert {spec.kind for spec in config.all_layers} == {"MLA"}
    assert config.to_dict()["architectures"] == ["DeepseekV3ForCausalLM"]
    assert ModelConfig.from_dict(config.to_dict()) == config
    wrong = config.to_dict() | {"index_topk": 4}
    assert problems_of(wrong) == ["index_topk in a deepseek_v3 config: only deepseek_v32 has an indexer"]


def test_transformers_spelling(tiny, tiny_hf):
    assert ModelConfig.from_dict(tiny_hf) == ModelConfig.from_preset("tiny_v32")
    both = raw_preset("tiny_v32") | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}
    assert ModelConfig.from_dict(both) == ModelConfig.from_preset("tiny_v32")


def test_plain_rope_has_no_mscale(tiny):
    for scaling in (None, {"type": "default"}):
        config = ModelConfig.from_dict(tiny | {"rope_scaling": scaling})
        assert config.layers[0].rope == RopeSpec(10000.0, 64)
        assert config.softmax_scale == 128**-0.5


def test_scale_format(tiny):
    assert of_type(ModelConfig.from_dict(tiny), DeepseekV32Config).power_of_two_scales
    del tiny["quantization_config"]["scale_fmt"]
    config = of_type(ModelConfig.from_dict(tiny), DeepseekV32Config)
    assert not config.power_of_two_scales
    assert config.expert_dtype == "fp8"
    assert config.replace(quantization_config=None).expert_dtype is None


def test_replace(tiny):
    config = ModelConfig.from_dict(tiny)
    assert config.replace(num_attention_heads=2).to_dict()["num_key_value_heads"] == 2
    assert config.replace(num_hidden_layers=1).layers == config.layers[:1]
    assert config.replace(dtype="float32").dtype == "float32"
    with pytest.raises(ValueError, match="no such config keys: heads"):
        config.replace(heads=3)
    with pytest.raises(ValueError, match=r"deepseek_v32 with n_group changed"):
        config.replace(n_group=3)


def test_all_problems_at_once():
    raw = {"model_type": "deepseek_v32", "vocab_size": 0, "index_head_dim": 96, "qk_rope_head_dim": 127}
    problems = problems_of(raw)
    assert problems[0].startswith("missing required keys: hidden_size, intermediate_size,")
    assert "index_topk" in problems[0]
    assert len(problems) == 5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63: rotary channels come in pairs, expected an even number"),
        ({"qk_rope_head_dim": 130}, "qk_rope_head_dim 130 is above index_head_dim 128"),
        ({"index_head_dim": 96}, "index_head_dim 96 is not a power of two (Hadamard rotation)"),
        ({"n_group": 5, "topk_group": 5}, "n_routed_experts 16 in n_group 5: expected equal groups of two or more"),
        ({"n_group": 16}, "n_routed_experts 16 in n_group 16: expected equal groups of two or more"),
        ({"topk_group": 5}, "topk_group 5 is above n_group 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above the 8 experts of topk_group 2 groups"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1: supported is 4"),
        ({"q_lora_rank": None}, "missing required keys: q_lora_rank"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax': supported is 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy': supported is 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2: supported is 1"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave is True: supported is False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True: supported is False"),
        ({"eos_token_id": 512}, "eos_token_id 512 is outside the vocabulary of vocab_size 512"),
        ({"index_topk": 0}, "index_topk is 0: expected a positive integer"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1: expected an integer >= 0"),
        ({"mlp_layer_types": ["dense"] * 4}, "first_k_dense_replace is 2 but dense entries of mlp_layer_types is 4"),
        ({"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types is ['sparse', 'dense', 'sparse', 'dense']"),
        ({"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types is ['dense', 'dense']: expected 4 entries"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method is 'awq'"),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, "quantization_config.weight_block_size is [64, 64]"),
    ],
)  # fmt: skip
def test_each_problem(tiny, changes, problem):
    (found,) = problems_of(tiny | changes)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mscale": None}, "missing required keys: rope_scaling.mscale"),
        (
            {"mscale": None, "mscale_all_dim": None},
            "missing required keys: rope_scaling.mscale, rope_scaling.mscale_all",
        ),
        ({"mscale": 0.707}, "rope_scaling.mscale is 0.707 and mscale_all_dim 1.0: supported are equal values only"),
        ({"attention_factor": 1.37}, "rope_scaling.attention_factor is 1.37: DeepSeek does not scale cos and sin"),
        ({"type": "linear"}, "rope_scaling.type is 'linear': supported is 'yarn' or 'default'"),
    ],
)
def test_each_rope_problem(tiny, changes, problem):
    (found,) = problems_of(tiny | {"rope_scaling": tiny["rope_scaling"] | changes})
    assert found.startswith(problem)
