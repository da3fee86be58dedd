"""config.json in both spellings, presets, and the errors of a wrong config."""

import copy
import json
from importlib import resources

import pytest

from deepseek_attn.config import LayerSpec, ModelConfig, RopeSpec, preset_names

CSA, HCA, SWA = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
YARN = {"factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}


def raw_preset(name: str) -> dict:
    return json.loads(resources.files("deepseek_attn.configs").joinpath(f"{name}.json").read_text())


@pytest.fixture
def tiny() -> dict:
    return raw_preset("tiny")


@pytest.fixture
def tiny_hf(tiny) -> dict:
    """The tiny preset as transformers spells it."""
    raw = copy.deepcopy(tiny)
    yarn = raw.pop("rope_scaling")
    for key in ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "topk_method", "torch_dtype"):
        del raw[key]
    raw["dtype"] = "bfloat16"
    raw["layer_types"] = [SWA, CSA, HCA, CSA, HCA, SWA]
    raw["compress_rates"] = {CSA: 4, HCA: 128}
    raw["mlp_layer_types"] = ["hash_moe"] * 2 + ["moe"] * 4
    raw["partial_rotary_factor"] = 0.5
    raw["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "compress": {**yarn, "rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
    }
    raw["quantization_config"]["expert_dtype"] = raw.pop("expert_dtype")
    return raw


def error_of(raw: dict) -> str:
    with pytest.raises(ValueError, match=r"^invalid config") as error:
        ModelConfig.from_dict(raw)
    return str(error.value)


def problems_of(raw: dict) -> list[str]:
    head, *problems = error_of(raw).split("\n  - ")
    assert head.startswith("invalid config (dict), ")
    assert head.endswith(f"{len(problems)} problem{'s' * (len(problems) != 1)}:")
    return problems


# layers


def test_every_field_of_tiny_layers(tiny):
    config = ModelConfig.from_dict(tiny)
    plain, yarn = RopeSpec(10000.0, 64), RopeSpec(160000.0, 64, **YARN)
    assert config.layers == (
        LayerSpec(0, 0, False, False, plain, True),
        LayerSpec(1, 4, True, True, yarn, True),
        LayerSpec(2, 128, False, False, yarn, False),
        LayerSpec(3, 4, True, True, yarn, False),
        LayerSpec(4, 128, False, False, yarn, False),
        LayerSpec(5, 0, False, False, plain, False),
    )
    assert config.mtp_layers == (LayerSpec(0, 0, False, False, plain, False, is_mtp=True),)
    assert config.all_layers == config.layers + config.mtp_layers
    assert [x.kind for x in config.all_layers] == ["SWA", "C4A", "C128A", "C4A", "C128A", "SWA", "SWA"]
    assert [x.coff for x in config.all_layers] == [1, 2, 1, 2, 1, 1, 1]
    assert [x.swa_only for x in config.all_layers] == [True, False, False, False, False, True, True]
    assert [x.name for x in config.all_layers] == [f"layers.{i}" for i in range(6)] + ["mtp.0"]


def test_derived_properties(tiny):
    config = ModelConfig.from_dict(tiny | {"eos_token_id": [1, 7]})
    assert (config.nope_head_dim, config.softmax_scale) == (64, 128**-0.5)
    assert (config.eos_token_id, config.eos_token_ids) == ((1, 7), (1, 7))
    assert ModelConfig.from_dict(tiny).eos_token_ids == (1,)
    assert len({config, ModelConfig.from_dict(tiny)}) == 2


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("v4_flash", {"SWA": 2, "C4A": 21, "C128A": 20}), ("v4_pro", {"SWA": 0, "C4A": 30, "C128A": 31})],
)
def test_published_schedules(name, kinds):
    config = ModelConfig.from_preset(name)
    names = [layer.kind for layer in config.layers]
    assert {kind: names.count(kind) for kind in kinds} == kinds
    assert len(names) == sum(kinds.values()) == config.num_hidden_layers
    assert names[:4] == (["SWA"] * 2 if name == "v4_flash" else ["C128A"] * 2) + ["C4A", "C128A"]
    assert names[-1] == "C4A"
    assert [layer.hash_routing for layer in config.all_layers] == [True] * 3 + [False] * (len(names) - 3 + 1)
    assert [layer.kind for layer in config.mtp_layers] == ["SWA"]


@pytest.mark.parametrize("ratio", [0, 1, 2, 4, 16, 128])
def test_rope_follows_the_ratio(tiny, ratio):
    layer = ModelConfig.from_dict(tiny | {"compress_ratios": [ratio] * 6}).layers[3]
    if ratio == 0:
        assert layer.rope == RopeSpec(theta=10000.0, dim=64)
        assert not layer.rope.yarn
    else:
        assert layer.rope == RopeSpec(theta=160000.0, dim=64, **YARN)
        assert layer.rope.yarn
    assert layer.overlap == layer.has_indexer == (ratio == 4)
    assert layer.kind == ("SWA" if ratio == 0 else f"C{ratio}A")


@pytest.mark.parametrize("scaling", [None, {}, {"type": "default"}, {"rope_type": "yarn", **YARN, "factor": 1}])
def test_without_yarn_compressed_layers_keep_their_theta(tiny, scaling):
    config = ModelConfig.from_dict(tiny | {"rope_scaling": scaling})
    assert config.layers[1].rope == RopeSpec(160000.0, 64)
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("tail", [[], [0], [0, 0, 0]], ids=["no-tail", "one-mtp", "three-zeros"])
def test_tail_goes_to_mtp(tiny, tail):
    config = ModelConfig.from_dict(tiny | {"compress_ratios": [0, 4, 128, 4, 128, 0, *tail]})
    assert config == ModelConfig.from_preset("tiny")
    assert (len(config.layers), len(config.mtp_layers)) == (6, 1)


def test_two_mtp_layers_and_none(tiny):
    config = ModelConfig.from_dict(tiny | {"num_nextn_predict_layers": 2})
    assert [layer.name for layer in config.mtp_layers] == ["mtp.0", "mtp.1"]
    assert config.to_dict()["compress_ratios"] == [0, 4, 128, 4, 128, 0, 0, 0]
    assert ModelConfig.from_dict(tiny | {"num_nextn_predict_layers": 0}).mtp_layers == ()


# overrides


@pytest.mark.parametrize(
    "value", [{"16": True}, [False, True, True, False, False, False]], ids=["by-ratio", "by-layer"]
)
def test_overrides(tiny, value):
    raw = tiny | {
        "compress_ratios": [0, 4, 16, 128, 128, 0],
        "compress_overlap": value,
        "compress_indexer": {"4": False},
    }
    config = ModelConfig.from_dict(raw)
    assert [layer.overlap for layer in config.layers] == [False, True, True, False, False, False]
    assert [layer.has_indexer for layer in config.layers] == [False] * 6
    assert config.to_dict()["compress_overlap"] == {"16": True}
    assert config.to_dict()["compress_indexer"] == {"4": False}
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_override_that_differs_between_layers_of_one_ratio_is_kept_by_layer(tiny):
    by_layer = [False, True, False, False, False, False]
    config = ModelConfig.from_dict(tiny | {"compress_indexer": by_layer})
    assert config.to_dict()["compress_indexer"] == by_layer
    assert "compress_overlap" not in config.to_dict()
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("key", ["compress_overlap", "compress_indexer"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([True], "has 1 entries for 6 backbone layers"),
        ([True] * 6, "is true for layers [0, 5], whose ratio is 0"),
        ({"0": True}, "is true for layers [0, 5], whose ratio is 0"),
        ({"four": True}, "['four'] is True: expected"),
        ({"4": 1}, "['4'] is 1: expected"),
        ([False, 1, False, False, False, False], "[1] is 1: expected"),
        (True, "is True: expected a list"),
    ],
    ids=["short", "list-ratio0", "dict-ratio0", "bad-key", "int-value", "int-entry", "scalar"],
)
def test_bad_overrides(tiny, key, value, message):
    (problem,) = problems_of(tiny | {key: value})
    assert problem.startswith(key + message if message[0] == "[" else f"{key} {message}")


# spellings


def test_transformers_spelling_gives_an_equal_config(tiny, tiny_hf):
    assert ModelConfig.from_dict(tiny_hf) == ModelConfig.from_dict(tiny)


def test_legacy_rates_and_scalar_thetas(tiny, tiny_hf):
    del tiny_hf["compress_rates"], tiny_hf["rope_theta"], tiny_hf["compress_rope_theta"]
    tiny_hf |= {"compress_rate_csa": 4, "compress_rate_hca": 32}
    tiny["compress_ratios"] = [0, 4, 32, 4, 32, 0, 0]
    assert ModelConfig.from_dict(tiny_hf) == ModelConfig.from_dict(tiny)


def test_flat_rope_parameters(tiny):
    flat = tiny["rope_scaling"] | {"rope_theta": 10000}
    raw = {key: value for key, value in tiny.items() if key not in ("rope_scaling", "rope_theta")}
    assert ModelConfig.from_dict(raw | {"rope_parameters": flat}) == ModelConfig.from_dict(tiny)


def test_layer_type_decides_overlap_and_indexer_whatever_the_rate(tiny_hf):
    tiny_hf["compress_rates"] = {CSA: 16, HCA: 4}
    config = ModelConfig.from_dict(tiny_hf)
    assert [(x.ratio, x.overlap, x.has_indexer) for x in config.layers[1:3]] == [(16, True, True), (4, False, False)]
    assert config.to_dict()["compress_overlap"] == {"4": False, "16": True}
    assert ModelConfig.from_dict(config.to_dict()) == config
    tiny_hf["compress_rates"] = {CSA: 4, HCA: 4}
    config = ModelConfig.from_dict(tiny_hf)
    assert config.to_dict()["compress_overlap"] == [False, True, False, True, False, False]
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", ["small", "tiny", "tiny_gpu", "v4_flash", "v4_pro"])
def test_what_transformers_makes_of_a_published_config(name, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.17")
    published = ModelConfig.from_preset(name)
    raw = {key: value for key, value in raw_preset(name).items() if key != "model_type"}
    config = transformers.DeepseekV4Config(**raw)
    assert ModelConfig.from_dict(config.to_dict()).layers == published.layers
    config.save_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(tmp_path) == published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 4, 128, 4, 4, 0]}, "compress_ratios and layer_types disagree at layers [4]"),
        ({"num_hash_layers": 3}, "num_hash_layers is 3 but hash_moe entries of mlp_layer_types is 2"),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0 but rope_parameters.rope_theta is 10000.0"),
        (
            {"compress_rope_theta": 4e4},
            "compress_rope_theta is 40000.0 but rope_parameters.compress.rope_theta is 160000.0",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": 40}}, "rope_scaling is {'type': 'yarn', 'factor': 40.0"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32 but partial_rotary_factor 0.5 * head_dim 128 is 64"),
        ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8' but quantization_config.expert_dtype is 'fp4'"),
        ({"torch_dtype": "float32"}, "torch_dtype is 'float32' but dtype is 'bfloat16'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_spellings_that_contradict_each_other(tiny_hf, changes, message):
    (problem,) = problems_of(tiny_hf | changes)
    assert problem.startswith(message)


# formats, defaults, round trip


def test_expert_dtype_defaults_to_fp4_only_in_a_quantised_checkpoint(tiny):
    del tiny["expert_dtype"]
    assert ModelConfig.from_dict(tiny).expert_dtype == "fp4"
    del tiny["quantization_config"]
    assert ModelConfig.from_dict(tiny).expert_dtype is None
    assert ModelConfig.from_dict(tiny | {"expert_dtype": "fp8"}).expert_dtype == "fp8"


def test_optional_keys_have_documented_defaults(tiny):
    optional = {
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True, "n_shared_experts": 1, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    raw = {key: value for key, value in tiny.items() if key not in optional}
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(tiny | optional)


def test_unknown_keys_are_dropped(tiny):
    config = ModelConfig.from_dict(tiny | {"use_cache": True, "dspark_stages": 3})
    assert config == ModelConfig.from_dict(tiny)
    assert "dspark_stages" not in config.to_dict()


def test_preset_names():
    assert preset_names() == ["small", "tiny", "tiny_gpu", "tiny_v32", "v32", "v4_flash", "v4_pro"]


@pytest.mark.parametrize("name", ["small", "tiny", "tiny_gpu", "v4_flash", "v4_pro"])
def test_preset_round_trip(name, tmp_path):
    config = ModelConfig.from_preset(name)
    assert config.to_dict() == raw_preset(name)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert ModelConfig.from_pretrained(name) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert ModelConfig.from_pretrained(tmp_path) == config
    assert ModelConfig.from_pretrained(str(tmp_path / "config.json")) == config


def test_to_dict_shares_nothing_with_the_config_or_its_input(tiny):
    config = ModelConfig.from_dict(tiny)
    config.to_dict()["quantization_config"]["weight_block_size"][0] = 7
    tiny["quantization_config"]["weight_block_size"][0] = 7
    assert config.quantization_config["weight_block_size"] == [128, 128]


# replace


def test_replace_schedule():
    tiny = ModelConfig.from_preset("tiny")
    config = tiny.replace(compress_ratios=[16] * 6, index_topk=3, dtype="float32")
    assert [layer.kind for layer in config.layers] == ["C16A"] * 6
    assert (config.index_topk, config.dtype, config.hidden_size) == (3, "float32", 256)
    assert not any(layer.overlap for layer in config.layers)
    assert ModelConfig.from_preset("tiny") == tiny


def test_replace_keeps_overrides_by_ratio():
    config = ModelConfig.from_preset("tiny").replace(
        compress_ratios=[0, 16, 16, 4, 4, 0], compress_overlap={"16": True}
    )
    moved = config.replace(compress_ratios=[16, 0, 0, 4, 4, 16])
    assert [layer.overlap for layer in moved.layers] == [True, False, False, True, True, True]
    assert not any(layer.overlap for layer in moved.replace(compress_overlap={"16": False, "4": False}).layers)


def test_replace_num_hidden_layers_keeps_the_first_ones():
    tiny = ModelConfig.from_preset("tiny")
    assert tiny.replace(num_hidden_layers=3).layers == tiny.layers[:3]
    assert tiny.replace(num_hidden_layers=1).num_hash_layers == 1
    with pytest.raises(ValueError, match="compress_ratios has 6 entries for num_hidden_layers 7"):
        tiny.replace(num_hidden_layers=7)


def test_replace_quantization_config_by_none():
    config = ModelConfig.from_preset("tiny").replace(quantization_config=None)
    assert (config.quantization_config, config.expert_dtype) == (None, None)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert config.replace(rope_scaling=None).layers[1].rope == RopeSpec(160000.0, 64)


def test_replace_revalidates_and_refuses_unknown_keys():
    tiny = ModelConfig.from_preset("tiny")
    with pytest.raises(ValueError, match=r"deepseek_v4 with index_topk, o_groups changed\), 2 problems"):
        tiny.replace(index_topk=0, o_groups=3)
    with pytest.raises(ValueError, match="no such config keys: index_top_k"):
        tiny.replace(index_top_k=4)


# errors


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
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1: expected true or false"),
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
        ({"o_groups": 3}, "num_attention_heads 4 is not a multiple of o_groups 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above n_routed_experts 8"),
        ({"num_hash_layers": 7}, "num_hash_layers 7 is above num_hidden_layers 6"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2: supported is 1"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4: supported is 1"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True: supported is 1"),
        ({"scoring_func": "relu"}, "scoring_func is 'relu': supported is 'sqrtsoftplus' or 'softmax' or 'sigmoid'"),
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
        ({"layer_types": [SWA, CSA]}, "layer_types has 2 entries for num_hidden_layers 6"),
        ({"layer_types": [SWA] * 5 + ["full_attention"]}, "layer_types[5] is 'full_attention': supported is 'sliding"),
        ({"layer_types": [SWA] * 6 + [HCA]}, "layer_types[6] is 'heavily_compressed_attention', past the 6"),
        ({"compress_rates": {CSA: 0}}, "compress_rates.compressed_sparse_attention is 0: expected a positive integer"),
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


def test_plain_rope_does_not_take_yarn(tiny_hf):
    tiny_hf["rope_parameters"]["main"] |= {"rope_type": "yarn", **YARN}
    (problem,) = problems_of(tiny_hf)
    assert problem.startswith("rope_parameters.main asks for yarn")


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
    supported = "'deepseek_v4', 'deepseek_v32', 'deepseek_v3'"
    assert message == f"invalid config (dict): model_type is {model_type!r}, supported is {supported}"


def test_not_an_object():
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        ModelConfig.from_dict([1])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"no directory, JSON file or preset \(small, tiny, tiny_gpu, tiny_v32, "):
        ModelConfig.from_pretrained(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"no config\.json in directory"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unknown preset 'huge': available are small,"):
        ModelConfig.from_preset("huge")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "deepseek_v4",\n "vocab_size": }')
    with pytest.raises(ValueError, match=r"config\.json\): broken JSON at line 2, column 16"):
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
