"""config.json in both spellings, presets, what presets hold and how configs change."""

import json
from pathlib import Path

import pytest

from deepseek_attn.config.model import LayerSpec, ModelConfig, RopeSpec, preset_names
from tests.support.config_cases import CSA, HCA, YARN, as_transformers, problems_of, raw_preset
from tests.support.typed import of_type, required


@pytest.fixture
def tiny() -> dict:
    return raw_preset("tiny")


@pytest.fixture
def tiny_hf(tiny) -> dict:
    return as_transformers(tiny)


# layers


def test_every_field_of_tiny_layers(tiny):
    config = of_type(ModelConfig.from_dict(tiny), ModelConfig)
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
    config = of_type(ModelConfig.from_dict(tiny | {"eos_token_id": [1, 7]}), ModelConfig)
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
    raw = {key: value for key, value in tiny.items() if key != "rope_scaling"}
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
        ({"rope_theta": 5e5}, "rope_theta is 500000.0 but rope_parameters.main.rope_theta is 10000.0"),
        (
            {"compress_rope_theta": 4e4},
            "compress_rope_theta is 40000.0 but rope_parameters.compress.rope_theta is 160000.0",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": 40}}, "rope_scaling is {'type': 'yarn', 'factor': 40.0"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32 but partial_rotary_factor 0.5 * head_dim 128 is 64"),
        ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8' but quantization_config.expert_dtype is 'fp4'"),
        ({"torch_dtype": "float32"}, "dtype is 'bfloat16' but torch_dtype is 'float32'"),
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
    with pytest.warns(UserWarning, match=r"config \(dict\): unknown keys are not read: dspark_stages;"):
        config = ModelConfig.from_dict(tiny | {"use_cache": True, "dspark_stages": 3})
    assert config == ModelConfig.from_dict(tiny)
    assert "dspark_stages" not in config.to_dict()


def test_presets_are_the_files_of_configs_and_survive_a_round_trip():
    names = preset_names()
    assert names == sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("*.json"))
    assert {"small", "tiny", "tiny_v32", "tiny_v41", "v4_flash"} <= {*names}
    for config in map(ModelConfig.from_preset, names):
        assert ModelConfig.from_dict(config.to_dict()) == config


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
    assert required(config.quantization_config)["weight_block_size"] == [128, 128]


# replace


def test_replace_schedule():
    tiny = ModelConfig.from_preset("tiny")
    config = tiny.replace(compress_ratios=[16] * 6, index_topk=3, dtype="float32")
    assert [layer.kind for layer in config.layers] == ["C16A"] * 6
    assert (config.index_topk, config.dtype, config.hidden_size) == (3, "float32", 256)
    assert not any(layer.overlap for layer in config.layers)
    assert ModelConfig.from_preset("tiny") == tiny


@pytest.mark.parametrize("name", ["tiny", "v4_flash"])
def test_compress_ratios_are_those_of_the_published_config(name):
    config = of_type(ModelConfig.from_preset(name), ModelConfig)
    assert list(config.compress_ratios) == config.to_dict()["compress_ratios"]
    assert len(config.compress_ratios) == config.num_hidden_layers + config.num_nextn_predict_layers
    assert config.replace(compress_ratios=config.compress_ratios) == config


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


def test_a_ratio_of_1_is_explained():
    """Other ports write 1 for layers without compression, and the tensors would then be missing."""
    config = ModelConfig.from_preset("tiny")
    ratios = [0, 1, 4, 1][: config.num_hidden_layers] + [0] * (config.num_hidden_layers - 4)
    with pytest.warns(UserWarning, match=r"the compress ratio of layers \[1, 3\] is 1\..*one entry per token.*write 0"):
        changed = config.replace(compress_ratios=ratios)
    assert [spec.ratio for spec in changed.layers][:4] == [0, 1, 4, 1]


def test_other_ratios_do_not_warn(recwarn):
    for preset in ("tiny", "v4_flash", "v4_pro", "v32"):
        ModelConfig.from_preset(preset)
    assert not recwarn.list
