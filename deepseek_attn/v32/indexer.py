"""DeepSeek-V3.2's lightning indexer: which tokens a query reads."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.attention.indexer import LightningIndexer
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.kernels.insert import CacheRows
from deepseek_attn.kernels.insert.types import IndexKeyRows
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule

K_NORM_EPS = 1e-6  # DeepSeek-V3.2 inference/model.py ignores the config's rms_norm_eps here


class LayerNorm(CheckpointModule):
    """Weight and bias of a layer norm, which `insert_latents` computes in float32 with one rounding at its end."""

    weight: Tensor
    bias: Tensor

    def __init__(self, dim: int, eps: float, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.eps = eps
        self.declare("weight", (dim,), torch.float32)
        self.declare("bias", (dim,), torch.float32)


class TokenIndexer(LightningIndexer):
    """The indexer of DeepSeek-V3.2: one key per token, projected from the attention input."""

    half_split = True
    ratio = 1

    def __init__(
        self,
        config: DeepseekV32Config,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(config, rope, numerics, dtype, device)
        self.wk = Linear(config.hidden_size, self.head_dim, numerics, dtype, device)
        self.k_norm = LayerNorm(self.head_dim, K_NORM_EPS, device)

    def key_rows(self, k: Tensor, slots: Tensor) -> IndexKeyRows:
        """Projected keys ``k [T, head_dim]`` of new tokens, as `insert_latents` writes them to ``slots [T]``."""
        norm, pool = self.k_norm, self.pool
        cache = CacheRows(pool.record, pool.tensor, pool.entries, slots)
        return IndexKeyRows(k, norm.weight, norm.bias, norm.eps, self.numerics.index_hadamard, cache)
