"""The reference impl: plain torch, any device, and the same flow as the GPU impls."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.impls.base import AttentionLayer, AttentionSpec
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.kernels.attention import PagedKeys, reference


class DeepseekV4ReferenceSparseImpl(SplitAttentionImpl):
    """Attention in float32 torch, which the other impls are tested against."""

    name = "reference"

    @classmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        return True, "plain torch, any device"

    @classmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        return reference.sparse_attention_paged(q, keys, layer.scale, layer.attn_sink, out=output)[0]

    @classmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        return reference.sparse_attention(q, kv, indices, layer.scale, layer.attn_sink, lens, out=output)[0]
