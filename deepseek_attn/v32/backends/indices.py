"""Converts the tokens that the indexer selects, positions within a request, to cache slots or workspace rows."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.indices import convert_req_index, convert_req_index_and_compact


def triton_convert_req_index_to_global_index(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    BLOCK_SIZE: int = 64,
    NUM_TOPK_TOKENS: int = 2048,
    BLOCK_N: int = 128,
    HAS_PREFILL_WORKSPACE: bool = False,
    prefill_workspace_request_ids: Tensor | None = None,
    prefill_workspace_starts: Tensor | None = None,
    return_valid_counts: bool = False,
    slot_mapping: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Converts positions within a request to slots of the cache or to rows of the prefill workspace.

    A position that is negative or beyond the block table becomes -1. One of a prefill token, whose request id ``p`` is
    0 or more, becomes ``prefill_workspace_starts[p] + position``. Any other becomes
    ``block_table[req, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE``.

    Args:
        req_id: int32 ``[T]``.
        block_table: int32 ``[B, pages]``; a negative page id gives -1.
        token_indices: int32 ``[T, K]``.
        NUM_TOPK_TOKENS: ``K``.
        BLOCK_N: positions per program of the Triton kernel, a power of two. ``K`` need not be a multiple of it.
        HAS_PREFILL_WORKSPACE: whether the next two are given and count.
        prefill_workspace_request_ids: int32 ``[T]``, -1 for tokens of decodes.
        prefill_workspace_starts: int32 ``[R]``.
        return_valid_counts: also return the number of valid entries of each row, and move these to its front.
        slot_mapping: int64 ``[T]`` or None; rows with a negative slot are padding and become -1.

    Returns:
        int32 ``[T, K]``, or that and int32 ``[T]`` counts.

    Raises:
        ValueError: dtypes or shapes that do not fit.

    Notes:
        Published versions disagree on whether counting reorders a row: this one packs valid entries to the front, in
        their order, and fills the rest with -1, because kernels that take a length read a prefix. Without counts the
        order stays.
    """
    _check(req_id, block_table, token_indices, NUM_TOPK_TOKENS, BLOCK_N, slot_mapping)
    request_ids, starts = None, None
    if HAS_PREFILL_WORKSPACE:
        rows = token_indices.shape[0]
        request_ids, starts = _checked_workspace(prefill_workspace_request_ids, prefill_workspace_starts, rows)
    op = convert_req_index_and_compact if return_valid_counts else convert_req_index
    return op(req_id, block_table, token_indices, BLOCK_SIZE, request_ids, starts, slot_mapping, BLOCK_N)


def _check(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, topk: int, block_n: int, slot_mapping: Tensor | None
) -> None:
    for name, tensor in (("req_id", req_id), ("block_table", block_table), ("token_indices", token_indices)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {tensor.dtype}")
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    rows = token_indices.shape[0]
    if token_indices.dim() != 2 or token_indices.shape[1] != topk:
        raise ValueError(f"token_indices must be [T, NUM_TOPK_TOKENS = {topk}], got {list(token_indices.shape)}")
    if req_id.shape != (rows,) or block_table.dim() != 2:
        raise ValueError(
            f"need req_id [{rows}] and a 2-D block_table, got {list(req_id.shape)} and {list(block_table.shape)}"
        )
    if slot_mapping is not None and slot_mapping.shape != (rows,):
        raise ValueError(f"slot_mapping must be [{rows}], got {list(slot_mapping.shape)}")
    if block_n < 1 or block_n & (block_n - 1):
        raise ValueError(f"BLOCK_N must be a power of two, got {block_n}")


def _checked_workspace(request_ids: Tensor | None, starts: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    if request_ids is None or starts is None:
        raise ValueError("HAS_PREFILL_WORKSPACE needs prefill_workspace_request_ids and prefill_workspace_starts")
    for name, tensor in (("prefill_workspace_request_ids", request_ids), ("prefill_workspace_starts", starts)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1:
            raise ValueError(f"{name} must be a vector of int32, got {tensor.dtype} {list(tensor.shape)}")
    if request_ids.shape != (rows,):
        raise ValueError(f"prefill_workspace_request_ids must be [{rows}], got {list(request_ids.shape)}")
    return request_ids, starts
