"""Counted costs of a schedule: cache bytes, and bytes read and FLOPs of one query, per layer and context."""

from __future__ import annotations

from collections.abc import Container

import torch

from deepseek_attn.cache.layout import CacheLayout, PoolSpec, compressed_pages, make_layout
from deepseek_attn.cache.records import make_index_record, make_kv_record
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec
from deepseek_attn.lab.experiments.define.results import ContextCost, CostResult, LayerCost, LayerQuery, QueryCost
from deepseek_attn.runner.planner import fixed_pages, plan_layer


def count_costs(
    config: DeepseekV4Base,
    numerics: Numerics,
    dtype: torch.dtype,
    contexts: tuple[int, ...],
    dense_layers: Container[int] = (),
) -> CostResult:
    """Costs of every layer and their sums.

    Args:
        dtype: of plain records; contexts: tokens of a sequence, the querying token included.
        dense_layers: layers whose window holds every token, whatever ``config`` says.
    """
    layout = make_layout(config, numerics, dtype, max(contexts), 1, 1, layers=config.layers)
    pools = {spec.name: [pool for pool in layout.pools if pool.layer == spec.name] for spec in config.layers}
    layers: list[LayerCost] = []
    for spec in config.layers:
        plan, dense = plan_layer(spec, layout), spec.index in dense_layers
        per_token = sum(pool.page_bytes / pool.entries for pool in pools[spec.name]) if dense else plan.per_token
        layers.append(
            {
                "layer": spec.index,
                "kind": "dense" if dense else spec.kind,
                "overlap": spec.overlap,
                "indexer": spec.has_indexer,
                "per_token": per_token,
                "index_per_token": plan.index_per_token,
                "fixed": 0 if dense else plan.fixed,
            }
        )
    return {
        "per_token": sum(layer["per_token"] for layer in layers),
        "fixed": sum(layer["fixed"] for layer in layers),
        "layers": layers,
        "contexts": [_at(config, numerics, dtype, layout, pools, context, dense_layers) for context in contexts],
    }


def _at(
    config: DeepseekV4Base,
    numerics: Numerics,
    dtype: torch.dtype,
    layout: CacheLayout,
    pools: dict[str, list[PoolSpec]],
    context: int,
    dense_layers: Container[int],
) -> ContextCost:
    rows: list[QueryCost] = []
    for spec in config.layers:
        dense = spec.index in dense_layers
        cached = sum(sequence_bytes(pool, layout, context, dense) for pool in pools[spec.name])
        rows.append({"sequence_bytes": cached, **query_costs(spec, config, numerics, dtype, context, dense)})
    return {
        "context": context,
        "sequence_bytes": sum(row["sequence_bytes"] for row in rows),
        "read_bytes": sum(row["read_bytes"] for row in rows),
        "flops": sum(row["flops"] for row in rows),
        "by_layer": rows,
    }


def sequence_bytes(pool: PoolSpec, layout: CacheLayout, context: int, dense: bool = False) -> int:
    """Bytes of the pages of one pool that a sequence of ``context`` tokens holds; ``dense``: a page for all of them."""
    if dense:
        return -(-context // pool.entries) * pool.page_bytes
    pages = fixed_pages(pool, layout)
    if pool.group in layout.spans and pool.kind != "window":
        pages = compressed_pages(context, layout.spans[pool.group].ratio)
    return pages * pool.page_bytes


def query_costs(
    spec: LayerSpec, config: DeepseekV4Base, numerics: Numerics, dtype: torch.dtype, context: int, dense: bool = False
) -> LayerQuery:
    """Cache bytes that the last of ``context`` tokens reads in one layer, and the layer's FLOPs for it.

    A multiply-add is two FLOPs. ``flops`` is the sum of ``projection_flops`` (inputs, output and compressor; V4.1's
    n-gram memory), ``attention_flops`` and ``index_flops`` (scores of every entry that the layer's indexer may select;
    0 where all entries are read without them).
    """
    kv_record = make_kv_record(numerics.kv_record, config.nope_head_dim, config.qk_rope_head_dim, dtype)
    index_record = make_index_record(numerics.index_record, config.index_head_dim, dtype)
    visible = context // spec.ratio if spec.ratio else 0
    selects = spec.has_indexer or (isinstance(spec, V41LayerSpec) and spec.index_source is not None)
    needs_topk = selects and visible > config.index_topk
    selected = config.index_topk if needs_topk else visible
    keys = (context if dense else min(context, config.sliding_window)) + selected
    width = config.num_attention_heads * config.head_dim
    index_width = config.index_n_heads * config.index_head_dim
    hidden, rank = config.hidden_size, config.q_lora_rank
    weights = hidden * (rank + config.head_dim) + rank * width
    weights += config.o_lora_rank * (width + config.o_groups * hidden) + _entry_weights(spec, config)
    scored = _scored_entries(spec, config, visible) if needs_topk else 0
    index = scored * index_width + rank * index_width + hidden * config.index_n_heads if scored else 0
    attention = 4 * width * keys
    return {
        "keys": keys,
        "read_bytes": keys * kv_record.entry_bytes + scored * index_record.entry_bytes,
        "projection_flops": 2 * weights,
        "attention_flops": attention,
        "index_flops": 2 * index,
        "flops": 2 * weights + attention + 2 * index,
    }


def _entry_weights(spec: LayerSpec, config: DeepseekV4Base) -> int:
    """Number of weights that make a token's entries and index keys, V4.1's n-gram memory included."""
    hidden, head, index = config.hidden_size, config.head_dim, config.index_head_dim
    if isinstance(spec, V41LayerSpec):
        weights = hidden * head * (2 if spec.ratio > 1 else 1) + head * index if spec.owns_entries else 0
        if isinstance(config, DeepseekV41Config) and spec.has_engram:
            weights += config.memory.width * (config.hc_mult + 1) * hidden
        return weights
    weights = 2 * hidden * spec.coff * head if spec.ratio else 0
    return weights + (2 * hidden * spec.coff * index if spec.has_indexer else 0)


def _scored_entries(spec: LayerSpec, config: DeepseekV4Base, visible: int) -> int:
    """Entries whose index keys a query of the layer reads: all visible ones, or V4.1's candidates."""
    if not spec.has_indexer:
        return 0
    limited = isinstance(spec, V41LayerSpec) and spec.candidate_source not in (None, spec.index)
    return min(visible, config.candidate_entries) if limited and isinstance(config, DeepseekV41Config) else visible
