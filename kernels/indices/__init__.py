"""Index tensors of a step: which cache slots, or rows of the prefill workspace, each query reads or writes.

A *slot* is ``page * block_size + offset``; -1 marks an unused place. Block tables are ``[B, pages]`` integers; a
negative page id marks a missing page, and entries past a request's length are never used. Page ids are multiplied in
int64. Nothing waits for the device, and shapes do not depend on values: all of this may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.indices.types import DecodeRows, EntryCounts, EntryGroup, IndexRows, StepIndices

if TYPE_CHECKING:
    from deepseek_attn.kernels.indices import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def decode_rows(starts: Tensor, ends: Tensor, rows_per_request: int, max_len: int, offset: int = 0) -> DecodeRows:
    """Positions of ``rows_per_request`` rows of each request, and which of them are padding.

    Args:
        starts: int64 ``[B]``; the first row of a request is at ``starts + offset``.
        ends: int64 ``[B]``; rows at or beyond them are padding.
        max_len: positions are at most ``max_len - 1``, for which there are tables and rotations.
    """
    ops = triton_ops if runs_triton(starts) else torch_ops
    return ops.decode_rows(starts, ends, rows_per_request, max_len, offset)


def entry_counts(positions: Tensor, is_valid: Tensor, ratio: int, topk: int) -> EntryCounts:
    """Numbers of entries that each token sees, ``(position + 1) // ratio``, and reads, at most ``topk``. 0 for padding.

    Args:
        positions: int64 ``[T]``; is_valid: bool ``[T]``.
    """
    return (triton_ops if runs_triton(positions) else torch_ops).entry_counts(positions, is_valid, ratio, topk)


def step_indices(
    positions: Tensor,
    token_to_req: Tensor,
    is_valid: Tensor | None,
    token_table: Tensor,
    token_page: int,
    window: int,
    groups: Sequence[EntryGroup],
    decode_tokens: int | None = None,
) -> StepIndices:
    """All index tensors of a step that follow from positions; in Triton in one launch.

    Args:
        positions: int64 ``[T]``; token_to_req: ``[T]``; is_valid: bool ``[T]``, or None for all valid.
        token_table: ``[B, pages]`` of the pages that hold every token, in V4 the window's; token_page: tokens per page.
        window: tokens a query sees, itself included; 0 for a model without a window.
        groups: one per ratio.
        decode_tokens: tokens of decode requests, which come first and read pages in place; None for all.

    Raises:
        ValueError: shapes disagree, or a ratio below 1.
    """
    ops = triton_ops if runs_triton(positions) else torch_ops
    return ops.step_indices(positions, token_to_req, is_valid, token_table, token_page, window, groups, decode_tokens)


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None
) -> IndexRows:
    """Converts request-local compressed entries to cache slots.

    Args:
        topk_indices: ``[T, K]`` entries local to the request, -1 for none.
        token_to_req: ``[T]`` row of ``block_table`` per token.
        block_table: ``[B, pages]`` page ids.
        block_size: entries per page.
        is_valid: bool ``[T]``, or None for all valid.

    Returns:
        Slots ``[T, K]``, -1 where the entry is negative or beyond the table; number of slots per row, 0 for invalid
        tokens (whose slots are still filled).

    Notes:
        Rows are not compacted: ``lens`` is a prefix length only if valid entries come first.
    """
    ops = triton_ops if runs_triton(topk_indices) else torch_ops
    return ops.compute_global_topk_indices_and_lens(topk_indices, token_to_req, block_table, block_size, is_valid)


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
    """Joins selected compressed entries and the sliding window into one row of workspace indices per query.

    The workspace is ``[c, M, dim]`` seen as ``[c * M, dim]``: request ``b`` has its compressed entries from row
    ``b * M`` and the last ``gather_lens[b]`` tokens of its window from row ``b * M + N``.

    Args:
        topk_indices: ``[T, K >= topk]`` integers, compressed entries local to the request, in any order.
        query_start_loc: ``[c + 1]`` cumulative query lengths; only differences count, so it may be a slice.
        seq_lens: ``[c]`` tokens of the request after this step.
        gather_lens: ``[c]`` window tokens in the workspace, at least ``query_len + min(prefix_len, window - 1)``.
        window: tokens a query sees, itself included.
        ratio: tokens per compressed entry; 0 for layers with the window only.
        topk: compressed entries per query; 0 for layers with the window only.
        M: workspace rows per request.
        N: first window row of a request.
        is_valid: bool ``[T]``, or None for all valid.

    Returns:
        Indices ``[T, round_up(topk + window, 128)]`` and lengths. A row holds ``n_c`` entries, then ``n_w`` window rows
        in ascending order without a gap, then -1; its length is ``n_c + n_w``.

    Notes:
        ``n_c = min((pos + 1) // ratio, topk)`` follows from the position alone: the first ``n_c`` columns of a
        ``topk_indices`` row are assumed to be the valid ones, later columns are never read. A negative entry among the
        first ``n_c`` stays a hole (-1) and still counts in the length. Invalid rows, and those past the last query, get
        -1 and length 0.

    Raises:
        ValueError: shapes disagree, or workspace indices would not fit in int32.
    """
    ops = triton_ops if runs_triton(topk_indices) else torch_ops
    return ops.combine_topk_swa_indices(
        topk_indices, query_start_loc, seq_lens, gather_lens, window, ratio, topk, M, N, is_valid
    )
