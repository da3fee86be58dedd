"""Attention on Hopper GPUs: the faster of FlashMLA and Triton for the shapes of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.impls.base import AttentionLayer, AttentionSpec, DeepseekV4SparseMLABackend
from deepseek_attn.impls.flashmla import FlashMLAKernels
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.impls.triton import TritonKernels
from deepseek_attn.kernels.attention import PagedKeys
from deepseek_attn.kernels.attention.plan import LIBRARY, LayerCall
from deepseek_attn.kernels.common.device import compute_capability, gpu


class MixedKernels(SplitAttentionImpl):
    """Decode: the fused Triton kernel for raw queries, else the faster kernel. Prefill: FlashMLA for 64 and 128 heads.

    Notes:
        The choice depends on shapes only, so a captured graph is valid for any lengths. It was measured on an H200
        (docs/notebook.md), so the impl supports Hopper only.
    """

    name = "mixed"
    batch_dependence = "it calls FlashMLA's or the Triton kernel by the number of queries"
    needs_masked_tails = FlashMLAKernels.needs_masked_tails
    # also for 128 heads, where `attend_pages` may prefer FlashMLA: saving launches gains more
    fused_records = TritonKernels.fused_records

    @classmethod
    def kernels_supported(cls, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        for kernels in (FlashMLAKernels, TritonKernels):
            usable, reason = kernels.kernels_supported(device, spec)
            if not usable:
                return False, f"it needs both FlashMLA and Triton: {reason}"
        capability = compute_capability(device)
        if capability != (9, 0):
            return False, (
                "when to call which kernel was measured for compute capability 9.0; this GPU has "
                f"{capability[0]}.{capability[1]}"
            )
        return True, "FlashMLA or Triton, by the shapes of a call"

    @classmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        width = sum(part.indices.shape[1] for part in keys)
        return _kernels(q, width, keys[0].record.name).attend_pages(layer, q, keys, output)

    @classmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        return _kernels(q, indices.shape[1]).attend_rows(layer, q, kv, indices, lens, output)


def _kernels(q: Tensor, width: int, record: str = "") -> type[SplitAttentionImpl]:
    """The kernels for ``q [T, heads, d]`` over at most ``width`` keys: in pages of ``record``, or in rows."""
    call = LayerCall(q.shape[0], q.shape[1], width, record)
    return FlashMLAKernels if LIBRARY.plan(call, gpu(q.device)).kernel == "FlashMLA" else TritonKernels


class DeepseekV4MixedSparseImpl(MixedKernels):
    """DeepSeek-V4 on FlashMLA and Triton."""

    backend_cls = DeepseekV4SparseMLABackend
