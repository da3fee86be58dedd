"""The ops around attention that impls share: Triton kernels where they run, plain torch elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepseek_attn.kernels.attention import gather_reference as gather
from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.indices import reference as indices


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


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    M: int,
    N: int,
    is_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.indices.reference.combine_topk_swa_indices`."""
    op = indices.combine_topk_swa_indices
    if runs_triton(topk_indices):
        from deepseek_attn.kernels.indices.step_indices import combine_topk_swa_indices as op
    return op(topk_indices, query_start_loc, seq_lens, gather_lens, window, ratio, topk, M, N, is_valid)


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `kernels.indices.reference.compute_global_topk_indices_and_lens`."""
    op = indices.compute_global_topk_indices_and_lens
    if runs_triton(topk_indices):
        from deepseek_attn.kernels.indices.step_indices import compute_global_topk_indices_and_lens as op
    return op(topk_indices, token_to_req, block_table, block_size, is_valid)
