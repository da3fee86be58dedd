"""The Triton impl: decode reads pages of any record, prefill gathered rows; on any GPU Triton compiles for."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.impls.base import AttentionLayer, AttentionSpec
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.kernels.attention import PagedKeys, sparse_attention, sparse_attention_paged
from deepseek_attn.kernels.common.dispatch import problem_on


class DeepseekV4TritonSparseImpl(SplitAttentionImpl):
    """Attention in Triton: 584-byte pages and plain rows, 1 to 128 heads and more, float32, bfloat16 and float16.

    Notes:
        Launches depend on shapes alone, so a captured graph serves any lengths and block tables. ``fp8_v4`` entries are
        decoded to float16: keys beyond +-65504 would overflow. V4's are normalised.
    """

    name = "triton"

    @classmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        device = torch.device(device)
        if problem := problem_on(device):
            return False, problem
        if spec is not None and spec.kv_record == "fp8_v4" and (problem := _record_problem(spec)):
            return False, problem
        capability = torch.cuda.get_device_capability(device)
        return True, f"Triton kernels on compute capability {capability[0]}.{capability[1]}"

    @classmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        return sparse_attention_paged(q, keys, layer.scale, layer.attn_sink, out=output)[0]

    @classmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        return sparse_attention(q, kv, indices, layer.scale, layer.attn_sink, lens, out=output)[0]


def _record_problem(spec: AttentionSpec) -> str:
    nope = spec.head_dim - spec.rope_dim
    if nope > 512 or spec.rope_dim % 16:
        return (
            "its kernels read fp8_ds_mla records with up to 512 quantised channels and a multiple of 16 rotated ones; "
            f"this model has {nope} and {spec.rope_dim}"
        )
    return ""
