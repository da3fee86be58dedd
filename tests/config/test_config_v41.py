"""DeepSeek-V4.1's config: both spellings, the roles of layers, and every problem at once."""

from __future__ import annotations

import json
import math
import re
from importlib import resources
from itertools import islice

import pytest

from deepseek_attn.checkpoint.published import published_tensors
from deepseek_attn.config.engram import _primes
from deepseek_attn.config.keys import INFERENCE_NAMES, V41
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v41 import DeepseekV41Config
from tests.support.typed import of_type


def raw_preset(name: str) -> dict:
    return json.loads(resources.files("deepseek_attn.configs").joinpath(f"{name}.json").read_bytes())


def tiny(**changes) -> DeepseekV41Config:
    return ModelConfig.from_preset("tiny_v41").replace(**changes)


def test_roles_of_the_published_layers():
    config = of_type(ModelConfig.from_preset("v41_flash"), DeepseekV41Config)
    kinds = [spec.kind for spec in config.layers]
    assert kinds[:9] == ["SWA", "SWA", "C2 full", *["C2 reuse"] * 5, "C2 full"]
    assert [i for i, kind in enumerate(kinds) if kind.endswith("full")] == [2, 8, 14, 20]
    assert [i for i, kind in enumerate(kinds) if kind == "C1 reindex"] == [24, 28, 32, 36]
    assert [spec.kv_source for spec in config.layers[13:22]] == [8, *[14] * 6, 20, 20]
    assert [spec.index_source for spec in config.layers[23:30]] == [20, *[24] * 4, 28, 28]
    assert [i for i, spec in enumerate(config.layers) if spec.candidate_source == 20] == [20, 24, 28, 32, 36]
    assert [i for i, spec in enumerate(config.layers) if spec.has_engram] == [1, 14]
    assert {(spec.ratio, spec.rope.theta, spec.rope.yarn) for spec in config.layers} == {
        (0, 10000.0, False), (1, 160000.0, True), (2, 160000.0, True),
    }  # fmt: skip
    assert config.rms_norm_eps == 1e-20
    assert config.with_sources([29]) == [20, 28, 29]
    assert config.with_sources([0, 3]) == [0, 2, 3]


@pytest.mark.parametrize("name", ["tiny_v41", "v41_flash"])
def test_to_dict_round_trips(name):
    config = ModelConfig.from_preset(name)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert ModelConfig.from_dict(config.flat_dict()) == config
    written, published = config.to_dict(), raw_preset(name)
    assert set(published["text_config"]) <= set(written["text_config"])
    assert set(published) - {"dtype"} <= set(written)


def test_the_spelling_of_the_inference_code():
    """Flat, with its own names, no model_type, and formats as ``dtype`` and ``expert_dtype``."""
    config = ModelConfig.from_preset("v41_flash")
    flat = config.flat_dict()
    names = {published: ours for ours, published in INFERENCE_NAMES.items()}
    scaling = flat.pop("rope_scaling")
    dropped = ("model_type", "architectures", "torch_dtype", "quantization_config", "max_position_embeddings")
    raw = {names.get(key, key): value for key, value in flat.items() if key not in dropped}
    raw |= {"original_seq_len": scaling["original_max_position_embeddings"], "rope_factor": scaling["factor"]}
    raw |= {"dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4", "beta_fast": 32, "beta_slow": 1}
    assert {"dim", "n_layers", "kv_source_layers", "engram_pad_id"} <= set(raw)
    read = ModelConfig.from_dict(raw)
    assert read.layers == config.layers
    assert read.expert_dtype == "fp4"
    changes = {"quantization_config": None, "vision_config": None}
    assert read.replace(**changes) == config.replace(**changes)
    with pytest.raises(ValueError, match=r"dim is 5120 but hidden_size is 4096: they mean the same"):
        ModelConfig.from_dict(raw | {"hidden_size": 4096})


def test_every_problem_at_once():
    raw = raw_preset("tiny_v41")
    raw["quantization_config"]["weight_block_size"] = [128, 128]
    raw["text_config"] |= {
        "compress_ratios": [0, 2, 2, 4, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 5],
        "candidate_topk_blocks": 1,
        "candidate_source_layer_id": 2,
        "hidden_act": "relu",
        "engram_num_embeddings": [660, 865],
        "head_dim": None,
    }
    with pytest.raises(ValueError, match="problems") as error:
        ModelConfig.from_dict(raw, "file")
    for part in (
        "missing required keys: head_dim",
        "hidden_act is 'relu'",
        "weight_block_size is [128, 128]: supported is [32, 32]",
        "compress_ratios[3] is 4: supported is 0 or 1 or 2",
        "layers [5] of kv_source_layer_ids are not in index_source_layer_ids",
        "candidate_source_layer_id 2 is not in index_source_layer_ids",
        "candidate_topk_blocks 1 of candidate_block_size 4 hold fewer entries than index_topk 6",
        "engram_num_embeddings is [660, 865]",
    ):
        assert part in str(error.value), part


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layer_ids": [4]}, "layer 1 has ratio 2, and no layer of kv_source_layer_ids comes before it"),
        ({"kv_source_layer_ids": [1]}, "layer 4 has ratio 1, and layer 1, whose entries it reads, 2"),
        ({"kv_source_layer_ids": [4, 1]}, "expected ascending numbers of layers"),
        ({"index_source_layer_ids": [0, 1, 3, 4, 6]}, "layer 0 is a source of entries or selections, and its ratio"),
        ({"index_source_layer_ids": [1, 3, 4, 8]}, "index_source_layer_ids has layer 8, and num_hidden_layers is 8"),
        ({"candidate_source_layer_id": 3}, "index sources [4, 6] come after candidate_source_layer_id 3"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1]}, "compress_ratios has 7 entries for num_hidden_layers 8"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0]}, "compress_ratios has 10 entries: expected 11"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 1]}, "draft stages have no compressed entries"),
        (
            {"dspark_n_routed_experts": 65_536},
            "n_routed_experts 8 in 8 layers and 65536 in 3 draft layers: supported are",
        ),
        ({"hidden_size": 80}, "hidden_size is 80: FP4 experts need a multiple of 32"),
        ({"num_hash_layers": 1}, "no such config keys: num_hash_layers"),
    ],
)
def test_inconsistent_schedules(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny(**changes)


def test_replace():
    config = of_type(ModelConfig.from_preset("v41_flash"), DeepseekV41Config)
    short = config.replace(num_hidden_layers=10)
    assert short.layers == config.layers[:2] + short.layers[2:]
    assert short.compress_ratios == config.compress_ratios[:10]
    assert (short.dspark, short.mtp_layers) == (None, ())  # it reads layers that are gone
    assert (short.kv_source_layer_ids, short.candidate_source_layer_id) == ((2, 8), None)
    assert short.engram.engram_layer_ids == (1,)
    assert config.replace(engram_layer_ids=[]).engram is None
    assert config.replace(num_hidden_layers=1).engram is None
    assert config.replace(expert_dtype="fp8").expert_dtype == "fp8"
    assert config.replace(num_nextn_predict_layers=0).compress_ratios == config.compress_ratios[:40]
    assert config.replace(candidate_source_layer_id=None).layers[24].candidate_source is None
    assert config.replace(candidate_source_layer_id=-1) == config.replace(candidate_source_layer_id=None)


@pytest.mark.parametrize("key", [key for key in V41.read if "." not in key])
def test_no_number_makes_reading_and_listing_tensors_long(key):
    """What a config's number repeats is bounded: experts, layers, hashes and the primes that they look for."""
    for number in (2**31 - 1, 65_536, 10_000):
        raw = raw_preset("tiny_v41")
        level = raw if key in raw else raw["text_config"]
        level[key] = [number] if isinstance(level.get(key), list) else number
        try:
            config = ModelConfig.from_dict(raw)
        except ValueError:
            continue
        assert sum(1 for _ in islice(published_tensors(config), 2**20)) < 2**18


def test_primes_of_the_largest_tables():
    """Beside trial division, and without it: 1,024 of them take milliseconds."""
    small = [n for n in range(2, 70_000) if all(n % k for k in range(2, math.isqrt(n) + 1))]
    for start in (0, 2, 3, 32_767, 32_768, 40_000):
        assert list(_primes(start, 1024)) == [prime for prime in small if prime >= start][:1024]
    largest = _primes(2**31 - 40_000, 1024)
    assert largest[-1] < 2**31
    assert all(prime % k for prime in largest[::101] for k in range(2, math.isqrt(prime) + 1))
