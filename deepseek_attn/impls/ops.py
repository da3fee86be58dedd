"""The ops around attention that impls share: Triton kernels where they run, plain torch elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepseek_attn.kernels.attention import gather_reference as gather
from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.indices import combine_topk_swa_indices, compute_global_topk_indices_and_lens

__all__ = ["combine_topk_swa_indices", "compute_global_topk_indices_and_lens", "dequantize_and_gather_k_cache"]


def dequantize_and_gather_k_cache(
    out: Tensor,
    record: Any,
    pool: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
) -> None:
    """See `kernels.attention.gather_reference.dequantize_and_gather_k_cache`."""
    op = gather.dequantize_and_gather_k_cache
    if runs_triton(out):
        from deepseek_attn.kernels.attention.gather import dequantize_and_gather_k_cache as op
    op(out, record, pool, seq_lens, gather_lens, block_table, block_size, offset)
