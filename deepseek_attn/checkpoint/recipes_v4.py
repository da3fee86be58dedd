"""Tensors of a published DeepSeek-V4 checkpoint, for random ones."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_attn.checkpoint.recipes import Recipe, mlp, prefixed
from deepseek_attn.config.model import LayerSpec, ModelConfig
from deepseek_attn.config.v4 import DeepseekV4Base

CLAMPED_GAIN = 4.0  # w1, w3 of every second expert: |w x| then passes the clamp at 10 about once in a hundred


def published_tensors_v4(config: ModelConfig) -> Iterator[tuple[str, Recipe]]:
    """Name and recipe of every tensor of a published checkpoint, scales excepted, from first to last layer."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield "embed.weight", Recipe("embed", (vocab, hidden))
    for layer in config.layers:
        yield from prefixed(layer.name, _block(config, layer))
    yield from _hc_head(config)
    yield "norm.weight", Recipe("norm", (hidden,))
    yield "head.weight", Recipe("linear", (vocab, hidden))
    for layer in config.mtp_layers:
        yield from prefixed(layer.name, _mtp(config, layer) if config.dspark is None else _draft_stage(config, layer))


def _block(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    yield from hyper_connections(config)
    yield from prefixed("attn", _attention(config, layer))
    yield from prefixed("ffn", moe(config, layer))


def hyper_connections(config: DeepseekV4Base) -> Iterator[tuple[str, Recipe]]:
    """Mixing weights of both sublayers of a block, and the norms of their inputs."""
    m, hidden = config.hc_mult, config.hidden_size
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn", Recipe("hc_fn", ((2 + m) * m, m * hidden))
        yield f"hc_{part}_base", Recipe("hc_base", ((2 + m) * m,))
        yield f"hc_{part}_scale", Recipe("hc_scale", (3,))
        yield f"{part}_norm.weight", Recipe("norm", (hidden,))


def shared_attention(config: DeepseekV4Base) -> Iterator[tuple[str, Recipe]]:
    """Tensors of every layer's attention: queries, window keys, output projection and sinks."""
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    yield "wq_a.weight", Recipe("quantized", (config.q_lora_rank, hidden))
    yield "q_norm.weight", Recipe("norm", (config.q_lora_rank,))
    yield "wq_b.weight", Recipe("quantized", (width, config.q_lora_rank))
    yield "wkv.weight", Recipe("quantized", (config.head_dim, hidden))
    yield "kv_norm.weight", Recipe("norm", (config.head_dim,))
    yield "wo_a.weight", Recipe("quantized", (config.o_groups * config.o_lora_rank, width // config.o_groups))
    yield "wo_b.weight", Recipe("quantized", (hidden, config.o_groups * config.o_lora_rank))
    yield "attn_sink", Recipe("sink", (config.num_attention_heads,))


def _attention(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    yield from shared_attention(config)
    if layer.ratio:
        yield from prefixed("compressor", _compressor(config, layer, config.head_dim))
    if layer.has_indexer:
        rows = config.index_n_heads * config.index_head_dim
        yield "indexer.wq_b.weight", Recipe("quantized", (rows, config.q_lora_rank))
        yield "indexer.weights_proj.weight", Recipe("linear", (config.index_n_heads, config.hidden_size))
        yield from prefixed("indexer.compressor", _compressor(config, layer, config.index_head_dim))


def _compressor(config: ModelConfig, layer: LayerSpec, dim: int) -> Iterator[tuple[str, Recipe]]:
    width = layer.coff * dim
    yield "ape", Recipe("ape", (layer.ratio, width))
    yield "wkv.weight", Recipe("linear", (width, config.hidden_size))
    yield "wgate.weight", Recipe("linear", (width, config.hidden_size))
    yield "norm.weight", Recipe("norm", (dim,))


def moe(config: DeepseekV4Base, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    """Router, routed experts and the shared one."""
    experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    yield "gate.weight", Recipe("linear", (experts, hidden))
    if layer.hash_routing:
        yield "gate.tid2eid", Recipe("table", (config.vocab_size, config.num_experts_per_tok))
    else:
        yield "gate.bias", Recipe("bias", (experts,))
    for index in range(experts):
        gain = CLAMPED_GAIN if index % 2 else 1.0
        yield from prefixed(f"experts.{index}", mlp(hidden, inner, "expert", gain))
    yield from prefixed("shared_experts", mlp(hidden, inner, "quantized", CLAMPED_GAIN))


def _hc_head(config: ModelConfig) -> Iterator[tuple[str, Recipe]]:
    m = config.hc_mult
    yield "hc_head_fn", Recipe("hc_fn", (m, m * config.hidden_size))
    yield "hc_head_base", Recipe("hc_base", (m,))
    yield "hc_head_scale", Recipe("hc_scale", (1,))


def _draft_stage(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    yield from _block(config.draft_stages, layer)
    yield from draft_ends(config, layer, "markov_w1", "markov_w2")
    if layer is config.mtp_layers[-1]:
        yield from _hc_head(config)


def draft_ends(config: DeepseekV4Base, layer: LayerSpec, embed: str, head: str) -> Iterator[tuple[str, Recipe]]:
    """Tensors of the first and the last DSpark stage besides blocks; ``embed`` and ``head`` of the Markov head."""
    hidden, markov = config.hidden_size, (config.vocab_size, config.drafter.dspark_markov_rank)
    if layer is config.mtp_layers[0]:
        yield "main_proj.weight", Recipe("quantized", (hidden, hidden * len(config.drafter.dspark_target_layer_ids)))
        yield "main_norm.weight", Recipe("norm", (hidden,))
    if layer is config.mtp_layers[-1]:
        yield "norm.weight", Recipe("norm", (hidden,))
        yield f"markov_head.{embed}.weight", Recipe("embed", markov)
        yield f"markov_head.{head}.weight", Recipe("linear", markov)


def _mtp(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Recipe]]:
    hidden = config.hidden_size
    yield from _block(config, layer)
    yield "e_proj.weight", Recipe("quantized", (hidden, hidden))
    yield "h_proj.weight", Recipe("quantized", (hidden, hidden))
    for name in ("enorm", "hnorm", "norm"):
        yield f"{name}.weight", Recipe("norm", (hidden,))
    yield from _hc_head(config)
