"""Triton device code of `convert`: positions within a request to slots or workspace rows.

One program converts a tile of ``BLOCK_N`` positions of one query. To compact a row, one program converts all of it, so
that valid entries can be packed to the front in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def convert_kernel(
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
def convert_and_compact_kernel(
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
