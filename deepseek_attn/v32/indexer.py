"""DeepSeek-V3.2's lightning indexer: which tokens a query reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.attention.indexer import LightningIndexer
from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.common.norm_rope import apply_rope_half_split
from deepseek_attn.kernels.common.quant import hadamard
from deepseek_attn.kernels.indexer import IndexQueries, index_query
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule

K_NORM_EPS = 1e-6  # DeepSeek-V3.2 inference/model.py ignores the config's rms_norm_eps here


class LayerNorm(CheckpointModule):
    """Layer norm with weight and bias: float32 inside, one rounding to the input dtype."""

    def __init__(self, dim: int, eps: float, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.dim, self.eps = dim, eps
        self.declare("weight", (dim,), torch.float32)
        self.declare("bias", (dim,), torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), (self.dim,), self.weight, self.bias, self.eps).to(x.dtype)


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

    def bind(self, pool: Pool) -> None:
        """Sets the pool of the keys."""
        self.pool = pool

    def insert(self, x: Tensor, positions: Tensor, step: StepMetadata) -> None:
        """Writes the keys of new tokens, from the attention input ``x [T, hidden_size]``, to the cache."""
        k = apply_rope_half_split(self.k_norm(self.wk(x)), self.rope.at(positions))
        self.pool.insert(step.sparse[1].slot_mapping, hadamard(k) if self.numerics.index_hadamard else k)

    def queries(self, x: Tensor, qr: Tensor, step: StepMetadata) -> IndexQueries:
        """Queries of a step from ``x`` and the normed query latent ``qr [T, q_lora_rank]``."""
        return index_query(self.query_rows(self.wq_b(qr), self.weights_proj(x), step.positions))
