"""Attention in Triton, on any GPU that it supports: decode reads pages of any record, prefill reads gathered rows."""

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
from deepseek_attn.kernels.attention import PagedKeys, sparse_attention, sparse_attention_paged
from deepseek_attn.kernels.common.device import compute_capability
from deepseek_attn.kernels.common.dispatch import problem_on


class TritonKernels(SplitAttentionImpl):
    """Pages of every record and plain rows, 1 to 128 heads and more, float32, bfloat16 and float16.

    Notes:
        Launches depend on shapes only, so a captured graph is valid for any lengths and block tables. ``fp8_v4``
        entries are decoded to float16, where keys beyond +-65504 would overflow; V4's keys are normalised.
    """

    name = "triton"
    batch_dependence = ""
    fused_records = ("fp8_v4",)

    @classmethod
    def kernels_supported(cls, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        if problem := problem_on(device):
            return False, problem
        if spec is not None and (problem := _record_problem(spec)):
            return False, problem
        capability = compute_capability(device)
        return True, f"Triton kernels on compute capability {capability[0]}.{capability[1]}"

    @classmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        return sparse_attention_paged(q, keys, layer.scale, layer.attn_sink, layer.value_dim, output)[0]

    @classmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        scale, sink = layer.scale, layer.attn_sink
        return sparse_attention(q, kv, indices, scale, sink, lens, layer.value_dim, output)[0]


class DeepseekV4TritonSparseImpl(TritonKernels):
    """DeepSeek-V4 in Triton."""

    backend_cls = DeepseekV4SparseMLABackend


class DeepseekV41TritonSparseImpl(TritonKernels):
    """DeepSeek-V4.1 in Triton."""

    backend_cls = DeepseekV41SparseMLABackend


def _record_problem(spec: AttentionSpec) -> str:
    nope = spec.head_dim - spec.rope_dim
    if spec.kv_record == "fp8_v4" and (nope > 512 or spec.rope_dim % 16):
        return (
            "its kernels read fp8_ds_mla records with up to 512 quantised channels and a multiple of 16 rotated ones; "
            f"this model has {nope} and {spec.rope_dim}"
        )
    if spec.kv_record == "fp8_v32" and spec.rope_dim % 16:
        return f"its kernels read a multiple of 16 rotated channels per key; this model has {spec.rope_dim}"
    return ""
