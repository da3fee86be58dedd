"""The Triton impl: decode reads pages of any record, prefill gathered rows; on any GPU Triton compiles for."""

from __future__ import annotations

import torch

from deepseek_attn.impls import ops
from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.kernels.common.dispatch import problem_on


class DeepseekV4TritonSparseImpl(SplitAttentionImpl):
    """Attention in Triton: 584-byte pages and plain rows, 1 to 128 heads and more, float32, bfloat16 and float16.

    Notes:
        How a decode step is cut depends on shapes alone, so a captured graph serves any lengths and block tables.
        ``fp8_ds_mla`` entries are decoded to float16: keys beyond +-65504 would overflow. V4's are normalised.
    """

    name = "triton"
    gather = staticmethod(ops.dequantize_and_gather_k_cache)
    merge_indices = staticmethod(ops.combine_topk_swa_indices)
    global_indices = staticmethod(ops.compute_global_topk_indices_and_lens)

    @classmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        device = torch.device(device)
        if problem := problem_on(device):
            return False, problem
        if spec is not None and spec.kv_record == "fp8_ds_mla" and (problem := _record_problem(spec)):
            return False, problem
        capability = torch.cuda.get_device_capability(device)
        return True, f"Triton kernels on compute capability {capability[0]}.{capability[1]}"

    @classmethod
    def attend_pages(cls, layer, q, sources, output) -> torch.Tensor:
        from deepseek_attn.kernels.attention.sparse_attention import sparse_attention_paged

        sources = [source.as_source() for source in sources]
        return sparse_attention_paged(q, sources, layer.scale, layer.attn_sink, out=output)[0]

    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output) -> torch.Tensor:
        from deepseek_attn.kernels.attention.sparse_attention import sparse_attention

        return sparse_attention(q, kv, indices, layer.scale, layer.attn_sink, lens, out=output)[0]


def _record_problem(spec: AttentionSpec) -> str:
    nope = spec.head_dim - spec.rope_dim
    if nope > 512 or spec.rope_dim % 16:
        return (
            "its kernels read fp8_ds_mla records with up to 512 quantised channels and a multiple of 16 rotated ones; "
            f"this model has {nope} and {spec.rope_dim}"
        )
    return ""
