"""Triton kernels of `reference.convert_req_index`: positions within a request to slots or workspace rows.

One program converts a tile of ``BLOCK_N`` positions of one query. When counts are wanted, one program converts the
whole row of a query instead, so that valid entries can be packed to the front in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _global_index(
    token,
    inside,
    row,
    req_id_ptr,
    block_table_ptr,
    workspace_request_ids_ptr,
    workspace_starts_ptr,
    slot_mapping_ptr,
    num_requests,
    num_blocks,
    block_table_stride,
    BLOCK_SIZE: tl.constexpr,
    HAS_PREFILL_WORKSPACE: tl.constexpr,
    HAS_SLOT_MAPPING: tl.constexpr,
):
    """Slots or workspace rows of the positions ``token`` of query ``row``; -1 where there is none."""
    # scalars of the row are spread over the tile first: the interpreter cannot mask a tile by a scalar condition
    tile = tl.zeros_like(token)
    block = token // BLOCK_SIZE
    valid = inside & (token >= 0) & (block < num_blocks)
    if HAS_SLOT_MAPPING:
        valid = valid & (tile + tl.load(slot_mapping_ptr + row) >= 0)
    req = tile + tl.load(req_id_ptr + row)
    paged = valid & (req >= 0) & (req < num_requests)
    page = tl.load(block_table_ptr + req * block_table_stride + block, mask=paged, other=-1).to(tl.int64)
    index = tl.where(paged & (page >= 0), page * BLOCK_SIZE + token % BLOCK_SIZE, -1)
    if HAS_PREFILL_WORKSPACE:
        prefill = tile + tl.load(workspace_request_ids_ptr + row)
        start = tl.load(workspace_starts_ptr + prefill, mask=prefill >= 0, other=0).to(tl.int64)
        index = tl.where(prefill >= 0, tl.where(valid, start + token, -1), index)
    return index.to(tl.int32)


@triton.jit
def _convert_req_index_to_global_index_kernel(
    req_id_ptr,
    block_table_ptr,
    token_indices_ptr,
    workspace_request_ids_ptr,
    workspace_starts_ptr,
    slot_mapping_ptr,
    out_ptr,
    num_requests,
    num_blocks,
    topk,
    block_table_stride,
    token_indices_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_PREFILL_WORKSPACE: tl.constexpr,
    HAS_SLOT_MAPPING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < topk
    token = tl.load(token_indices_ptr + row * token_indices_stride + column, mask=inside, other=-1).to(tl.int64)
    index = _global_index(
        token,
        inside,
        row,
        req_id_ptr,
        block_table_ptr,
        workspace_request_ids_ptr,
        workspace_starts_ptr,
        slot_mapping_ptr,
        num_requests,
        num_blocks,
        block_table_stride,
        BLOCK_SIZE,
        HAS_PREFILL_WORKSPACE,
        HAS_SLOT_MAPPING,
    )
    tl.store(out_ptr + row * topk + column, index, mask=inside)


@triton.jit
def _convert_and_compact_kernel(
    req_id_ptr,
    block_table_ptr,
    token_indices_ptr,
    workspace_request_ids_ptr,
    workspace_starts_ptr,
    slot_mapping_ptr,
    out_ptr,
    counts_ptr,
    num_requests,
    num_blocks,
    topk,
    block_table_stride,
    token_indices_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_PREFILL_WORKSPACE: tl.constexpr,
    HAS_SLOT_MAPPING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    count = tl.zeros((), tl.int32)
    for first in range(0, topk, BLOCK_N):
        column = first + lane
        inside = column < topk
        token = tl.load(token_indices_ptr + row * token_indices_stride + column, mask=inside, other=-1).to(tl.int64)
        index = _global_index(
            token,
            inside,
            row,
            req_id_ptr,
            block_table_ptr,
            workspace_request_ids_ptr,
            workspace_starts_ptr,
            slot_mapping_ptr,
            num_requests,
            num_blocks,
            block_table_stride,
            BLOCK_SIZE,
            HAS_PREFILL_WORKSPACE,
            HAS_SLOT_MAPPING,
        )
        found = (index >= 0).to(tl.int32)
        place = count + tl.cumsum(found, 0) - 1
        tl.store(out_ptr + row * topk + place, index, mask=found > 0)
        count += tl.sum(found, 0)
    for first in range(0, topk, BLOCK_N):
        column = first + lane
        tail = (column >= count) & (column < topk)
        tl.store(out_ptr + row * topk + column, tl.full((BLOCK_N,), -1, tl.int32), mask=tail)
    tl.store(counts_ptr + row, count)


def convert_req_index(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    block_size: int,
    workspace_request_ids: Tensor | None = None,
    workspace_starts: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    block_n: int = 128,
    counts: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Same as `reference.convert_req_index`, followed by ``compact_valid`` when ``counts``.

    Args:
        block_n: positions per program, a power of two.
    """
    rows, topk = token_indices.shape
    out = torch.empty(rows, topk, dtype=torch.int32, device=token_indices.device)
    totals = torch.zeros(rows if counts else 0, dtype=torch.int32, device=token_indices.device)
    if out.numel() == 0:
        return (out, totals) if counts else out
    workspace = workspace_request_ids is not None and workspace_starts is not None and workspace_starts.numel() > 0
    # a pointer is needed even where a flag says that it is not read
    inputs = (
        req_id,
        block_table,
        token_indices,
        workspace_request_ids if workspace else req_id,
        workspace_starts if workspace else req_id,
        req_id if slot_mapping is None else slot_mapping,
    )
    sizes = (*block_table.shape, topk, block_table.stride(0), token_indices.stride(0))
    flags = {
        "BLOCK_SIZE": block_size,
        "BLOCK_N": block_n,
        "HAS_PREFILL_WORKSPACE": workspace,
        "HAS_SLOT_MAPPING": slot_mapping is not None,
    }
    if counts:
        _convert_and_compact_kernel[(rows,)](*inputs, out, totals, *sizes, **flags)
        return out, totals
    _convert_req_index_to_global_index_kernel[(rows, triton.cdiv(topk, block_n))](*inputs, out, *sizes, **flags)
    return out
