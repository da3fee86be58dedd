"""Floors against numbers counted by hand from the published dimensions, and from the definition by brute force."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import pytest
import torch

from deepseek_attn.cache.layout import make_layout
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.estimates.floors import (
    Floor,
    FloorWork,
    ModelWork,
    Product,
    StepShape,
    attention_tensors,
    expected_experts,
    tensors_below,
)
from tests.support.typed import required

CONFIGS = {
    name: ModelConfig.from_pretrained(name) for name in ("v4_flash", "v32", "v41_flash", "tiny", "tiny_v32", "tiny_v41")
}
SWA, C4A, C128A = 0, 2, 3  # layers of V4-Flash
V4_MATRICES = 1024 * 4096 + 32768 * 1024 + 512 * 4096 + 8192 * 4096 + 4096 * 8192
V4_SCALES = 4 * (8 * 32 + 256 * 8 + 4 * 32 + 64 * 32 + 32 * 64)
V4_VECTORS = 4 * (1024 + 512 + 64)  # norms of the query latent and of K, sinks
V32_MATRICES = 1536 * 7168 + 24576 * 1536 + 576 * 7168 + 32768 * 512 + 7168 * 16384
V32_SCALES = 4 * (12 * 56 + 192 * 12 + 5 * 56 + 256 * 4 + 56 * 128)
V32_INDEXER = 8192 * 1536 + 128 * 7168
V32_INDEXER_SCALES = 4 * (64 * 12 + 1 * 56)


def work(model, layer, batch, tokens, context, numerics="serving", dtype=torch.bfloat16, longest=131072):
    config = CONFIGS[model]
    numerics = numerics_for(config, numerics)
    layout = make_layout(config, numerics, dtype, longest, 128, 8192)
    shape = StepShape(batch, tokens, context)
    return ModelWork(config, numerics, dtype).attention(config.layers[layer], layout, shape)


def flops(work):
    return {(product.name, product.unit): product.flops for product in work.products}


def test_a_window_layer_at_decode():
    found = work("v4_flash", SWA, batch=8, tokens=1, context=8192)
    assert found.bytes == {
        "weights": V4_MATRICES + V4_SCALES + V4_VECTORS,
        "window": 8 * 127 * 584,  # the query's own key is new
        "new entries": 8 * 584,
        "input": 8 * 4096 * 2,
        "output": 8 * 4096 * 2,
    }
    assert flops(found) == {
        ("projections", "fp8"): 2 * 8 * V4_MATRICES,
        ("attention", "bf16"): 8 * 2 * 64 * (512 + 512) * 128,
    }


def test_a_c4a_layer_at_decode_whose_window_closes():
    found = work("v4_flash", C4A, batch=1, tokens=1, context=8192)
    compressors = 2 * (1024 * 4096 + 256 * 4096)  # K = V and index key, each with two overlapping windows
    indexer = 8192 * 1024
    assert found.bytes == {
        "weights": V4_MATRICES + V4_SCALES + V4_VECTORS
        + indexer + 4 * 64 * 8 + 2 * 64 * 4096  # indexer.wq_b in FP8, weights_proj in bf16
        + 2 * compressors + 4 * (4 * 1024 + 512 + 4 * 256 + 128),
        "window": 127 * 584,
        "selected entries": 512 * 584,
        "index keys": 2047 * 132,
        "new entries": 584 + 584 + 132,
        # raw projections of 3 + 4 earlier tokens are read, and one row is kept for the window that overlaps
        "compressor state": (7 + 1) * 4 * (2 * 1024 + 2 * 256),
        "input": 8192,
        "output": 8192,
    }  # fmt: skip
    assert flops(found) == {
        ("projections", "fp8"): 2 * (V4_MATRICES + indexer),
        ("projections", "bf16"): 2 * (compressors + 64 * 4096),
        ("index scores", "fp8"): 2 * 64 * 128 * 2048,
        ("attention", "bf16"): 2 * 64 * 1024 * (128 + 512),
    }


def test_a_c128a_layer_between_windows():
    found = work("v4_flash", C128A, batch=2, tokens=1, context=8190)
    assert found.bytes["selected entries"] == 2 * 63 * 584
    assert found.bytes["new entries"] == 2 * 584
    assert found.bytes["compressor state"] == 2 * 4 * 2 * 512  # one row is written
    assert "index keys" not in found.bytes
    assert flops(found)["attention", "bf16"] == 2 * 2 * 64 * 1024 * (128 + 63)
    closing = work("v4_flash", C128A, batch=2, tokens=1, context=8192)
    assert closing.bytes["compressor state"] == 2 * 127 * 4 * 2 * 512  # all earlier rows are read, none is kept


def test_v32_at_decode():
    found = work("v32", 3, batch=32, tokens=1, context=131072)
    assert found.bytes == {
        "weights": V32_MATRICES + V32_SCALES + 4 * (1536 + 512)
        + V32_INDEXER + V32_INDEXER_SCALES + 2 * 64 * 7168 + 4 * 2 * 128,
        "selected entries": 32 * 2048 * 656,
        "index keys": 32 * 131071 * 132,
        "new entries": 32 * (656 + 132),
        "input": 32 * 7168 * 2,
        "output": 32 * 7168 * 2,
    }  # fmt: skip
    wkv_b = 32768 * 512  # absorbed into queries and outputs: a bf16 product
    assert flops(found) == {
        ("projections", "fp8"): 2 * 32 * (V32_MATRICES - wkv_b + V32_INDEXER),
        ("projections", "bf16"): 2 * 32 * (wkv_b + 64 * 7168),
        ("index scores", "fp8"): 32 * 2 * 64 * 128 * 131072,
        ("attention", "bf16"): 32 * 2 * 128 * (576 + 512) * 2048,
    }


def test_v32_at_prefill_scores_every_visible_token():
    found = work("v32", 3, batch=1, tokens=4096, context=8192)
    visible = range(4097, 8193)
    assert flops(found)["index scores", "fp8"] == 2 * 64 * 128 * sum(visible)
    assert flops(found)["attention", "bf16"] == 2 * 128 * 1088 * 2048 * 4096
    assert found.bytes["selected entries"] == 4096 * 656  # every entry that was there before
    assert found.bytes["index keys"] == 4096 * 132
    assert found.bytes["new entries"] == 4096 * (656 + 132)


def test_nothing_is_scored_where_everything_is_selected():
    short = work("v32", 3, batch=1, tokens=1, context=2048)
    assert "index keys" not in short.bytes
    assert not any(product.name == "index scores" for product in short.products)
    longer = work("v32", 3, batch=1, tokens=1, context=2049)
    indexer = 8192 * 1536 + 4 * 64 * 12 + 2 * 64 * 7168  # wq_b and weights_proj; wk makes a key either way
    assert longer.bytes["weights"] - short.bytes["weights"] == indexer
    assert longer.bytes["index keys"] == 2048 * 132


def test_queries_of_one_request_share_what_there_is():
    assert work("v32", 3, batch=2, tokens=3, context=65536).bytes["selected entries"] == 2 * 3 * 2048 * 656
    assert work("v32", 3, batch=2, tokens=3, context=5000).bytes["selected entries"] == 2 * 4997 * 656
    assert work("v4_flash", SWA, batch=1, tokens=300, context=300).bytes.get("window", 0) == 0
    assert work("v4_flash", SWA, batch=1, tokens=300, context=300).bytes["new entries"] == 128 * 584


def test_layers_that_share_entries():
    """V4.1-Flash at ratio 1: a layer makes entries and candidates, one selects among these, one reads a selection."""
    full, reindex, reuse = (work("v41_flash", layer, batch=3, tokens=1, context=65536).bytes for layer in (20, 24, 21))
    entry, key, selection, candidates = 584, 132, 3 * 4 * 512, 3 * 4 * 2048
    assert full["new entries"] == 3 * (584 + entry + key)
    assert reindex["new entries"] == reuse["new entries"] == 3 * 584  # of the window
    assert [part["selected entries"] for part in (full, reindex, reuse)] == [3 * 512 * entry] * 3
    assert [part.get("index keys", 0) for part in (full, reindex, reuse)] == [3 * 65535 * key, 3 * 2048 * 8 * key, 0]
    assert [part["selection"] for part in (full, reindex, reuse)] == [selection] * 3
    assert [part.get("candidates", 0) for part in (full, reindex, reuse)] == [candidates, candidates, 0]
    assert full["weights"] > reindex["weights"] > reuse["weights"]


def test_entries_of_the_same_step_are_read_where_another_layer_makes_them():
    full, reuse = (work("v41_flash", layer, batch=2, tokens=300, context=300).bytes for layer in (2, 3))
    assert full["new entries"] == 2 * (128 * 584 + 150 * (584 + 132))
    assert full.get("selected entries", 0) == 0
    assert reuse["new entries"] == 2 * 128 * 584
    assert reuse["selected entries"] == 2 * 150 * 584
    assert not {"index keys", "selection", "candidates", "compressor state"} & reuse.keys()


@pytest.mark.parametrize("model", ["tiny", "tiny_v32", "tiny_v41"])
@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (1, 259), (5, 5), (37, 300), (130, 256)])
def test_keys_are_those_that_queries_see(model, tokens, context):
    """Products of attention and of scores, counted query by query and key by key."""
    config: Any = CONFIGS[model]
    for spec in config.layers:
        window = getattr(config, "sliding_window", 0)
        limited = getattr(spec, "candidate_source", None) not in (None, spec.index)
        limit = config.candidate_topk_blocks * config.candidate_block_size if limited else context
        selects = spec.has_indexer or model == "tiny_v41"
        ratio, topk = getattr(spec, "ratio", 1), config.index_topk
        attended = scored = 0
        for position in range(context - tokens, context):
            in_window = [key for key in range(position + 1) if position - key < window]
            entries = [e for e in range(context) if ratio and (e + 1) * ratio <= position + 1]
            attended += len(in_window) + (min(len(entries), required(topk)) if selects else len(entries))
            scored += min(len(entries), limit) if spec.has_indexer and len(entries) > topk else 0
        found = flops(work(model, spec.index, 3, tokens, context, longest=512))
        dims = config.head_dim + getattr(config, "kv_lora_rank", config.head_dim)
        assert found["attention", "bf16"] == 3 * 2 * config.num_attention_heads * dims * attended
        scores = 3 * 2 * config.index_n_heads * config.index_head_dim * scored
        assert found.get(("index scores", "fp8"), 0) == scores


def test_upper_layers_of_a_prompt():
    """Rows whose results the last token needs; layer 20 also makes entries of all rows."""
    config, shape = CONFIGS["v41_flash"], StepShape(2, 8192, 8192)
    numerics = numerics_for(config, "serving")
    layout, counted = (
        make_layout(config, numerics, torch.bfloat16, 8192, 2, 16384),
        ModelWork(config, numerics, torch.bfloat16),
    )
    rows = [counted.shape_of(spec, shape).tokens for spec in config.layers]
    assert rows == [8192] * 20 + [1 + 127 * above for above in range(19, -1, -1)]
    assert counted.shape_of(config.layers[39], StepShape(2, 1, 8192)).tokens == 1
    for layer in (19, 39):
        spec = config.layers[layer]
        own = counted.shape_of(spec, shape)
        assert counted.attention_to_end(spec, layout, shape) == counted.attention(spec, layout, own)
    source, others = config.layers[20], 2 * (8192 - 2414)
    found, queries = (
        counted.attention_to_end(source, layout, shape),
        counted.attention(source, layout, StepShape(2, 2414, 8192)),
    )
    assert found.bytes["new entries"] - queries.bytes["new entries"] == others * (584 + 132)
    assert found.bytes["input"] == 2 * 8192 * 5120 * 2
    assert found.bytes["weights"] == queries.bytes["weights"]
    assert found.total_flops - queries.total_flops == 2 * others * (512 * 5120 + 128 * 512)


def test_exact_numerics_read_weights_as_they_are_kept():
    found = work("v32", 3, 1, 1, 8192, numerics="exact", dtype=torch.float32)
    matrices = V32_MATRICES + V32_INDEXER + 64 * 7168
    assert found.bytes["weights"] == 4 * (matrices + 1536 + 512 + 2 * 128)
    assert {product.unit for product in found.products} == {"bf16"}
    assert found.bytes["selected entries"] == 2048 * 576 * 4


def part(work, model, layer, rows, numerics="serving", dtype=torch.bfloat16):
    config = CONFIGS[model]
    return work(ModelWork(config, numerics_for(config, numerics), dtype), config.layers[layer], rows)


FP4_EXPERT, FP8_SHARED = 3 * 2048 * 4096 * 17 // 32, 3 * (2048 * 4096 + 4 * 16 * 32)
FP8_EXPERT_V32 = 3 * (2048 * 7168 + 4 * 16 * 56)


def test_experts_of_a_v4_layer():
    found = part(ModelWork.experts, "v4_flash", C4A, rows=1)
    activations = {"input": 4096 * 2, "output": 4096 * 2}
    assert found.bytes == {"weights": FP8_SHARED, "routed weights": 6 * FP4_EXPERT} | activations
    assert flops(found) == {
        ("projections", "fp8"): 2 * 3 * 2048 * 4096,
        ("routed experts", "fp8"): 6 * 2 * 3 * 2048 * 4096,
    }
    exact = part(ModelWork.experts, "v4_flash", C4A, 1, "exact", torch.float32)
    assert exact.bytes["routed weights"] == 6 * 3 * 2048 * 4096 * 4
    assert {product.unit for product in exact.products} == {"bf16"}


def test_experts_of_v32_and_its_dense_layers():
    found = part(ModelWork.experts, "v32", 3, rows=1)
    assert found.bytes["routed weights"] == 8 * FP8_EXPERT_V32
    assert found.bytes["weights"] == FP8_EXPERT_V32  # the shared one
    dense = part(ModelWork.experts, "v32", 0, rows=5)
    assert "routed weights" not in dense.bytes
    assert dense.bytes["weights"] == 3 * (18432 * 7168 + 4 * 144 * 56)
    assert part(ModelWork.routing, "v32", 0, rows=5).total_bytes == 0


@pytest.mark.parametrize(("experts", "topk", "rows"), [(8, 2, 1), (8, 2, 3), (6, 3, 2), (4, 4, 5)])
def test_expected_experts(experts, topk, rows):
    """The mean over all choices, by brute force."""
    choices = list(itertools.combinations(range(experts), topk))
    counts = [len(set().union(*picks)) for picks in itertools.product(choices, repeat=rows)]
    assert expected_experts(experts, topk, rows) == pytest.approx(sum(counts) / len(counts))


def test_routing_norms_and_head():
    found = part(ModelWork.routing, "v4_flash", C128A, rows=3)
    assert found.bytes == {"weights": 256 * 4096 * 2 + 256 * 4, "input": 3 * 4096 * 2, "output": 3 * 6 * 12}
    assert flops(found) == {("projections", "bf16"): 2 * 3 * 256 * 4096}
    hashed = part(ModelWork.routing, "v4_flash", SWA, rows=3)
    assert hashed.bytes["table"] == 3 * 6 * 8
    streams = 2 * 3 * (4 + 1) * 4096 * 2  # two sublayers: four streams and one input or output of each token
    found = part(ModelWork.norms, "v4_flash", C4A, rows=3)
    assert found.bytes == {
        "weights": 4 * 2 * (24 * 4 * 4096 + 24 + 3 + 4096), "input": streams, "output": streams,
    }  # fmt: skip
    assert flops(found) == {("projections", "bf16"): 2 * 3 * 2 * 24 * 4 * 4096}
    plain = part(ModelWork.norms, "v32", 3, rows=3)
    assert plain.bytes == {"weights": 4 * 2 * 7168} | dict.fromkeys(("input", "output"), 2 * 3 * 2 * 7168 * 2)
    config = CONFIGS["v4_flash"]
    found = ModelWork(config, numerics_for(config, "serving"), torch.bfloat16).head(2)
    matrix, collapse = config.vocab_size * 4096, 4 * 4 * 4096
    assert found.bytes == {
        "weights": 2 * matrix + 4 * (collapse + 4 + 1 + 4096), "input": 2 * 4 * 4096 * 2,
        "logits": 2 * 4 * config.vocab_size,
    }  # fmt: skip
    assert flops(found) == {("projections", "bf16"): 2 * 2 * (matrix + collapse)}


@pytest.mark.parametrize("model", ["tiny", "tiny_v32", "tiny_v41"])
def test_every_tensor_of_a_block_is_in_one_stage(model):
    config = CONFIGS[model]
    numerics = numerics_for(config, "exact")
    wanted = ("ffn.gate.", "engram.")[: 2 if model == "tiny_v41" else 1]
    spec = next(spec for spec in config.layers if all(tensors_below(config, f"{spec.name}.{part}") for part in wanted))
    counter = ModelWork(config, numerics, torch.float32)
    works = [counter.experts(spec, 0), counter.routing(spec, 0), counter.norms(spec, 0), counter.engram(spec, 0)]
    tensors = tensors_below(config, f"{spec.name}.")
    counted = sum(work.bytes.get("weights", 0) for work in works) / 4
    others = ("attn.", "ffn.experts.", "ffn.gate.tid2eid", "engram.embed.")
    assert counted == sum(prod(recipe.shape) for name, recipe in tensors if not name.startswith(others))


@pytest.mark.parametrize("model", ["tiny", "tiny_v32", "tiny_v41"])
def test_weights_are_those_of_the_layer(model):
    """Names and shapes of the tensors that the module itself declares."""
    from deepseek_attn.layers.weights import checkpoint_slots
    from deepseek_attn.runner.model_runner import ModelRunner

    config = CONFIGS[model]
    layers = [0] if model == "tiny_v32" else [0, 1, 2, 3]
    runner = ModelRunner.from_config(
        config, layers=layers, attention_only=True, device="cpu", max_model_len=64, max_num_seqs=1
    )
    for layer in layers:
        slots = checkpoint_slots(runner.model.layers[str(layer)].attn)
        tensors = dict(attention_tensors(config, f"layers.{layer}"))
        assert {name: recipe.shape for name, recipe in tensors.items()} == {n: s.shape for n, s in slots.items()}


def test_the_floor_is_the_longer_of_bytes_and_products():
    rates = {"copy": 4e12, "bf16": 8e14, "fp8": 1.6e15}
    part = FloorWork({"weights": 8_000_000}, (Product("projections", "fp8", 1_600_000_000),))
    assert part.floor(rates) == Floor(2.0, 1.0)
    assert (part.floor(rates).microseconds, part.floor(rates).bound) == (2.0, "bytes")
    both = part + FloorWork({"weights": 1, "input": 3}, (Product("projections", "fp8", 1), Product("x", "bf16", 5)))
    assert both.bytes == {"weights": 8_000_001, "input": 3}
    assert both.total_bytes == 8_000_004
    assert both.products == (Product("projections", "fp8", 1_600_000_001), Product("x", "bf16", 5))
    assert both.total_flops == 1_600_000_006
    heavy = part + FloorWork({}, (Product("attention", "bf16", 8_000_000_000),))
    assert heavy.floor(rates).flops_us == pytest.approx(11.0)
    assert heavy.floor(rates).bound == "flops"
    assert part.floor({"copy": 4e12, "bf16": 8e14}).flops_us == 2.0  # no FP8 unit
