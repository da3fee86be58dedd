"""Launches of a step's index builders in Triton; `decode_step_indices` builds a decode step's indices in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.indices.reference import check_combine, check_positive, check_rows
from deepseek_attn.kernels.indices.step_indices_triton import (
    BlockTable,
    GroupOutputs,
    GroupShape,
    WindowOutputs,
    combine_kernel,
    counts_kernel,
    decode_rows_kernel,
    decode_step_kernel,
    entries_kernel,
    global_kernel,
    token_slots_kernel,
    window_kernel,
)
from deepseek_attn.kernels.indices.types import DecodeRows, EntryCounts, EntryGroup, IndexRows, StepIndices

TILE = 1024  # columns of an index row that a program writes at once
TOKENS = 128  # tokens of a program, where each token has one slot
MIN_REQUESTS = 8  # whose lengths a program compares with a token, so that few kernels serve every number


def decode_rows(starts: Tensor, ends: Tensor, rows_per_request: int, max_len: int, offset: int = 0) -> DecodeRows:
    """See `kernels.indices.decode_rows`."""
    requests, device = len(starts), starts.device
    rows = requests * rows_per_request
    out = DecodeRows(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
        torch.empty(requests, dtype=torch.int32, device=device),
        torch.empty(requests, dtype=torch.int32, device=device),
    )
    if rows:
        decode_rows_kernel[(triton.cdiv(rows, TOKENS),)](
            starts, ends, out, rows, max_len, offset, ROWS=rows_per_request, TOKENS=TOKENS, enable_fp_fusion=True
        )
    return out


def entry_counts(positions: Tensor, is_valid: Tensor, ratio: int, topk: int) -> EntryCounts:
    """See `kernels.indices.entry_counts`."""
    check_positive("ratio", ratio)
    T, device = len(positions), positions.device
    out = EntryCounts(
        torch.empty(T, dtype=torch.int64, device=device), torch.empty(T, dtype=torch.int32, device=device)
    )
    if T:
        counts_kernel[(triton.cdiv(T, TOKENS),)](
            positions, is_valid, out, T, topk, RATIO=ratio, TOKENS=TOKENS, enable_fp_fusion=True
        )
    return out


def slot_mapping_from_positions(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None = None
) -> Tensor:
    """See `kernels.indices.slot_mapping_from_positions`."""
    return _token_slots(positions, None, is_valid, token_to_req, block_table, block_size, 1)


def get_compressed_slot_mapping(
    positions: Tensor, slot_mapping: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, ratio: int
) -> Tensor:
    """See `kernels.indices.get_compressed_slot_mapping`."""
    check_positive("ratio", ratio)
    return _token_slots(positions, slot_mapping, None, token_to_req, block_table, block_size, ratio)


def _token_slots(
    positions: Tensor,
    token_slots: Tensor | None,
    is_valid: Tensor | None,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    ratio: int,
) -> Tensor:
    """Slots of tokens; with ``token_slots``, slots of the compressed entries that they complete."""
    check_rows(positions, token_to_req, block_table, block_size)
    T = len(positions)
    out = torch.empty(T, dtype=torch.int64, device=positions.device)
    if T:
        grid = (triton.cdiv(T, TOKENS),)
        token_slots_kernel[grid](
            positions, token_slots, is_valid, token_to_req, *_table(block_table), out, T, RATIO=ratio, N=block_size,
            TOKENS=TOKENS, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def compute_swa_indices_and_lens(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int,
    is_valid: Tensor | None,
) -> IndexRows:
    """See `kernels.indices.compute_swa_indices_and_lens`."""
    check_positive("window", window)
    check_rows(positions, token_to_req, block_table, block_size)
    out, lens = _row_outputs(len(positions), window, positions.device)
    if len(positions):
        tile = triton.next_power_of_2(window)
        window_kernel[(len(positions),)](
            positions, token_to_req, is_valid, *_table(block_table), out, lens, WINDOW=window, N=block_size, TILE=tile,
            enable_fp_fusion=True,
        )  # fmt: skip
    return IndexRows(out, lens)


def build_c128a_topk_indices(
    positions: Tensor,
    ratio: int,
    token_to_req: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
    is_valid: Tensor | None,
    width: int,
) -> IndexRows:
    """See `kernels.indices.build_c128a_topk_indices`."""
    check_positive("ratio", ratio)
    paged = block_table is not None
    if paged and token_to_req is None:
        raise ValueError("token_to_req is needed with a block table")
    if paged:
        check_rows(positions, token_to_req, block_table, block_size)
    T = len(positions)
    out, lens = _row_outputs(T, width, positions.device)
    if T:
        tile = min(TILE, triton.next_power_of_2(max(width, 1)))
        entries_kernel[(T, triton.cdiv(max(width, 1), tile))](
            positions,
            token_to_req,
            is_valid,
            *(_table(block_table) if paged else BlockTable(out, 0, 0, 0, 0)),
            out,
            lens,
            WIDTH=width,
            RATIO=ratio,
            N=block_size,
            PAGED=paged,
            TILE=tile,
            enable_fp_fusion=True,
        )
    return IndexRows(out, lens)


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None
) -> IndexRows:
    """See `kernels.indices.compute_global_topk_indices_and_lens`."""
    check_rows(topk_indices, token_to_req, block_table, block_size)
    topk_indices = topk_indices if topk_indices.stride(1) == 1 else topk_indices.contiguous()
    T, K = topk_indices.shape
    out, lens = _row_outputs(T, K, topk_indices.device)
    if T:
        tile = min(TILE, triton.next_power_of_2(max(K, 1)))
        global_kernel[(T,)](
            topk_indices, token_to_req, is_valid, *_table(block_table), out, lens, topk_indices.stride(0), K=K,
            N=block_size, TILE=tile, enable_fp_fusion=True,
        )  # fmt: skip
    return IndexRows(out, lens)


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
) -> IndexRows:
    """See `kernels.indices.combine_topk_swa_indices`."""
    (T, K), c = topk_indices.shape, seq_lens.shape[0]
    check_combine(T, K, c, query_start_loc, gather_lens, window, ratio, topk, M)
    topk_indices = topk_indices if topk_indices.stride(1) == 1 else topk_indices.contiguous()
    width = -(-(topk + window) // 128) * 128
    out, lens = _row_outputs(T, width, topk_indices.device)
    if T:
        combine_kernel[(T,)](
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            is_valid,
            out,
            lens,
            c,
            M,
            N,
            topk_indices.stride(0),
            WIDTH=width,
            WINDOW=window,
            RATIO=ratio,
            TOPK=topk,
            TILE=min(TILE, triton.next_power_of_2(width)),
            REQUESTS=max(MIN_REQUESTS, triton.next_power_of_2(c)),
            enable_fp_fusion=True,
        )
    return IndexRows(out, lens)


def decode_step_indices(
    positions: Tensor,
    token_to_req: Tensor,
    is_valid: Tensor,
    window_table: Tensor,
    window_page: int,
    window: int,
    groups: Sequence[EntryGroup],
) -> StepIndices:
    """See `kernels.indices.decode_step_indices`."""
    check_positive("window", window)
    T, device = len(positions), positions.device
    for table, block_size in [
        (window_table, window_page),
        *((group.block_table, group.block_size) for group in groups),
    ]:
        check_rows(positions, token_to_req, table, block_size)
    outs = WindowOutputs(torch.empty(T, dtype=torch.int64, device=device), *_row_outputs(T, window, device))
    tables, group_outs, shapes, tasks = [], [], [], 1
    for group in groups:
        check_positive("ratio", group.ratio)
        slots = torch.empty(T, dtype=torch.int64, device=device)
        tables.append(_table(group.block_table))
        group_outs.append(GroupOutputs(slots, *_row_outputs(T, group.width, device)))
        shapes.append(GroupShape(group.ratio, group.block_size, group.width, tasks))
        tasks += max(1, triton.cdiv(group.width, TILE))
    if T:
        decode_step_kernel[(T, tasks)](
            positions,
            token_to_req,
            is_valid,
            _table(window_table),
            outs,
            tuple(tables),
            tuple(group_outs),
            WINDOW=window,
            WINDOW_PAGE=window_page,
            WINDOW_TILE=triton.next_power_of_2(window),
            GROUPS=tuple(shapes),
            TILE=TILE,
            enable_fp_fusion=True,
        )
    found = list(zip(groups, group_outs, strict=True))
    return StepIndices(
        outs.slot_mapping,
        IndexRows(outs.indices, outs.lens),
        {group.ratio: out.slots for group, out in found},
        {group.ratio: IndexRows(out.entries, out.lens) for group, out in found if group.width},
    )


def _table(block_table: Tensor) -> BlockTable:
    return BlockTable(block_table, *block_table.stride(), *block_table.shape)


def _row_outputs(T: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    out = torch.empty(T, width, dtype=torch.int32, device=device)
    return out, torch.empty(T, dtype=torch.int32, device=device)
