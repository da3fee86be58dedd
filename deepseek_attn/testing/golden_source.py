"""The small models of golden fixtures: weights that every machine makes bit for bit, from integers alone."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from deepseek_attn.checkpoint.published import PublishedSource
from deepseek_attn.checkpoint.random import splitmix64
from deepseek_attn.checkpoint.recipes import Recipe
from deepseek_attn.config.model import AnyConfig, ModelConfig

SHARED = {
    "vocab_size": 288, "hidden_size": 128, "num_attention_heads": 2, "q_lora_rank": 128, "index_n_heads": 16,
    "moe_intermediate_size": 128,
}  # fmt: skip
CHANGES = {
    "v4": ("tiny", {
        **SHARED, "head_dim": 512, "o_lora_rank": 64, "index_topk": 6, "n_routed_experts": 4, "num_hash_layers": 1,
        "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0],
    }),
    "v32": ("tiny_v32", {
        **SHARED, "intermediate_size": 128, "kv_lora_rank": 512, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "index_topk": 12,
    }),
    "v41": ("tiny_v41", {"head_dim": 512, "qk_rope_head_dim": 64, "num_attention_heads": 2, "index_head_dim": 128,
             "index_n_heads": 16}),
}  # fmt: skip
# Mean and standard deviation by kind of recipe; the standard deviation of a matrix falls with its number of inputs.
SPREAD = {
    "embed": (0.0, 1.0), "norm": (1.0, 0.1), "ape": (0.0, 0.5), "sink": (0.0, 1.0), "hc_fn": (0.0, 0.02),
    "hc_base": (0.0, 0.5), "hc_scale": (1.0, 0.25), "bias": (0.0, 0.1), "index_norm": (1.0, 0.1),
    "index_bias": (0.0, 0.2),
}  # fmt: skip


def golden_config(family: str) -> AnyConfig:
    """The config of a family's golden model: cache entries of the published size, everything else small."""
    preset, changes = CHANGES[family]
    return ModelConfig.from_preset(preset).replace(**changes)


def uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """Float32 values of mean 0 and variance 1 in steps of ``2**-23 * sqrt(3)``: value i is splitmix64 of i and a name.

    The argument of splitmix64's finaliser is i plus blake2b-64 of ``name``, little endian. The upper 24 bits of the
    result are multiplied by ``float32(2**-23 * sqrt(3))``; then ``float32(sqrt(3))`` is subtracted.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    places = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(seed)
    values = (splitmix64(places) >> np.uint64(40)).astype(np.float32)
    return torch.from_numpy(values).mul_(2**-23 * 3**0.5).sub_(3**0.5).view(shape)


class GoldenSource(PublishedSource):
    """The weights of a golden model: `uniform` of each tensor's published name, scaled by its kind, then quantised."""

    def values(self, name: str, recipe: Recipe) -> Tensor:
        drawn = uniform(recipe.same_as or name, recipe.shape)
        if recipe.kind == "table":
            vocab, chosen = recipe.shape
            keys = uniform(name, (vocab, self.config.n_routed_experts))
            return keys.sort(dim=1, stable=True).indices[:, :chosen].contiguous()
        mean, spread = SPREAD.get(recipe.kind, (0.0, max(0.02, recipe.shape[-1] ** -0.5) * recipe.gain))
        return drawn * spread + mean
