"""The tiny preset's config.json in both spellings, and the errors of a wrong one."""

from __future__ import annotations

import copy
import json
from importlib import resources

import pytest

from deepseek_attn.config.model import ModelConfig

CSA, HCA, SWA = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
YARN = {"factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}


def raw_preset(name: str) -> dict:
    return json.loads(resources.files("deepseek_attn.configs").joinpath(f"{name}.json").read_text())


def as_transformers(tiny: dict) -> dict:
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
