"""Attention layers of transformers with the weights of a checkpoint, in float32. Needs ``pip install transformers``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from transformers import (
        DeepseekV3Config,
        DeepseekV4Config,
        DeepseekV32Config as TransformersV32Config,
        PretrainedConfig,
    )
except ImportError as error:
    raise ImportError("TransformersLayer needs transformers 5.17 or later: pip install transformers") from error
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

from deepseek_attn.checkpoint import CanonicalSource, CheckpointSource, hf_name, read_float32
from deepseek_attn.checkpoint.names import scale_name
from deepseek_attn.checkpoint.names_v32 import canonical_name_v32, published_name_v32
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.v32 import DeepseekV32Config

EAGER: dict[str, Any] = {"attn_implementation": "eager"}  # an option of every config that no config class declares
LAYER_TYPES = {
    (False, False): "heavily_compressed_attention",
    (True, True): "compressed_sparse_attention",
}


class TransformersLayer:
    """One attention layer of transformers, eager and in float32; only its tensors are read.

    Args:
        config: a schedule that transformers can express; see `hf_config`.
        source: the weights, in any published format.
    """

    def __init__(self, config: AnyConfig, source: CheckpointSource, layer: int):
        self.config, settings = config, hf_config(config)
        if isinstance(config, DeepseekV32Config):
            count = config.num_hidden_layers
            source = CanonicalSource(source, lambda name: canonical_name_v32(name, count))
            names = {name: published_name_v32(name, count) for name in source.entries()}
        else:
            source = CanonicalSource(source)
            names = {name: hf_name(name) for name in source.entries()}
        sparse = {"deepseek_v4": DeepseekV4Attention, "deepseek_v32": DeepseekV32Attention}
        self.attention = sparse.get(config.model_type, DeepseekV3Attention)(settings, layer).float().eval()
        rotary = {"deepseek_v4": DeepseekV4RotaryEmbedding, "deepseek_v32": DeepseekV32RotaryEmbedding}
        self.rotary = rotary.get(config.model_type, DeepseekV3RotaryEmbedding)(settings)
        scales, prefix = {scale_name(name) for name in names}, f"model.layers.{layer}.self_attn."
        state = {
            hf.removeprefix(prefix): read_float32(source, name)
            for name, hf in names.items()
            if hf.startswith(prefix) and name not in scales
        }
        self.attention.load_state_dict(state)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output ``[T, hidden_size]`` for the normed hidden states of a whole sequence."""
        x, positions = x.detach().cpu().float()[None], torch.arange(len(x), device="cpu")[None]
        distance = positions.T - positions
        seen = distance >= 0
        if isinstance(self.config, ModelConfig):
            seen &= distance < self.config.sliding_window
            angles = {name: self.rotary(x, positions, layer_type=name) for name in ("main", "compress")}
        else:
            angles = self.rotary(x, positions)
        mask = torch.zeros(seen.shape, dtype=torch.float32, device="cpu").masked_fill(
            ~seen, torch.finfo(torch.float32).min
        )[None, None]
        return self.attention(x, position_embeddings=angles, position_ids=positions, attention_mask=mask)[0][0]


def hf_config(config: AnyConfig) -> PretrainedConfig:
    """The transformers config of the same model.

    Raises:
        ValueError: a schedule that transformers cannot express.
    """
    if isinstance(config, DeepseekV32Config):
        values: dict[str, Any] = {
            k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "architectures")
        }
        cls = TransformersV32Config if config.model_type == "deepseek_v32" else DeepseekV3Config
        values |= {"torch_dtype": "float32"} | EAGER
        return cls(**values)
    if not isinstance(config, ModelConfig):
        raise ValueError(f"transformers has no {config.model_type}")
    kinds, rates = [], {}
    for spec in config.layers:
        kind = LAYER_TYPES.get((spec.overlap, spec.has_indexer)) if spec.ratio else "sliding_attention"
        if kind is None or (spec.ratio and rates.setdefault(kind, spec.ratio) != spec.ratio):
            raise ValueError(f"transformers has no schedule with layer {spec}")
        kinds.append(kind)
    shared = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank"),
        *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "scoring_func"),
        *("norm_topk_prob", "routed_scaling_factor", "swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
        *("rms_norm_eps", "rope_theta", "compress_rope_theta", "max_position_embeddings"),
    )
    fraction = config.qk_rope_head_dim / config.head_dim
    main = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": fraction}
    compress = main | {"rope_theta": config.compress_rope_theta}
    if config.rope_scaling is not None:
        scaling = {k: v for k, v in config.rope_scaling.items() if k != "type"}
        compress |= scaling | {"rope_type": "yarn", "attention_factor": 1.0}
    hashed = [spec.hash_routing for spec in config.layers]
    return DeepseekV4Config(
        **{name: getattr(config, name) for name in shared},
        layer_types=kinds,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128} | rates,
        mlp_layer_types=["hash_moe" if is_hash else "moe" for is_hash in hashed],
        partial_rotary_factor=fraction,
        rope_parameters={"main": main, "compress": compress},
        num_nextn_predict_layers=0,
        **EAGER,
    )
