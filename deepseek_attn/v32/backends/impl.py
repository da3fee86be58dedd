"""Base of the sparse MLA impls: constructor, queries, top-k indices, and the whole forward of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from deepseek_attn.v32.backends.absorb import MLAAbsorption
from deepseek_attn.v32.backends.config import SparseMLAConfig
from deepseek_attn.v32.backends.gather import concat_and_cache_mla
from deepseek_attn.v32.backends.metadata import SparseMLAMetadata


class SparseMLAImpl(MLAAbsorption, ABC):
    """Sparse MLA of one layer.

    Args:
        num_heads: heads of this rank.
        head_size: values per key, ``kv_lora_rank + qk_rope_head_dim``.
        scale: factor of the logits; with YaRN it includes ``mscale ** 2``.
        num_kv_heads: must be 1, the latent.
        alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name: must be None (no kernel has them).
        kv_cache_dtype: ``"auto"``, ``"bfloat16"`` or ``"fp8_ds_mla"``, as in ``config``.
        attn_type: must be ``"decoder"``.
        topk_indice_buffer: not used; the buffer is the indexer's.
        indexer: an object with ``topk_indices_buffer``, int32 ``[max_num_batched_tokens, K]``: row ``t`` holds the
            positions, within its request, that token row ``t`` of the batch reads, -1 for none, each at most once and
            none after the token. Layers that run one after the other may share it.
        config: limits of the run; required.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: dims of the model.
        kv_b_proj: the up-projection whose halves `process_weights_after_loading` extracts; None if the caller does.
        scale_rule: of the FP8 entries that `forward` writes, see `Fp8DsMlaV32Record`.
        mla_args: other facts about the layer (``q_lora_rank``, ``qk_head_dim`` ...); not used.

    Raises:
        NotImplementedError: a feature that no sparse MLA kernel has.
        ValueError: no indexer or no config, or dims that do not fit.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        topk_indice_buffer: Tensor | None = None,
        indexer: Any = None,
        *,
        config: SparseMLAConfig | None = None,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        kv_b_proj: nn.Module | None = None,
        scale_rule: str = "raw",
        **mla_args,
    ):
        features = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        given = [name for name, value in features.items() if value is not None]
        if given or attn_type != "decoder" or num_kv_heads != 1:
            raise NotImplementedError(
                f"sparse MLA is decoder attention with one latent head and none of {', '.join(features)}: got "
                f"attn_type {attn_type!r}, {num_kv_heads} kv heads, {', '.join(given) or 'none of them'}"
            )
        if indexer is None or config is None:
            raise ValueError("sparse MLA needs an indexer (it reads indexer.topk_indices_buffer) and a config")
        if head_size != kv_lora_rank + qk_rope_head_dim:
            raise ValueError(
                f"head_size {head_size} is not kv_lora_rank {kv_lora_rank} + qk_rope_head_dim {qk_rope_head_dim}"
            )
        if (config.num_heads, config.kv_cache_dtype) != (num_heads, kv_cache_dtype):
            raise ValueError(
                f"the config has {config.num_heads} heads and kv_cache_dtype {config.kv_cache_dtype!r}, the impl "
                f"{num_heads} and {kv_cache_dtype!r}"
            )
        self.config = config
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.softmax_scale, self.kv_cache_dtype = float(scale), float(scale), kv_cache_dtype
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = qk_nope_head_dim, v_head_dim
        self.kv_b_proj, self.scale_rule = kv_b_proj, scale_rule
        self.indexer = indexer
        self.topk_indices_buffer: Tensor = indexer.topk_indices_buffer

    @property
    @abstractmethod
    def kernel_name(self) -> str:
        """Name of the attention kernels."""

    @abstractmethod
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer=None) -> tuple[Tensor, None]:
        """Attention of latent queries; see the subclasses."""

    @torch.no_grad()
    def forward(
        self,
        layer: Any,
        q: Tensor,
        k_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseMLAMetadata | None,
        output: Tensor,
    ) -> Tensor:
        """One layer's attention: writes the cache, absorbs the queries, attends, and expands the values.

        Args:
            q: ``[T, heads, qk_nope_head_dim + qk_rope_head_dim]``, the last part rotated.
            k_c_normed: ``[T, kv_lora_rank]``; k_pe: ``[T, qk_rope_head_dim]`` or ``[T, 1, qk_rope_head_dim]``, rotated.
            kv_cache: the layer's cache.
            attn_metadata: of the step; None warms up: the output is zero and nothing is written.
            output: ``[T, heads * v_head_dim]``, written and returned. Padding rows become zero.
        """
        if attn_metadata is None:
            return output.zero_()
        k_pe = k_pe.reshape(len(k_pe), self.qk_rope_head_dim)
        slots = attn_metadata.slot_mapping[: len(q)]
        concat_and_cache_mla(k_c_normed, k_pe, kv_cache, slots, self.kv_cache_dtype, scale_rule=self.scale_rule)
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, _ = self.forward_mqa((self._k_up_proj(q_nope), q_pe), kv_cache, attn_metadata, layer)
        return output.copy_(self._v_up_proj(latent).flatten(1))

    def _concat_query(self, q: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """``[T, heads, head_size]`` from a query or its (latent, rotated) parts."""
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if q.dim() != 3 or q.shape[1:] != (self.num_heads, self.head_size):
            raise ValueError(f"queries must be [T, {self.num_heads}, {self.head_size}], got {list(q.shape)}")
        return q

    def _topk_indices(self, rows: int, attn_metadata: SparseMLAMetadata) -> Tensor:
        """The top-k indices of this batch, int32 ``[rows, K]``."""
        if not attn_metadata.num_actual_tokens <= rows <= len(attn_metadata.slot_mapping):
            raise ValueError(
                f"{rows} query rows, but the step has {attn_metadata.num_actual_tokens} tokens in "
                f"{len(attn_metadata.slot_mapping)} rows"
            )
        if rows > len(self.topk_indices_buffer):
            raise ValueError(f"{rows} query rows, but the indexer's buffer has {len(self.topk_indices_buffer)}")
        return self.topk_indices_buffer[:rows]

    def _flat_cache(self, kv_cache: Tensor) -> Tensor:
        """View of a cache of plain rows as ``[slots, 1, head_size]``."""
        if kv_cache.dim() != 3 or kv_cache.shape[2] != self.head_size or not kv_cache.is_contiguous():
            raise ValueError(
                f"a cache of plain rows must be contiguous [pages, entries, {self.head_size}], got "
                f"{list(kv_cache.shape)} with strides {list(kv_cache.stride())}"
            )
        return kv_cache.view(-1, 1, self.head_size)
