"""Sizes of a config against the headers of a checkpoint: nothing is built before they agree."""

import pytest
import torch

from deepseek_attn.checkpoint import CanonicalSource, RandomSource, headers
from deepseek_attn.checkpoint.headers import check_headers
from deepseek_attn.checkpoint.names_v32 import canonical_name_v32
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.models.families import Family
from deepseek_attn.runner.model_runner import ModelRunner
from tests.checkpoint.fabricate import MemorySource, hf_packed, random_source, tiny
from tests.support.config_cases import raw_preset

V32 = ModelConfig.from_preset("tiny_v32")


def canonical(source, config):
    if config.model_type == "deepseek_v4":
        return CanonicalSource(source)
    return CanonicalSource(source, lambda name: canonical_name_v32(name, config.num_hidden_layers))


@pytest.mark.parametrize("config", [tiny(), V32], ids=["v4", "v32"])
@pytest.mark.parametrize("layers", [None, [0, 2]])
@pytest.mark.parametrize("attention_only", [False, True])
def test_headers_that_agree(config, layers, attention_only):
    check_headers(config, canonical(RandomSource(config), config), layers, attention_only)


def test_only_what_is_loaded_has_to_be_there():
    source = random_source()
    part = MemorySource({name: value for name, value in source.tensors.items() if name.startswith("layers.1.attn")})
    check_headers(tiny(), CanonicalSource(part), [1], attention_only=True)
    check_headers(tiny(), CanonicalSource(hf_packed(source)))  # transformers drops the MTP layer
    with pytest.raises(ValueError, match=r"missing tensors.* \(\d+\): embed.weight"):
        check_headers(tiny(), CanonicalSource(part), [1])


CHANGED = {
    "ratio": (
        {"compress_ratios": [0, 8, 128]},
        ["layer 1 (stored: ratio 4 with overlap and an indexer; config: ratio 8)"],
    ),
    "both": (
        {"compress_ratios": [0, 128, 64]},
        [
            "layer 1 (stored: ratio 4 with overlap and an indexer; config: ratio 128)",
            "layer 2 (stored: ratio 128; config: ratio 64)",
        ],
    ),
    "none": ({"compress_ratios": [0, 4, 0]}, ["layer 2 (stored: ratio 128; config: ratio 0)"]),
    "new": ({"compress_ratios": [16, 4, 128]}, ["layer 0 (stored: ratio 0; config: ratio 16)"]),
    "overlap": (
        {"compress_overlap": {"4": False}},
        ["layer 1 (stored: ratio 4 with overlap and an indexer; config: ratio 4 with an indexer)"],
    ),
    "indexer": (
        {"compress_indexer": {"4": False}},
        ["layer 1 (stored: ratio 4 with overlap and an indexer; config: ratio 4 with overlap)"],
    ),
}


@pytest.mark.parametrize(("change", "layers"), CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("names", [lambda source: source, hf_packed])
def test_another_schedule_is_named_layer_by_layer(monkeypatch, change, layers, names):
    config, source = tiny().replace(num_hidden_layers=3, compress_ratios=[0, 4, 128]), random_source()
    monkeypatch.setattr(Family, "build", lambda *args: pytest.fail("a model was built"))
    with pytest.raises(ValueError, match="trained with another schedule than the config has") as error:
        ModelRunner.from_source(config.replace(**change), names(source), progress=False, device="cpu")
    restored = f"by the shapes of {', '.join(layers)}. Restore it in config.json: compress_ratios [0, 4, 128, 0],"
    assert restored in str(error.value)
    assert "`deepseek-attn experiment run FILE`" in str(error.value)


def test_a_schedule_counts_in_layers_that_are_loaded():
    config, source = tiny().replace(compress_ratios=[0, 4, 64]), random_source()
    check_headers(config, CanonicalSource(source), [0, 1])
    with pytest.raises(ValueError, match="another schedule than the config has, by the shapes of layer 2 "):
        check_headers(config, CanonicalSource(source), [1, 2], attention_only=True)


SIZES = {
    "n_routed_experts": (4, 10_000),
    "num_hidden_layers": (4, 800),
    "num_nextn_predict_layers": (2, 100),
    "vocab_size": (513, 2**31 - 1),
    "hidden_size": (384, 2**30),
    "head_dim": (256, 4096),
    "hc_mult": (5, 10**9),
    "moe_intermediate_size": (256, 10**9),
    "index_n_heads": (17, 10**9),
}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("size", [0, 1], ids=["other", "huge"])
def test_sizes_that_the_headers_do_not_have(monkeypatch, key, size):
    """One message, before a module is built, and after as many expected tensors as there are in the checkpoint."""
    config, source = tiny(), random_source()
    monkeypatch.setattr(Family, "build", lambda *args: pytest.fail("a model was built"))
    monkeypatch.setattr(source, "read", lambda name: pytest.fail("a tensor was read"))
    walked = []

    def counted(config):
        for pair in published_tensors(config):
            walked.append(pair)
            yield pair

    published_tensors = headers.published_tensors
    monkeypatch.setattr(headers, "published_tensors", counted)
    value = SIZES[key][size]
    schedule = {"compress_ratios": [*([0, 4, 128] * value)[:value]]} if key == "num_hidden_layers" else {}
    wanted = config.replace(**{key: value}, **schedule)
    with pytest.raises(ValueError, match="the checkpoint does not fit the model") as error:
        ModelRunner.from_source(wanted, source, progress=False, device="cpu")
    assert len(str(error.value)) < 4000
    assert len(walked) <= 4 * len(source.entries())


LIMITS = [
    ("num_hidden_layers", 10**5),
    ("num_nextn_predict_layers", 10**5),
    ("n_routed_experts", 10**5),
    ("hc_sinkhorn_iters", 10**5),
    ("index_topk", 10**6),
    ("sliding_window", 10**5),
    ("vocab_size", 10**12),
    ("max_position_embeddings", 10**12),
    ("hidden_size", 10**12),
]


PRESETS = {name: raw_preset(name) for name in ("tiny", "tiny_v32")}


@pytest.mark.parametrize(
    ("preset", "key", "least"),
    [(preset, *limit) for preset, raw in PRESETS.items() for limit in LIMITS if limit[0] in raw],
)
def test_sizes_that_no_config_may_have(monkeypatch, preset, key, least):
    """Without headers too: no object per layer or expert is made."""
    raw = PRESETS[preset]
    made = pytest.fail
    monkeypatch.setattr("deepseek_attn.config.model.LayerSpec", made)
    monkeypatch.setattr("deepseek_attn.config.v32.V32LayerSpec", made)
    for value in (least, 10**12, 10**400):
        with pytest.raises(ValueError, match=rf"{key} (is )?\d+(:| in) .*supported") as error:
            ModelConfig.from_dict(raw | {key: value})
        assert len(str(error.value)) < 1500


def test_random_weights_that_no_memory_holds():
    config = tiny(vocab_size=2**31 - 1, hidden_size=2**20)
    with pytest.raises(ValueError, match=r"(embed|head).weight has [\d,]+ bytes in float32, and there is memory for"):
        RandomSource(config)


def test_weights_that_the_memory_does_not_hold(monkeypatch):
    monkeypatch.setattr("deepseek_attn.runner.build.available_memory", lambda: 10_000)
    source = random_source()
    monkeypatch.setattr(source, "read", lambda name: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match=r"the weights have [\d,]+ bytes, and there is memory for 10,000"):
        ModelRunner.from_source(tiny(), source, progress=False, device="cpu")


@pytest.mark.parametrize("shape", [(10**12, 0, 0), (10**9, 2, 0), (0, 2, 4)])
def test_empty_packed_experts(shape):
    source = MemorySource({})
    source.put("layers.0.mlp.experts.gate_up_proj", "BF16", torch.zeros(0))
    info = source.tensors["layers.0.mlp.experts.gate_up_proj"][0]
    source.tensors["layers.0.mlp.experts.gate_up_proj"] = (type(info)("BF16", shape, 0), torch.zeros(0))
    with pytest.raises(ValueError, match="packed experts are not empty"):
        CanonicalSource(source)
