"""Sizes of models that experiments train from scratch: about 1, 10 and 50 million parameters."""

from __future__ import annotations

from typing import Any

from deepseek_attn.config.model import ModelConfig

SHARED: dict[str, Any] = {
    **{"num_nextn_predict_layers": 0, "num_hash_layers": 0, "quantization_config": None, "compress_ratios": None},
    **{"vocab_size": 512, "sliding_window": 16, "index_topk": 8, "max_position_embeddings": 4096},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2, "hc_sinkhorn_iters": 2, "o_groups": 2},
}
SIZES: dict[str, dict[str, Any]] = {
    "1m": {
        **{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64},
        **{"qk_rope_head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 64, "moe_intermediate_size": 64},
        **{"index_n_heads": 4, "index_head_dim": 64},
    },
    "10m": {
        **{"hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 6, "head_dim": 96},
        **{"qk_rope_head_dim": 32, "q_lora_rank": 192, "o_lora_rank": 160, "moe_intermediate_size": 256},
        **{"index_n_heads": 8, "index_head_dim": 64},
    },
    "50m": {
        **{"hidden_size": 640, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 128},
        **{"qk_rope_head_dim": 64, "q_lora_rank": 384, "o_lora_rank": 320, "moe_intermediate_size": 512},
        **{"index_n_heads": 8, "index_head_dim": 128},
    },
}


def sized_model(name: str) -> ModelConfig:
    """The model of one of `SIZES`: V4 with window-only layers, to be given a schedule."""
    sizes = SIZES[name]
    model = ModelConfig.from_preset("tiny")
    assert isinstance(model, ModelConfig)
    return model.replace(**SHARED | sizes | {"compress_ratios": [0] * sizes["num_hidden_layers"]})
