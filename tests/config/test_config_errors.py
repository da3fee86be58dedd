"""The errors of a wrong config: all problems at once, each with its value."""

import json

import pytest

from deepseek_attn.config.model import ModelConfig
from tests.support.config_cases import CSA, HCA, SWA, YARN, as_transformers, error_of, problems_of, raw_preset
from tests.support.typed import untyped


@pytest.fixture
def tiny() -> dict:
    return raw_preset("tiny")


@pytest.fixture
def tiny_hf(tiny) -> dict:
    return as_transformers(tiny)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "4096"}, "hidden_size is '4096': expected a positive integer"),
        ({"hidden_size": True}, "hidden_size is True: expected a positive integer"),
        ({"hidden_size": 256.0}, "hidden_size is 256.0: expected a positive integer"),
        ({"vocab_size": 0}, "vocab_size is 0: expected a positive integer"),
        ({"index_topk": -8}, "index_topk is -8: expected a positive integer"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1: expected an integer >= 0"),
        ({"hc_eps": float("nan")}, "hc_eps is nan: expected a positive number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0: expected a positive number"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4': expected a positive number"),
        (
            {"norm_topk_prob": False},
            "norm_topk_prob is False: supported is True (DeepSeek's code for this model always",
        ),
        ({"quantization": {"bits": 4}}, "quantization is {'bits': 4}: supported is None (weights quantised by MLX"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63: rotary channels come in pairs"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0: expected a positive integer"),
        ({"head_dim": 32}, "qk_rope_head_dim 64 is above head_dim 32"),
        (
            {"index_head_dim": 32},
            "qk_rope_head_dim 64 is above index_head_dim 32, and 2 layers (first: 1) have an indexer",
        ),
        ({"index_head_dim": 96}, "index_head_dim 96 is not a power of two (Hadamard rotation), and 2 layers"),
        ({"compress_ratios": [0, 4, -1, 4, 128, 0]}, "compress_ratios[2] is -1: expected an integer >= 0"),
        ({"compress_ratios": [0, 4, 128, 4, 128, 0, -1]}, "compress_ratios[6] is -1: expected an integer >= 0"),
        ({"compress_ratios": [0, True, 4, 4, 4, 0]}, "compress_ratios[1] is True: expected an integer >= 0"),
        ({"compress_ratios": [0, 4, 4.0, 4, 4, 0]}, "compress_ratios[2] is 4.0: expected an integer >= 0"),
        ({"compress_ratios": [0, 4, 128]}, "compress_ratios has 3 entries for num_hidden_layers 6"),
        ({"compress_ratios": 4}, "compress_ratios is 4: expected a list"),
        ({"compress_ratios": [0, 4, 128, 4, 128, 0, 4]}, "compress_ratios[6] is 4, past the 6 backbone layers"),
        (
            {"compress_ratios": [0, 4, 128, 4, 128, 0, 0, 0, 128]},
            "compress_ratios[8] is 128, past the 6 backbone layers",
        ),
        ({"compress_ratios": [0] * 107}, "compress_ratios has 107 entries for num_hidden_layers 6: at most 100 more"),
        ({"compress_rates": {CSA: 8, HCA: 128}}, f"compress_ratios beside a rate of 8 for {CSA}: transformers reads"),
        ({"compress_rate_hca": 32}, f"compress_ratios beside a rate of 32 for {HCA}: transformers reads the ratio 128"),
        ({"num_experts": 4}, "n_routed_experts is 8 but num_experts is 4: they mean the same, drop one of them"),
        ({"o_groups": 3}, "num_attention_heads 4 is not a multiple of o_groups 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above n_routed_experts 8"),
        ({"num_hash_layers": 7}, "num_hash_layers 7 is above num_hidden_layers 6"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2: supported is 1"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4: supported is 1"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True: supported is 1"),
        ({"scoring_func": "relu"}, "scoring_func is 'relu': supported is 'sqrtsoftplus' or 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy': supported is 'noaux_tc'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True: supported is False"),
        ({"mlp_bias": True}, "mlp_bias is True: supported is False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True: supported is False"),
        ({"torch_dtype": "int8"}, "dtype is 'int8': supported is 'bfloat16'"),
        ({"expert_dtype": "fp6"}, "expert_dtype is 'fp6': supported is 'fp4' or 'fp8'"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8': expected an object"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method is 'awq': supported is 'fp8'",
        ),
        ({"bos_token_id": 512}, "bos_token_id 512 is outside the vocabulary of vocab_size 512"),
        ({"eos_token_id": 600}, "eos_token_id 600 is outside the vocabulary of vocab_size 512"),
        ({"eos_token_id": [1, 600]}, "eos_token_id 600 is outside the vocabulary of vocab_size 512"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id[1] is '2': expected an integer >= 0"),
        ({"eos_token_id": []}, "eos_token_id is []: expected an integer or a list"),
        ({"eos_token_id": [1, None]}, "eos_token_id is [1, None]: expected an integer or a list"),
        ({"rope_scaling": [16]}, "rope_scaling is [16]: expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type is 'linear': supported is 'yarn'"),
        ({"rope_scaling": {**YARN}}, "missing required keys: rope_scaling.type"),
        ({"rope_scaling": {"type": "yarn"}}, "missing required keys: rope_scaling.factor, rope_scaling.original_max"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": -16}}, "rope_scaling.factor is -16: expected a positive"),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "original_max_position_embeddings": 0}},
            "rope_scaling.original_max_position_embeddings is 0: expected a positive integer",
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 0.5}},
            "rope_scaling.beta_fast 0.5 is below beta_slow 1",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.27}}, "rope_scaling.attention_factor is 1.27"),
        ({"hidden_size": None}, "missing required keys: hidden_size"),
        ({"compress_ratios": None}, "missing required keys: compress_ratios (or layer_types)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_one_problem(tiny, changes, message):
    (problem,) = problems_of(tiny | changes)
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_rate_csa": 8}, f"compress_rates.{CSA} is 4 but compress_rate_csa is 8: they mean the same"),
        ({"layer_types": [SWA, CSA]}, "layer_types has 2 entries for num_hidden_layers 6"),
        ({"layer_types": [SWA] * 5 + ["full_attention"]}, "layer_types[5] is 'full_attention': supported is 'sliding"),
        ({"layer_types": [SWA] * 6 + [HCA]}, "layer_types[6] is 'heavily_compressed_attention', past the 6"),
        (
            {"compress_rates": {CSA: 0, HCA: 128}},
            "compress_rates.compressed_sparse_attention is 0: expected a positive integer",
        ),
        ({"mlp_layer_types": ["hash_moe"] * 2}, "mlp_layer_types has 2 entries for num_hidden_layers 6"),
        ({"mlp_layer_types": ["moe"] * 5 + ["hash_moe"]}, "mlp_layer_types has hash_moe at layer 5 after moe"),
        ({"mlp_layer_types": ["dense"] + ["moe"] * 5}, "mlp_layer_types[0] is 'dense': supported is 'hash_moe'"),
        (
            {"partial_rotary_factor": 0.123, "rope_parameters": None},
            "partial_rotary_factor 0.123 of head_dim 128 is not",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_one_problem_in_the_transformers_spelling(tiny_hf, changes, message):
    (problem,) = problems_of(tiny_hf | changes)
    assert problem.startswith(message)


def test_yarn_scales_neither_cos_nor_sin(tiny_hf):
    """Nested YaRN without a factor: transformers would scale both by 1.277; equal mscales mean 1 there too."""
    compress = tiny_hf["rope_parameters"]["compress"]
    expected = ModelConfig.from_dict(tiny_hf)
    del compress["attention_factor"]
    (problem,) = problems_of(tiny_hf)
    assert problem.startswith("rope_parameters.compress has type yarn without attention_factor: transformers then")
    assert "by 1.277 for factor 16.0, and DeepSeek's code does not; give attention_factor 1.0" in problem
    compress |= {"mscale": 0.7, "mscale_all_dim": 0.7}
    assert ModelConfig.from_dict(tiny_hf) == expected
    del tiny_hf["rope_parameters"]["main"]
    assert "only one of main and compress" in problems_of(tiny_hf)[0]


def test_plain_rope_does_not_take_yarn(tiny_hf):
    tiny_hf["rope_parameters"]["main"] |= {"rope_type": "yarn", **YARN}
    (problem,) = problems_of(tiny_hf)
    assert problem.startswith("rope_parameters.main has type yarn")


def test_indexer_rules_do_not_bind_without_an_indexer(tiny):
    changes = {"compress_ratios": [0, 128, 128, 16, 16, 0], "index_head_dim": 48}
    assert ModelConfig.from_dict(tiny | changes).index_head_dim == 48
    assert "index_head_dim 48" in problems_of(tiny | changes | {"compress_indexer": {"16": True}})[0]


def test_all_problems_come_at_once(tiny):
    del tiny["hidden_size"], tiny["rope_theta"]
    tiny |= {
        "o_groups": 3,
        "qk_rope_head_dim": 65,
        "compress_ratios": [0, 4, -4, 0],
        "n_shared_experts": 0,
        "head_dim": "x",
    }
    problems = problems_of(tiny)
    assert problems[0] == "missing required keys: hidden_size, rope_theta"
    for part in ("'x'", "o_groups 3", "is 65", "compress_ratios[2] is -4", "has 4 entries", "n_shared_experts is 0"):
        assert sum(part in problem for problem in problems) == 1, part
    assert len(problems) == 7


@pytest.mark.parametrize("model_type", [None, "deepseek_v2", 4, ["deepseek_v4"]])
def test_other_model_types(tiny, model_type):
    message = error_of(tiny | {"model_type": model_type})
    assert message.startswith(
        f"invalid config (dict): model_type is {model_type!r} with architectures ['DeepseekV4ForCausalLM'], supported "
        "is 'deepseek_v4' (V4-Flash, V4-Pro and their revisions), 'deepseek_v32' (V3.2"
    )


def test_a_config_of_the_inference_code():
    with pytest.raises(ValueError, match=r"looks like the config of DeepSeek's inference code: take config.json of"):
        ModelConfig.from_dict({"dim": 4096, "n_layers": 43, "compress_ratios": [0, 4]})


def test_not_an_object():
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        ModelConfig.from_dict(untyped([1]))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"not a directory, JSON file or preset \(small, tiny, "):
        ModelConfig.from_pretrained(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"no config\.json in directory"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unknown preset 'huge': available are small,"):
        ModelConfig.from_preset("huge")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "deepseek_v4",\n "vocab_size": }')
    with pytest.raises(ValueError, match=r"config\.json\): not valid JSON at line 2, column 16"):
        ModelConfig.from_pretrained(tmp_path)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json\): not UTF-8 text at byte 7"):
        ModelConfig.from_pretrained(tmp_path)
    file.write_text(json.dumps({"model_type": "deepseek_v4"}))
    with pytest.raises(
        ValueError, match=r"config\.json\), 1 problem:\n  - missing required keys: vocab_size, hidden_size"
    ):
        ModelConfig.from_pretrained(tmp_path)


def test_preset_name_does_not_hide_a_directory(tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert ModelConfig.from_pretrained("tiny") == ModelConfig.from_preset("tiny")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(tiny | {"index_topk": 3}))
    assert ModelConfig.from_pretrained("tiny").index_topk == 3


@pytest.mark.parametrize("key", ["compress_overlap", "compress_indexer"])
def test_an_override_names_ratios_of_the_schedule(key):
    tiny = ModelConfig.from_preset("tiny").to_dict()
    [problem] = problems_of(tiny | {key: {"8": True, "4": False}})
    assert problem == f"{key} names the ratios 8, and no layer has them: there are 0, 4, 128; correct or drop them"
    assert f"{key}['04'] is False" in problems_of(tiny | {key: {"04": False}})[0]
    config = ModelConfig.from_dict(tiny | {key: {"4": False}})
    assert config.replace(num_hidden_layers=1).to_dict().keys().isdisjoint({key})
    assert config.replace(compress_ratios=[0] * 7).to_dict().keys().isdisjoint({key})
    with pytest.raises(ValueError, match="compress_ratios is 5"):
        config.replace(compress_ratios=5)


def test_rates_of_layer_types_that_no_layer_has_are_checked():
    raw = ModelConfig.from_preset("tiny").to_dict() | {
        "compress_ratios": None,
        "layer_types": ["sliding_attention"] * 6,
    }
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": -128}
    assert problems_of(raw | {"compress_rates": rates}) == [
        "compress_rates.heavily_compressed_attention is -128: expected a positive integer"
    ]
    assert "compress_rates.compressed_sparse_attention is 'x'" in problems_of(raw | {"compress_rate_csa": "x"})[0]
