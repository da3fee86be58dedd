"""Attention by the reference: plain torch, any device, and the same flow as the GPU impls."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.impls.base import (
    AttentionLayer,
    AttentionSpec,
    DeepseekV4SparseMLABackend,
    DeepseekV41SparseMLABackend,
)
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.kernels.attention import PagedKeys, reference


class ReferenceKernels(SplitAttentionImpl):
    """Attention in float32 torch: the reference for all kernels."""

    name = "reference"
    batch_dependence = ""
    reads_own_records = True
    waits_for_device = True

    @classmethod
    def kernels_supported(cls, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        return True, "plain torch, any device"

    @classmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        options = {"d_v": layer.value_dim, "out": output, "round_weights": layer.rounds_weights}
        return reference.sparse_attention_paged(q, keys, layer.scale, layer.attn_sink, **options)[0]

    @classmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        options = {"d_v": layer.value_dim, "out": output, "round_weights": layer.rounds_weights}
        return reference.sparse_attention(q, kv, indices, layer.scale, layer.attn_sink, lens, **options)[0]


class DeepseekV4ReferenceSparseImpl(ReferenceKernels):
    """DeepSeek-V4 in plain torch."""

    backend_cls = DeepseekV4SparseMLABackend


class DeepseekV41ReferenceSparseImpl(ReferenceKernels):
    """DeepSeek-V4.1 in plain torch."""

    backend_cls = DeepseekV41SparseMLABackend
