"""Launches of a step's index builders in Triton; `step_indices` computes all index tensors of a step in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import contiguous_rows
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.plans import KernelRows, cdiv, launch_options, next_power_of_2
from deepseek_attn.kernels.indices.plan import INDICES
from deepseek_attn.kernels.indices.reference import check_combine, check_positive, check_rows, check_step
from deepseek_attn.kernels.indices.step_indices_triton import (
    BlockTable,
    GroupOutputs,
    GroupShape,
    TokenOutputs,
    TokenShape,
    WorkspaceRows,
    WorkspaceShape,
    decode_rows_kernel,
    entry_counts_kernel,
    entry_slots_kernel,
    step_indices_kernel,
    workspace_indices_kernel,
)
from deepseek_attn.kernels.indices.types import DecodeRows, EntryCounts, EntryGroup, IndexRows, StepIndices

MIN_REQUESTS = 8  # lengths of a tile, at least, so that few kernels serve every number of requests


def decode_rows(starts: Tensor, ends: Tensor, rows_per_request: int, max_len: int, offset: int = 0) -> DecodeRows:
    """See `kernels.indices.decode_rows`."""
    requests, device = len(starts), starts.device
    T = requests * rows_per_request
    out = DecodeRows(
        _long(T, device),
        torch.empty(T, dtype=torch.bool, device=device),
        *(torch.empty(requests, dtype=torch.int32, device=device) for _ in range(2)),
    )
    if T:
        tokens = _block("decode_rows_kernel", starts, T)
        decode_rows_kernel[(cdiv(T, tokens),)](
            starts, ends, out, T, max_len, offset, ROWS=rows_per_request, TOKENS=tokens, **launch_options()
        )
    return out


def entry_counts(positions: Tensor, is_valid: Tensor, ratio: int, topk: int) -> EntryCounts:
    """See `kernels.indices.entry_counts`."""
    check_positive("ratio", ratio)
    T, device = len(positions), positions.device
    out = EntryCounts(_long(T, device), torch.empty(T, dtype=torch.int32, device=device))
    if T:
        tokens = _block("entry_counts_kernel", positions, T)
        entry_counts_kernel[(cdiv(T, tokens),)](
            positions, is_valid, out, T, topk, RATIO=ratio, TOKENS=tokens, **launch_options()
        )
    return out


def step_indices(
    positions: Tensor, token_to_req: Tensor, is_valid: Tensor | None, token_table: Tensor, token_page: int,
    window: int, groups: Sequence[EntryGroup], decode_tokens: int | None = None,
) -> StepIndices:  # fmt: skip
    """See `kernels.indices.step_indices`."""
    check_step(positions, token_to_req, token_table, token_page, window, groups)
    T, device = len(positions), positions.device
    decodes = T if decode_tokens is None else decode_tokens
    columns = _block("step_indices_kernel", positions, T, max([1, *(group.width for group in groups)]))
    tokens = TokenOutputs(_long(T, device), *_rows(decodes, window, device))
    outs, shapes, tasks = [], [], 1
    for group in groups:
        outs.append(GroupOutputs(_long(T, device), *_rows(T, group.width, device)))
        shapes.append(GroupShape(group.ratio, group.block_size, group.width, tasks))
        tasks += cdiv(group.width, columns)
    if T:
        step_indices_kernel[(T, tasks)](
            *(positions, token_to_req, is_valid, decodes, _table(token_table), tokens),
            tuple(_table(group.block_table) for group in groups),
            tuple(outs),
            TOKENS=TokenShape(token_page, window, next_power_of_2(window)),
            GROUPS=tuple(shapes),
            TILE=columns,
            **launch_options(),
        )
    listed = {group.ratio: out for group, out in zip(groups, outs, strict=True) if group.width}
    return StepIndices(
        tokens.slot_mapping,
        IndexRows(tokens.indices, tokens.lens) if window else None,
        {group.ratio: out.slots for group, out in zip(groups, outs, strict=True)},
        {ratio: IndexRows(out.entries[:decodes], out.lens[:decodes]) for ratio, out in listed.items()},
        {ratio: out.entries[decodes:] for ratio, out in listed.items() if decodes < T},
    )


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None
) -> IndexRows:
    """See `kernels.indices.compute_global_topk_indices_and_lens`."""
    check_rows(topk_indices, token_to_req, block_table, block_size)
    topk_indices = contiguous_rows(topk_indices)
    T, K = topk_indices.shape
    out, lens = _rows(T, K, topk_indices.device)
    if T:
        columns = _block("entry_slots_kernel", out, T, K)
        arguments = topk_indices, topk_indices.stride(0), token_to_req, is_valid, _table(block_table), out, lens
        entry_slots_kernel[(T,)](*arguments, K=K, N=block_size, TILE=columns, **launch_options())
    return IndexRows(out, lens)


def combine_topk_swa_indices(
    topk_indices: Tensor, query_start_loc: Tensor, seq_lens: Tensor, gather_lens: Tensor, window: int, ratio: int,
    topk: int, M: int, N: int, is_valid: Tensor | None = None,
) -> IndexRows:  # fmt: skip
    """See `kernels.indices.combine_topk_swa_indices`."""
    (T, K), c = topk_indices.shape, seq_lens.shape[0]
    check_combine(T, K, c, query_start_loc, gather_lens, window, ratio, topk, M)
    topk_indices = contiguous_rows(topk_indices)
    width = 128 * cdiv(topk + window, 128)
    out, lens = _rows(T, width, topk_indices.device)
    if T:
        columns, requests = _block("workspace_indices_kernel", out, T, width), max(MIN_REQUESTS, next_power_of_2(c))
        workspace_indices_kernel[(T,)](
            WorkspaceRows(topk_indices, out, lens),
            *(topk_indices.stride(0), query_start_loc, seq_lens, gather_lens, is_valid, c, M, N),
            SHAPE=WorkspaceShape(width, window, ratio, topk, columns, requests),
            **launch_options(),
        )
    return IndexRows(out, lens)


def _block(kernel: str, rows: Tensor, tokens: int, width: int = 1) -> int:
    """Tokens or columns of one program, as a kernel's plan has them."""
    return INDICES.plan(KernelRows(tokens, width, kernel=kernel), gpu(rows.device)).config.size


def _table(block_table: Tensor) -> BlockTable:
    """A block table as device code reads it: sizes as odd numbers, see `BlockTable`."""
    table = contiguous_rows(block_table)
    return BlockTable(table, *(2 * size + 1 for size in (table.stride(0), *table.shape)))


def _long(T: int, device: torch.device) -> Tensor:
    return torch.empty(T, dtype=torch.int64, device=device)


def _rows(T: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Index rows ``[T, width]`` and their lengths ``[T]``, to be written."""
    out = torch.empty(T, width, dtype=torch.int32, device=device)
    return out, torch.empty(T, dtype=torch.int32, device=device)
