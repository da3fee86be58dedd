"""A DeepSeek-V4.1 of the sizes of a V4: entries of ratios 1 and 2, index keys and selections that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepseek_attn.config.engram import EngramConfig
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v41 import DeepseekV41Config

V41_KEYS = ("entries", "selection", "candidates", "engram")
SHARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim"),
    *("q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "scoring_func"),
    *("norm_topk_prob", "routed_scaling_factor", "swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    *("rms_norm_eps", "rope_theta", "compress_rope_theta", "rope_scaling", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id"),
)
BLOCK = 8  # entries of a block of candidates
NGRAM, HEADS, COLUMNS, ROWS = 3, 2, 32, 512  # of an Engram table


def make_v41(base: ModelConfig, ratios: list[int], options: Mapping[str, Any]) -> DeepseekV41Config:
    """V4.1 with the sizes of ``base`` and the ``ratios`` (0, 1 or 2) of its layers.

    Args:
        options: ``entries`` and ``selection``: each layer that makes entries, or a selection, serves so many layers of
            its ratio in a row (default: all of them; a maker of entries selects too). ``candidates``: the first
            layer of the last ratio keeps blocks of 8 entries, so many times ``index_topk`` in all, to which later
            selections are limited (published: 32). ``engram``: the first layer that makes entries has an n-gram memory.

    Raises:
        ValueError: an option is out of range, or `DeepseekV41Config` refuses the result.
    """
    spans = {key: options.get(key, len(ratios)) for key in ("entries", "selection")}
    for key, span in spans.items():
        if type(span) is not int or span < 1:
            raise ValueError(f"v41.{key} is {span!r}: expected a number of layers from 1 on")
    entries, selections, since = [], [], 0
    for layer, ratio in enumerate(ratios):
        since = 0 if layer == 0 or ratios[layer - 1] != ratio else since + 1
        if ratio and since % spans["entries"] == 0:
            entries.append(layer)
        if ratio and (since % spans["selection"] == 0 or layer in entries):
            selections.append(layer)
    raw: dict[str, Any] = {
        "model_type": "deepseek_v41_text", "compress_ratios": ratios, "num_nextn_predict_layers": 0,
        "kv_source_layer_ids": entries, "index_source_layer_ids": selections, "num_key_value_heads": 1,
        **{key: getattr(base, key) for key in SHARED},
    }  # fmt: skip
    if (candidates := options.get("candidates")) is not None:
        if type(candidates) is not int or candidates < 2 or not entries:
            raise ValueError(f"v41.candidates is {candidates!r}: expected a factor of index_topk from 2 on")
        blocks = -(-candidates * base.index_topk // BLOCK)
        last = max(layer for layer in entries if layer == 0 or ratios[layer - 1] != ratios[layer])
        names = ("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size")
        raw |= dict(zip(names, (last, blocks, BLOCK), strict=True))
    if engram := options.get("engram", False):
        if engram is not True or not entries:
            raise ValueError(f"v41.engram is {engram!r}: expected true or false, with a layer that makes entries")
        raw |= engram_keys(entries[0], base.vocab_size)
    return DeepseekV41Config.from_dict(raw, "v41")


def engram_keys(layer: int, vocab_size: int) -> dict[str, Any]:
    """The ``engram_*`` keys of one table before ``layer``."""
    keys = {
        "engram_layer_ids": (layer,), "engram_num_embeddings": (0,), "engram_max_ngram_size": NGRAM,
        "engram_n_heads": HEADS, "engram_head_dim": COLUMNS, "engram_vocab_size": ROWS, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": vocab_size,
    }  # fmt: skip
    rows = [found.num_rows for found in EngramConfig(**keys).hashes()]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()} | {
        "engram_num_embeddings": rows
    }
