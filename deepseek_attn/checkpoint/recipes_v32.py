"""Tensors of a published DeepSeek-V3 or V3.2 checkpoint, for random ones."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_attn.checkpoint.names_v32 import published_name_v32
from deepseek_attn.checkpoint.recipes import Recipe, mlp, prefixed
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec


def published_tensors_v32(config: DeepseekV32Config) -> Iterator[tuple[str, Recipe]]:
    """Name and recipe of every tensor, scales excepted, from first to last layer.

    The MTP layer has copies of the embedding and of the output head, which loaders share.
    """
    for name, recipe in _tensors(config):
        yield published_name_v32(name, config.num_hidden_layers), recipe


def _tensors(config: DeepseekV32Config) -> Iterator[tuple[str, Recipe]]:
    """The same under the model's names."""
    embedding, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    yield "embed.weight", Recipe("embed", embedding)
    for layer in config.layers:
        yield from prefixed(layer.name, _block(config, layer))
    yield "norm.weight", Recipe("norm", (hidden,))
    yield "head.weight", Recipe("linear", embedding)
    for layer in config.mtp_layers:
        yield f"{layer.name}.embed_tokens.weight", Recipe("embed", embedding, same_as="model.embed_tokens.weight")
        for name in ("enorm", "hnorm", "norm"):
            yield f"{layer.name}.{name}.weight", Recipe("norm", (hidden,))
        yield f"{layer.name}.eh_proj.weight", Recipe("linear", (hidden, 2 * hidden))
        yield from prefixed(layer.name, _block(config, layer))
        yield f"{layer.name}.shared_head.head.weight", Recipe("linear", embedding, same_as="lm_head.weight")


def _block(config: DeepseekV32Config, layer: V32LayerSpec) -> Iterator[tuple[str, Recipe]]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield "attn_norm.weight", Recipe("norm", (hidden,))
    yield from prefixed("attn", _attention(config))
    yield "ffn_norm.weight", Recipe("norm", (hidden,))
    if layer.dense_ffn:
        yield from prefixed("ffn", mlp(hidden, config.intermediate_size, "quantized"))
        return
    yield "ffn.gate.weight", Recipe("linear", (config.n_routed_experts, hidden))
    yield "ffn.gate.bias", Recipe("bias", (config.n_routed_experts,))
    for index in range(config.n_routed_experts):
        yield from prefixed(f"ffn.experts.{index}", mlp(hidden, inner, "expert"))
    yield from prefixed("ffn.shared_experts", mlp(hidden, inner * config.n_shared_experts, "quantized"))


def _attention(config: DeepseekV32Config) -> Iterator[tuple[str, Recipe]]:
    hidden, rank, latent = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
    heads = config.num_attention_heads
    yield "wq_a.weight", Recipe("quantized", (rank, hidden))
    yield "q_norm.weight", Recipe("norm", (rank,))
    yield "wq_b.weight", Recipe("quantized", (heads * config.qk_head_dim, rank))
    yield "wkv_a.weight", Recipe("quantized", (latent + config.qk_rope_head_dim, hidden))
    yield "kv_norm.weight", Recipe("norm", (latent,))
    yield "wkv_b.weight", Recipe("quantized", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent))
    yield "wo.weight", Recipe("quantized", (hidden, heads * config.v_head_dim))
    if config.has_indexer:
        index_heads, index_dim, _ = config.index_sizes
        yield "indexer.wq_b.weight", Recipe("quantized", (index_heads * index_dim, rank))
        yield "indexer.wk.weight", Recipe("quantized", (index_dim, hidden))
        yield "indexer.k_norm.weight", Recipe("index_norm", (index_dim,))
        yield "indexer.k_norm.bias", Recipe("index_bias", (index_dim,))
        yield "indexer.weights_proj.weight", Recipe("linear", (index_heads, hidden))
