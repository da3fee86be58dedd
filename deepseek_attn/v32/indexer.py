"""DeepSeek-V3.2's lightning indexer: which tokens a query reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepseek_attn.attention.indexer import LightningIndexer, select_all
from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.kernels.common.norm_rope import apply_rope_half_split
from deepseek_attn.kernels.common.quant import hadamard
from deepseek_attn.kernels.indexer import PagedIndexKeys, index_query, index_select
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule
from deepseek_attn.v32.step_metadata import TokenStepMetadata

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
    """The indexer of DeepSeek-V3.2: one key per token, projected from the attention input.

    Attributes:
        pool: the layer's index keys; topk_indices_buffer: int32 ``[max_num_batched_tokens, index_topk]``, shared by all
            layers: a layer's attention reads it right after the layer's indexer has written it. Both set by `bind`.
    """

    half_split = True
    pool: Pool
    topk_indices_buffer: torch.Tensor

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

    def bind(self, pool: Pool, topk_indices_buffer: torch.Tensor) -> None:
        self.pool, self.topk_indices_buffer = pool, topk_indices_buffer

    def forward(self, x: torch.Tensor, qr: torch.Tensor, step: TokenStepMetadata, out: torch.Tensor) -> None:
        """Writes the keys of new tokens to the cache, then the selected tokens of each query to ``out``.

        Args:
            x: ``[T, hidden_size]``, the attention input; qr: ``[T, q_lora_rank]``, the normed query latent.
            out: int32 ``[T, index_topk]``: positions in the request, ascending, then -1.
        """
        self.pool.insert(step.slot_mapping, self.keys(x, step.freqs_cis_of(self.rope)))
        longest = max(step.cached_lens_cpu.tolist())
        if longest <= self.topk:
            select_all(step.num_visible, out)
            return
        queries = index_query(self.query_rows(self.wq_b(qr), self.weights_proj(x), step.positions))
        requests = step.attention.req_id_per_token[: len(x)]
        keys = PagedIndexKeys(self.pool.record, self.pool.tensor, self.pool.entries, step.block_table, requests)
        index_select(queries, keys, step.num_visible, self.topk, longest, out)

    def keys(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """Keys ``[T, head_dim]`` after norm and RoPE, not yet quantised: writing to the cache does that."""
        k = apply_rope_half_split(self.k_norm(self.wk(x)), freqs_cis)
        return hadamard(k) if self.numerics.index_hadamard else k
