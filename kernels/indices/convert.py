"""Launches of `kernels.indices.convert_req_index` in Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.indices.convert_triton import convert_and_compact_kernel, convert_kernel
from deepseek_attn.kernels.indices.types import IndexRows


def convert_req_index(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    block_size: int,
    workspace_request_ids: Tensor | None = None,
    workspace_starts: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    block_n: int = 128,
) -> Tensor:
    """See `kernels.indices.convert_req_index`."""
    out = torch.empty_like(token_indices, dtype=torch.int32, memory_format=torch.contiguous_format)
    if out.numel():
        workspace = workspace_request_ids, workspace_starts
        inputs, sizes, flags = _arguments(req_id, block_table, token_indices, block_size, *workspace, slot_mapping)
        grid = (len(out), triton.cdiv(out.shape[1], block_n))
        convert_kernel[grid](*inputs, out, *sizes, **flags, BLOCK_N=block_n)
    return out


def convert_req_index_and_compact(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    block_size: int,
    workspace_request_ids: Tensor | None = None,
    workspace_starts: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    block_n: int = 128,
) -> IndexRows:
    """See `kernels.indices.convert_req_index_and_compact`."""
    out = torch.empty_like(token_indices, dtype=torch.int32, memory_format=torch.contiguous_format)
    lens = torch.zeros(len(out), dtype=torch.int32, device=out.device)
    if out.numel():
        workspace = workspace_request_ids, workspace_starts
        inputs, sizes, flags = _arguments(req_id, block_table, token_indices, block_size, *workspace, slot_mapping)
        convert_and_compact_kernel[(len(out),)](*inputs, out, lens, *sizes, **flags, BLOCK_N=block_n)
    return IndexRows(out, lens)


def _arguments(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    block_size: int,
    workspace_request_ids: Tensor | None,
    workspace_starts: Tensor | None,
    slot_mapping: Tensor | None,
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Tensors, sizes and constants of both kernels; ``req_id`` is passed in place of tensors that the flags disable."""
    has_workspace = workspace_starts is not None and workspace_starts.numel() > 0 and workspace_request_ids is not None
    inputs = (
        req_id,
        block_table,
        token_indices,
        workspace_request_ids if has_workspace else req_id,
        workspace_starts if has_workspace else req_id,
        req_id if slot_mapping is None else slot_mapping,
    )
    sizes = (*block_table.shape, token_indices.shape[1], block_table.stride(0), token_indices.stride(0))
    flags = {
        "BLOCK_SIZE": block_size,
        "HAS_PREFILL_WORKSPACE": has_workspace,
        "HAS_SLOT_MAPPING": slot_mapping is not None,
    }
    return inputs, sizes, flags
