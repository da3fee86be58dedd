"""Counted costs of a schedule: cache bytes, and bytes read and FLOPs of one query, per layer and context."""

from __future__ import annotations

import torch

from deepseek_attn.cache.layout import CacheLayout, PoolSpec, compressed_pages, make_layout
from deepseek_attn.cache.records import make_index_record, make_kv_record
from deepseek_attn.config.model import LayerSpec, ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.lab.experiments.define.results import ContextCost, CostResult, LayerCost, LayerQuery, QueryCost
from deepseek_attn.runner.planner import fixed_pages, plan_layer


def count_costs(config: ModelConfig, numerics: Numerics, dtype: torch.dtype, contexts: tuple[int, ...]) -> CostResult:
    """Costs of every layer and their sums.

    Args:
        dtype: of plain records; contexts: tokens of a sequence, the querying one included.
    """
    layout = make_layout(config, numerics, dtype, max(contexts), 1, 1, layers=config.layers)
    pools = {spec.name: [pool for pool in layout.pools if pool.layer == spec.name] for spec in config.layers}
    layers: list[LayerCost] = []
    for spec in config.layers:
        plan = plan_layer(spec, layout)
        layers.append(
            {
                "layer": spec.index,
                "kind": spec.kind,
                "overlap": spec.overlap,
                "indexer": spec.has_indexer,
                "per_token": plan.per_token,
                "index_per_token": plan.index_per_token,
                "fixed": plan.fixed,
            }
        )
    return {
        "per_token": sum(layer["per_token"] for layer in layers),
        "fixed": sum(layer["fixed"] for layer in layers),
        "layers": layers,
        "contexts": [_at(config, numerics, dtype, layout, pools, context) for context in contexts],
    }


def _at(
    config: ModelConfig,
    numerics: Numerics,
    dtype: torch.dtype,
    layout: CacheLayout,
    pools: dict[str, list[PoolSpec]],
    context: int,
) -> ContextCost:
    rows: list[QueryCost] = []
    for spec in config.layers:
        cached = sum(sequence_bytes(pool, layout, context) for pool in pools[spec.name])
        rows.append({"sequence_bytes": cached, **query_costs(spec, config, numerics, dtype, context)})
    return {
        "context": context,
        "sequence_bytes": sum(row["sequence_bytes"] for row in rows),
        "read_bytes": sum(row["read_bytes"] for row in rows),
        "flops": sum(row["flops"] for row in rows),
        "by_layer": rows,
    }


def sequence_bytes(pool: PoolSpec, layout: CacheLayout, context: int) -> int:
    """Bytes of the pages of one pool that a sequence of ``context`` tokens holds."""
    pages = fixed_pages(pool, layout)
    if pool.group in layout.spans and pool.kind != "window":
        pages = compressed_pages(context, layout.spans[pool.group].ratio)
    return pages * pool.page_bytes


def query_costs(
    spec: LayerSpec, config: ModelConfig, numerics: Numerics, dtype: torch.dtype, context: int
) -> LayerQuery:
    """Cache bytes that the last of ``context`` tokens reads in one layer, and the layer's FLOPs for it.

    A multiply-add is two FLOPs. ``flops`` is the sum of ``projection_flops`` (inputs, output and compressor),
    ``attention_flops`` and ``index_flops`` (scores of every visible entry; 0 where all entries are read without them).
    """
    kv_record = make_kv_record(numerics.kv_record, config.nope_head_dim, config.qk_rope_head_dim, dtype)
    index_record = make_index_record(numerics.index_record, config.index_head_dim, dtype)
    visible = context // spec.ratio if spec.ratio else 0
    needs_topk = spec.has_indexer and visible > config.index_topk
    selected = config.index_topk if needs_topk else visible
    keys = min(context, config.sliding_window) + selected
    width = config.num_attention_heads * config.head_dim
    index_width = config.index_n_heads * config.index_head_dim
    hidden, rank = config.hidden_size, config.q_lora_rank
    weights = hidden * (rank + config.head_dim) + rank * width
    weights += config.o_lora_rank * (width + config.o_groups * hidden)
    if spec.ratio:
        weights += 2 * hidden * spec.coff * config.head_dim
    if spec.has_indexer:
        weights += 2 * hidden * spec.coff * config.index_head_dim
    index = visible * index_width + rank * index_width + hidden * config.index_n_heads if needs_topk else 0
    attention = 4 * width * keys
    return {
        "keys": keys,
        "read_bytes": keys * kv_record.entry_bytes + (visible * index_record.entry_bytes if needs_topk else 0),
        "projection_flops": 2 * weights,
        "attention_flops": attention,
        "index_flops": 2 * index,
        "flops": 2 * weights + attention + 2 * index,
    }
