"""Base of DeepSeek-V3.2's attention impls: one entry per token, absorbed queries, keys chosen by an indexer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from deepseek_attn.attention.builder import MetadataBuilder
from deepseek_attn.cache.pools import Pool
from deepseek_attn.impls.base import AttentionLayer, AttentionSpec, SparseMLABackend
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.impls.metadata import StepMetadata


class LatentAttentionLayer(AttentionLayer, Protocol):
    """Attributes of a layer that `SparseMLAImpl.forward` reads, in addition to `AttentionLayer`'s."""

    @property
    def kv_cache(self) -> Pool:
        """Rows of latents and rotary keys."""
        ...

    def absorb(self, q: Tensor, positions: Tensor) -> Tensor:
        """Rotated and absorbed queries of projected ones."""
        ...

    def project_values(self, latents: Tensor) -> Tensor:
        """Values of attended latents."""
        ...


class SparseMLAImpl(SplitAttentionImpl):
    """`SplitAttentionImpl` of V3.2, with the call that vLLM's layers make of an impl."""

    @classmethod
    @torch.no_grad()
    def forward(
        cls,
        layer: LatentAttentionLayer,
        q: Tensor,
        k_c_normed: Tensor,
        k_pe: Tensor,
        attn_metadata: StepMetadata,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Caches the keys of new tokens and attends: the part between the projections of a layer driven from outside.

        `DeepseekV32MLAAttention` itself writes all its caches in one launch, then calls `forward_mqa`.

        Args:
            layer: with its caches bound; ``topk_indices_buffer`` holds the step's selection.
            q: ``[T, heads, qk_nope_head_dim + qk_rope_head_dim]``, as projected.
            k_c_normed: ``[T, kv_lora_rank]``, normed; k_pe: ``[T, qk_rope_head_dim]``, rotated.
            output: ``[T, heads * v_head_dim]`` to write to; None returns a new tensor.
            output_scale, output_block_scale: must be None, no kernel here quantises its output.

        Raises:
            NotImplementedError: scales of a quantised output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "output_scale and output_block_scale ask for a quantised output, and sparse MLA writes "
                f"{q.dtype}: leave them out and quantise the output with kernels.linear.quantize_input"
            )
        layer.step, layer.decode_topk_slots = attn_metadata, None
        layer.kv_cache.insert(attn_metadata.sparse[1].slot_mapping, torch.cat([k_c_normed, k_pe], dim=-1))
        query = layer.absorb(q.flatten(1), attn_metadata.positions)
        values = layer.project_values(cls.forward_mqa(layer, query, k_c_normed, attn_metadata.positions))
        return values if output is None else output.copy_(values)


class LatentBackend(SparseMLABackend):
    """Base of V3.2's backends."""

    @classmethod
    @abstractmethod
    def get_impl_cls(cls) -> type[SparseMLAImpl]:
        """The impl on the backend's own kernels."""

    @classmethod
    def get_builder_cls(cls) -> type[MetadataBuilder]:
        """The builder of a step's metadata."""
        return FlashMLASparseMetadataBuilder

    @classmethod
    def problem(cls, spec: AttentionSpec) -> str:
        if spec.qk_nope_head_dim is None:
            return "it reads the absorbed queries of DeepSeek-V3.2, and this model is DeepSeek-V4"
        if not spec.sparse:
            return "it reads the tokens that an indexer selects, and this model has none (index_topk)"
        return super().problem(spec)


class FlashMLASparseMetadataBuilder(MetadataBuilder):
    """Builds V3.2's `StepMetadata`: its ``sparse[1]`` is the `FlashMLASparseMetadata` of the pages of tokens."""
