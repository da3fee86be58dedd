"""Counted costs, against the allocator and the weights of a layer."""

from typing import Any

import pytest
import torch

from deepseek_attn import ModelConfig, ModelRunner
from deepseek_attn.cache.layout import make_layout
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.measure.costs import count_costs, query_costs
from deepseek_attn.layers.linear import Linear

TINY = ModelConfig.from_preset("tiny")
SCHEDULES = [("0*", {}), ("0,(4,128)*", {}), ("1,2,8*", {}), ("0,16*", {"overlap": True, "indexer": True})]


@pytest.mark.parametrize(("pattern", "options"), SCHEDULES, ids=[pattern for pattern, _ in SCHEDULES])
@pytest.mark.parametrize("numerics", ["exact", "serving"])
def test_sequence_bytes_are_what_is_allocated_for_it(pattern, options, numerics):
    """All pools of a runner of one sequence, without the null pages and the window page of the running step."""
    config: Any = ModelVariant("v", pattern, **options).config(TINY)
    numerics, length = get_numerics(numerics), 700
    costs = count_costs(config, numerics, torch.float32, (length,))
    layout = make_layout(config, numerics, torch.float32, length, 1, 1, layers=config.layers)
    null_pages = sum(pool.page_bytes for pool in layout.pools)
    assert costs["contexts"][0]["sequence_bytes"] == CachePools(layout).nbytes() - null_pages
    assert costs["per_token"] == sum(layer["per_token"] for layer in costs["layers"])


def test_bytes_per_token_are_the_slope_of_sequence_bytes():
    config: Any = ModelVariant("v", "0,(4,16)*").config(TINY)
    costs = count_costs(config, get_numerics("serving"), torch.bfloat16, (1 << 20, 1 << 21))
    short, long = (row["sequence_bytes"] for row in costs["contexts"])
    assert (long - short) / (1 << 20) == costs["per_token"]


@pytest.mark.parametrize(("context", "index_topk"), [(300, 8), (300, 500), (7, 8)])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_flops_are_those_of_the_weights_and_the_keys(ratio, context, index_topk):
    """Each weight of a linear layer that takes part is one multiply-add; scores and sums by their definition."""
    config: Any = ModelVariant("v", f"{ratio}*", index_topk=index_topk).config(TINY)
    runner = ModelRunner.from_config(config, device="cpu", layers=[0], attention_only=True, max_model_len=512)
    spec, visible = config.layers[0], context // ratio if ratio else 0
    found = query_costs(spec, config, get_numerics("exact"), torch.float32, context)
    chooses = spec.has_indexer and visible > index_topk
    weights = {
        name: module.weight.numel()
        for name, module in runner.model.layers["0"].attn.named_modules()
        if isinstance(module, Linear) and (chooses or name not in ("indexer.wq_b", "indexer.weights_proj"))
    }
    assert len(weights) == 5 + 2 * (ratio > 0) + 2 * spec.has_indexer + 2 * chooses
    scores = visible * config.index_n_heads * config.index_head_dim if chooses else 0
    assert found["projection_flops"] + found["index_flops"] == 2 * (sum(weights.values()) + scores)
    keys = min(context, config.sliding_window) + (index_topk if chooses else visible)
    assert found["keys"] == keys
    assert found["attention_flops"] == 2 * 2 * keys * config.num_attention_heads * config.head_dim
    assert found["flops"] == found["projection_flops"] + found["attention_flops"] + found["index_flops"]
    record = 4 * config.head_dim * keys + (4 * config.index_head_dim * visible if chooses else 0)
    assert found["read_bytes"] == record


def test_dense_attention_holds_and_reads_every_token():
    config: Any = ModelVariant("v", attention="dense").config(TINY)
    costs = count_costs(config, get_numerics("exact"), torch.float32, (64, 1 << 20), range(config.num_hidden_layers))
    row = 4 * config.head_dim
    assert costs["per_token"] == row * config.num_hidden_layers
    for at in costs["contexts"]:
        assert at["sequence_bytes"] == at["read_bytes"] == row * config.num_hidden_layers * at["context"]
        assert at["by_layer"][0]["attention_flops"] == 4 * config.num_attention_heads * config.head_dim * at["context"]


def test_first_layers_of_dense_attention_may_keep_their_window():
    config: Any = ModelVariant("v").config(TINY)
    numerics = get_numerics("exact")
    variant = ModelVariant("v", attention="dense", window_layers=2)
    found, windows, dense = (
        count_costs(config, numerics, torch.float32, (1 << 20,), layers)["contexts"][0]["by_layer"]
        for layers in (variant.dense_layers(config), (), range(config.num_hidden_layers))
    )
    assert found == windows[:2] + dense[2:]
    assert windows[0] != dense[0]


def test_layers_that_share_entries_and_selections_are_counted_once():
    """Of ratios 0 2 2 2 1 1: layers 1 and 4 make entries, 1, 3 and 4 select, the second of ratio 1 only reads."""
    v41 = {"selection": 2, "candidates": 4}
    config: Any = ModelVariant("v", "0,2x3,1*", v41=v41, index_topk=4).config(TINY)
    costs = count_costs(config, get_numerics("exact"), torch.float32, (640,))
    rows = costs["contexts"][0]["by_layer"]
    made = [layer["per_token"] - layer["index_per_token"] for layer in costs["layers"]]
    entry, key = 4 * config.head_dim, 4 * config.index_head_dim
    assert made == [0, entry / 2, 0, 0, entry, 0]
    window = config.sliding_window
    assert [row["keys"] for row in rows] == [window] + [window + 4] * 5
    scored = [0, 320, 0, 320, 640, 0]
    assert [row["read_bytes"] for row in rows] == [
        entry * (window + 4 * (layer > 0)) + key * entries for layer, entries in enumerate(scored)
    ]
    limited: Any = ModelVariant("v", "0,2x3,1*", v41=v41 | {"selection": 1}, index_topk=4).config(TINY)
    later = count_costs(limited, get_numerics("exact"), torch.float32, (640,))["contexts"][0]["by_layer"][5]
    assert later["read_bytes"] == entry * (window + 4) + key * 16, "a later selection reads its candidates alone"
