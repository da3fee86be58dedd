"""Tensors of a published DeepSeek-V4.1 checkpoint, for random ones. The vision part is left out."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_attn.checkpoint.recipes import ROWS, Recipe, prefixed
from deepseek_attn.checkpoint.recipes_v4 import draft_ends, hyper_connections, moe, shared_attention
from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec


def published_tensors_v41(config: DeepseekV41Config) -> Iterator[tuple[str, Recipe]]:
    """Name and recipe of every tensor of the text model and the drafter, scales excepted, from first to last layer."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield "embed.weight", Recipe("embed", (vocab, hidden))
    for layer in config.layers:
        yield from prefixed(layer.name, _block(config, layer))
    yield "norm.weight", Recipe("norm", (hidden,))
    yield "head.weight", Recipe("linear", (vocab, hidden))
    for layer in config.mtp_layers:
        yield from prefixed(layer.name, _block(config.draft_stages, layer))
        yield from prefixed(layer.name, draft_ends(config, layer, "embed", "head"))


def _block(config: DeepseekV41Config, layer: V41LayerSpec) -> Iterator[tuple[str, Recipe]]:
    yield from hyper_connections(config)
    yield from prefixed("attn", _attention(config, layer))
    yield from prefixed("ffn", moe(config, layer))
    if layer.has_engram:
        yield from prefixed("engram", _engram(config, layer))


def _attention(config: DeepseekV41Config, layer: V41LayerSpec) -> Iterator[tuple[str, Recipe]]:
    yield from shared_attention(config)
    if layer.owns_entries:
        entry = (config.head_dim, config.hidden_size)
        yield "compressor.wkv.weight", Recipe("linear", entry)
        if layer.ratio > 1:
            yield "compressor.wgate.weight", Recipe("linear", entry)
        yield "compressor.norm.weight", Recipe("norm", (config.head_dim,))
        yield "indexer.wk.weight", Recipe("linear", (config.index_head_dim, config.head_dim))
        yield "indexer.k_norm.weight", Recipe("norm", (config.index_head_dim,))
    if layer.has_indexer:
        rows = config.index_n_heads * config.index_head_dim
        yield "indexer.wq_b.weight", Recipe("quantized", (rows, config.q_lora_rank))
        yield "indexer.weights_proj.weight", Recipe("linear", (config.index_n_heads, config.hidden_size))


def _engram(config: DeepseekV41Config, layer: V41LayerSpec) -> Iterator[tuple[str, Recipe]]:
    engram, streams = config.memory, (config.hc_mult, config.hidden_size)
    yield "embed.weight", Recipe(ROWS, (engram.hash_of(layer.index).num_rows, engram.engram_head_dim))
    yield "wkv.weight", Recipe("quantized", ((config.hc_mult + 1) * config.hidden_size, engram.width))
    for name in ("q_weight", "k_weight"):
        yield name, Recipe("norm", streams)
