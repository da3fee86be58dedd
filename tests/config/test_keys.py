"""Each key of a config against transformers: it has the same effect there and here, is refused, or has none."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch

from deepseek_attn.checkpoint import CanonicalSource, RandomSource, hf_state_dict
from deepseek_attn.checkpoint.names import hf_name
from deepseek_attn.checkpoint.names_v32 import published_name_v32
from deepseek_attn.checkpoint.published import canonical_names
from deepseek_attn.config.keys import UNUSED, V4, V32, V41, FamilyKeys
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.v32 import DeepseekV32Config
from tests.support.config_cases import CSA, HCA, as_transformers, raw_preset
from tests.support.small_models import assert_close, prompt, small_runner

transformers = pytest.importorskip("transformers", minversion="5.17")
V4_SIZES = {
    "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "num_nextn_predict_layers": 0,
    "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "o_lora_rank": 32, "q_lora_rank": 64,
    "moe_intermediate_size": 32, "sliding_window": 8, "index_topk": 4, "hc_mult": 2,
}  # fmt: skip
V32_SIZES = {
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 32, "num_nextn_predict_layers": 0,
}  # fmt: skip
LENGTH = 140  # tokens: past the windows, one entry of ratio 128, more entries of ratio 4 than are selected


def published_v4() -> dict[str, Any]:
    raw = raw_preset("tiny") | V4_SIZES
    del raw["quantization_config"], raw["expert_dtype"]
    return raw


def transformers_v4() -> dict[str, Any]:
    raw = as_transformers(raw_preset("tiny") | V4_SIZES)
    raw |= {"layer_types": ["sliding_attention", CSA, HCA], "mlp_layer_types": ["hash_moe", "moe", "moe"]}
    del raw["quantization_config"]
    return raw


def published_v32() -> dict[str, Any]:
    raw = raw_preset("tiny_v32") | V32_SIZES
    del raw["quantization_config"]
    return raw


def transformers_v32() -> dict[str, Any]:
    raw = published_v32()
    scaling = raw.pop("rope_scaling")
    raw["rope_parameters"] = {**scaling, "rope_type": scaling.pop("type"), "rope_theta": raw.pop("rope_theta")}
    del raw["first_k_dense_replace"]
    return raw | {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["indexed_attention"] * 2}


def published_v3() -> dict[str, Any]:
    raw = {key: value for key, value in published_v32().items() if not key.startswith("index_")}
    return raw | {"model_type": "deepseek_v3"}


BASES = {
    make.__name__: make() for make in (published_v4, transformers_v4, published_v32, transformers_v32, published_v3)
}
SCALING_VALUES = {
    "type": "default", "rope_type": "default", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16,
    "beta_slow": 4, "attention_factor": 1.2, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.7,
    "rope_theta": 777.0, "partial_rotary_factor": 0.25,
}  # fmt: skip
# Keys that are not in all of the configs, with a value that would matter if it were read as another library reads it.
ADDED: dict[str, Any] = {
    f"{label}.{key}": value
    for label in ("rope_scaling", "rope_parameters", "rope_parameters.main", "rope_parameters.compress")
    for key, value in SCALING_VALUES.items()
} | {
    "partial_rotary_factor": 0.25, "original_max_position_embeddings": 64, "compress_rate_csa": 8,
    "compress_rate_hca": 32, f"compress_rates.{CSA}": 8, f"compress_rates.{HCA}": 32, "num_local_experts": 4,
    "num_experts": 4, "intermediate_size": 48, "num_mtp_layers": 2, "pad_token_id": 3, "head_dim": 32,
    "qk_head_dim": 64, "rope_interleave": False, "indexer_rope_interleave": True, "mlp_bias": True,
    "output_router_logits": True, "router_jitter_noise": 0.5, "use_cache": False, "expert_dtype": "fp8",
    "dtype": "float16", "torch_dtype": "float16", "layer_types": ["sliding_attention"] * 3, "aux_loss_alpha": 0.5,
    "compress_rope_theta": 777.0, "rope_theta": 777.0, "first_k_dense_replace": 0, "qk_rope_head_dim": 32,
}  # fmt: skip
CHANGED: dict[str, Any] = {
    "compress_ratios": [4, 0, 128], "num_hidden_layers": 2, "head_dim": 96, "qk_rope_head_dim": 32, "n_group": 2,
    "num_experts_per_tok": 3, "hidden_act": "gelu", "topk_method": "greedy", "scoring_func": "softmax",
    "mlp_layer_types": ["moe", "moe", "moe"], "layer_types": [CSA, HCA, HCA], "eos_token_id": 2, "index_head_dim": 64,
    "partial_rotary_factor": 0.25, "rope_parameters.main.partial_rotary_factor": 0.25, "n_routed_experts": 16,
    "rope_parameters.compress.partial_rotary_factor": 0.25, "rope_scaling.type": "linear", "first_k_dense_replace": 2,
    "rope_parameters.compress.rope_type": "default", "rope_parameters.compress.type": "linear",
    "rope_parameters.main.rope_type": "yarn", "rope_parameters.rope_type": "linear", "dtype": "float16",
    "torch_dtype": "float16", "rope_scaling.beta_slow": 4, "rope_parameters.beta_slow": 4, "topk_group": 1,
    "rope_parameters.compress.beta_slow": 4, "rms_norm_eps": 1e-3, "hc_eps": 1e-2,
}  # fmt: skip
V41_CHANGED: dict[str, Any] = {
    "norm_topk_prob": False, "scoring_func": "sigmoid", "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 0, 0, 0, 0],
    "kv_source_layer_ids": [1, 3, 4], "index_source_layer_ids": [1, 3, 4, 5, 6], "engram_layer_ids": [1, 5],
    "engram_num_embeddings": [660, 866], "dspark_target_layer_ids": [4, 5, 6], "num_experts_per_tok": 1,
    "num_nextn_predict_layers": 0, "candidate_source_layer_id": -1, "dtype": "float32", "expert_dtype": "fp8",
    "original_seq_len": 64, "rope_factor": 4, "beta_fast": 16, "beta_slow": 2, "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64, "eos_token_id": 3, "bos_token_id": 3, "head_dim": 64, "index_head_dim": 128,
    "qk_rope_head_dim": 16, "engram_compressed_vocab_size": 300,
}  # fmt: skip
# Keys that no other library has.
OUR_OWN = {"compress_overlap", "compress_indexer", "quantization", "compression_config"}
GONE = object()


def leaves(raw: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        path
        for key, value in raw.items()
        for path in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key])
    ]


def with_key(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    *parents, key = path.split(".")
    inner = raw
    for parent in parents:
        inner = inner.setdefault(parent, {})
    if value is GONE:
        del inner[key]
    else:
        inner[key] = value
    return raw


def other(path: str, value: Any) -> Any:
    if path in CHANGED:
        return CHANGED[path]
    if isinstance(value, bool):
        return not value
    return value * 2 if isinstance(value, (int, float)) else ["other"] if isinstance(value, list) else "other"


AS_OTHERS = ("transformers_v32", "published_v3")  # bases whose keys have the meanings of other bases


def repeats(base: str, path: str, value: Any) -> bool:
    """Whether published V4 has a case of the same key: of transformers' V4, and of what V3.2 shares with V4."""
    return base in ("transformers_v4", "published_v32") and path in leaves(BASES["published_v4"])


def added_again(base: str, path: str, value: Any) -> bool:
    """Whether a key that the base lacks has a case beside the keys of published V4."""
    return base != "published_v4" and path in ADDED and path not in leaves(BASES[base]) and path.count(".") < 2


Case = tuple[str, str, Any]  # of a base, a key and a value


@cache
def cases() -> list[Case]:
    found: list[Case] = []
    for name, raw in BASES.items():
        keys = leaves(raw)
        for path in keys:
            if path not in ("model_type", "architectures"):
                inner = raw
                for part in path.split("."):
                    inner = inner[part]
                # without it transformers has 128, which does not fit; here it follows from the number of heads
                found += [(name, path, GONE)] if path != "num_key_value_heads" else []
                found.append((name, path, other(path, inner)))
        nested = "main" in raw.get("rope_parameters", {})
        added = {path: value for path, value in ADDED.items() if nested or path.count(".") < 2}
        found += [(name, path, value) for path, value in added.items() if path not in keys]
    return found


def once(cases: Iterable[Case]) -> list[Case]:
    """Cases of which no other one shows the same."""
    others = (lambda case: case[0] in AS_OTHERS or case[2] is GONE), (lambda case: repeats(*case) or added_again(*case))
    return [case for case in cases if not any(shown(case) for shown in others)]


@cache
def ours(config: AnyConfig) -> tuple[RandomSource, list[int], torch.Tensor]:
    """Random weights, a prompt, and our logits of it."""
    source, tokens = RandomSource(config, 0), prompt(config, LENGTH, seed=1)
    return source, tokens, small_runner(config, source, max_model_len=LENGTH, max_num_seqs=1).score([tokens])[0]


def theirs(raw: dict[str, Any], config: AnyConfig, source: RandomSource, tokens: list[int]) -> torch.Tensor:
    """transformers' logits, its config read from the same keys."""
    kind = {"deepseek_v4": "V4", "deepseek_v32": "V32", "deepseek_v3": "V3"}[raw["model_type"]]
    values = {key: value for key, value in copy.deepcopy(raw).items() if key not in ("model_type", "architectures")}
    read = getattr(transformers, f"Deepseek{kind}Config")(**values, attn_implementation="eager")
    model = getattr(transformers, f"Deepseek{kind}ForCausalLM")(read).float().eval()
    v32 = isinstance(config, DeepseekV32Config)
    to_hf = (lambda name: published_name_v32(name, config.num_hidden_layers)) if v32 else hf_name
    state = hf_state_dict(CanonicalSource(source, canonical_names(config)), to_hf)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def read_here(base: str, path: str, value: Any) -> AnyConfig | None:
    """The config with this value of a key; None if it is refused."""
    unused = any(fnmatchcase(path, pattern) for pattern in UNUSED)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = ModelConfig.from_dict(with_key(BASES[base], path, value))
    except ValueError as error:
        assert str(error).startswith("invalid config (dict)")  # noqa: PT017
        assert not unused
        return None
    for warning in caught:
        assert f"unknown keys are not read: {path.split('.')[0]}" in str(warning.message)
    if unused:
        assert config == ModelConfig.from_dict(BASES[base])
    return config


def assert_transformers_logits(raw: dict[str, Any], config: AnyConfig) -> None:
    source, tokens, logits = ours(config)
    assert_close(logits, theirs(raw, config, source, tokens))


def named(case: Case) -> str:
    return f"{case[0]}-{case[1]}-{'gone' if case[2] is GONE else case[2]}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("base", "path", "value"), [pytest.param(*case, id=named(case)) for case in cases()])
def test_each_key_is_refused_or_has_transformers_meaning(base, path, value):
    config = read_here(base, path, value)
    if config is not None:
        assert_transformers_logits(with_key(BASES[base], path, value), config)


@pytest.mark.filterwarnings("ignore:.*unknown keys are not read")
@pytest.mark.parametrize("base", [base for base in BASES if base not in AS_OTHERS])
def test_keys_are_refused_or_have_transformers_meaning_together(base):
    """As many keys at once as a config may have, each with the value that it has alone in the test above."""
    groups: list[tuple[dict[str, Any], AnyConfig]] = []
    for _, path, value in once(case for case in cases() if case[0] == base):
        if read_here(base, path, value) is None:
            continue
        for number, (raw, _) in enumerate(groups):
            with suppress(ValueError):
                changed = with_key(raw, path, value)
                groups[number] = changed, ModelConfig.from_dict(changed)
                break
        else:
            changed = with_key(BASES[base], path, value)
            groups.append((changed, ModelConfig.from_dict(changed)))
    assert 1 <= len(groups) < 9
    for raw, config in groups:
        assert_transformers_logits(raw, config)


def test_the_tables_of_transformers_families_are_covered():
    """All keys but those of formats and drafts, which transformers does not read, have a case above."""
    tried = {path for _, path, _ in cases()}
    for keys in (V4, V32):
        names = {*keys.read, *keys.fixed, *keys.aliases} - tried
        assert {name for name in names if not name.startswith(("quantization_config.", "dspark_"))} <= OUR_OWN


FIRST = {"deepseek_v4": "tiny", "deepseek_v32": "tiny_v32", "deepseek_v41": "tiny_v41"}
# Values that are refused, of keys that transformers does not have or reads as other formats.
REFUSED = {
    "quantization_config.quant_method": "awq", "quantization_config.fmt": "e5m2",
    "quantization_config.activation_scheme": "static", "quantization_config.scale_fmt": "e4m3",
    "quantization_config.weight_block_size": [64, 64], "quantization_config.expert_dtype": "int4",
    "quantization": {"bits": 4}, "compression_config": {"format": "pack"}, "mlp_bias": True, "attention_bias": True,
    "tie_word_embeddings": True, "hidden_act": "relu", "topk_method": "greedy", "n_shared_experts": 0,
}  # fmt: skip


@pytest.mark.parametrize("path", REFUSED)
@pytest.mark.parametrize("model_type", FIRST)
def test_other_formats_and_models_are_refused(model_type, path):
    with pytest.raises(ValueError, match=f"{path.removeprefix('quantization_config.')} is "):
        ModelConfig.from_dict(with_key(raw_preset(FIRST[model_type]), path, REFUSED[path]))


@pytest.mark.parametrize("path", [name for name in V41.read if "." not in name and name not in ("vision_config",)])
def test_each_key_of_v41_changes_the_config_or_is_refused(path):
    """Changed beside all other keys; what the values mean is compared with formulas in the tests of the model."""
    raw = raw_preset("tiny_v41")
    level = raw if path in raw else raw["text_config"]
    before = ModelConfig.from_dict(copy.deepcopy(raw))
    value = V41_CHANGED.get(path, other(path, level.get(path)))
    assert value != level.get(path)
    level[path] = value
    try:
        assert ModelConfig.from_dict(raw) != before
    except ValueError as error:
        assert path in str(error) or "engram_num_embeddings" in str(error)  # noqa: PT017


@pytest.mark.parametrize("keys", [V4, V32, V41], ids=["v4", "v32", "v41"])
def test_unused_keys_change_nothing_and_unknown_ones_are_named(keys: FamilyKeys):
    model_type = {id(V4): "deepseek_v4", id(V32): "deepseek_v32", id(V41): "deepseek_v41"}[id(keys)]
    raw = raw_preset(FIRST[model_type])
    config = ModelConfig.from_dict(raw)
    unused = [path for path in keys.unused if path not in ("model_type", "text_config", *keys.read)]
    assert len(unused) > 5
    for path in unused:
        with warnings.catch_warnings(action="error"):
            changed = ModelConfig.from_dict(with_key(raw, path.replace("*", "x"), "any"))
        assert replace(changed, quantization_config=config.quantization_config) == config, path
    with pytest.warns(UserWarning, match="not read: rope_scaling.base, attn_gain; if one of them"):
        ModelConfig.from_dict(with_key(with_key(raw, "rope_scaling.base", 2), "attn_gain", 3) if keys is not V41 else {
            **raw, "rope_scaling": raw["text_config"]["rope_scaling"] | {"base": 2}, "attn_gain": 3,
            "text_config": {key: value for key, value in raw["text_config"].items() if key != "rope_scaling"},
        })  # fmt: skip


@pytest.mark.parametrize("name", ["DeepseekV4Config", "DeepseekV32Config", "DeepseekV3Config"])
def test_no_key_that_transformers_writes_is_unknown(name, recwarn):
    written = getattr(transformers, name)().to_dict()
    written |= {"quantization_config": transformers.FineGrainedFP8Config(scale_fmt="ue8m0").to_dict()}
    ModelConfig.from_dict(json.loads(json.dumps(written)))
    assert not [str(warning.message) for warning in recwarn if "unknown" in str(warning.message)]
