"""The reference impl: plain torch, any device, and the same flow as the GPU impls."""

from __future__ import annotations

import torch

from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.kernels.attention.reference import sparse_attention, sparse_attention_paged


class DeepseekV4ReferenceSparseImpl(SplitAttentionImpl):
    """Attention in float32 torch: what the other impls are measured against."""

    name = "reference"

    @classmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        return True, "plain torch, any device"

    @classmethod
    def attend_pages(cls, layer, q, sources, output) -> torch.Tensor:
        out, _ = sparse_attention_paged(q, [source.as_source() for source in sources], layer.scale, layer.attn_sink)
        return out if output is None else output.copy_(out)

    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output) -> torch.Tensor:
        out, _ = sparse_attention(q, kv, indices, layer.scale, layer.attn_sink, lens)
        return out if output is None else output.copy_(out)
