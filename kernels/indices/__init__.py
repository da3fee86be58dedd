"""Index tensors of a step: which cache slots, or rows of the prefill workspace, each query reads or writes.

A *slot* is ``page * block_size + offset``; -1 marks an unused place. Block tables are ``[B, pages]`` integers; a
negative page id is no page, and entries past a request's length are never used. Page ids are multiplied in int64.
Nothing waits for the device, and shapes do not depend on values: all of this may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.indices.types import DecodeRows, EntryCounts, EntryGroup, IndexRows, StepIndices

__all__ = [
    "DecodeRows",
    "EntryCounts",
    "EntryGroup",
    "IndexRows",
    "StepIndices",
    "build_c128a_topk_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "compute_swa_indices_and_lens",
    "decode_rows",
    "decode_step_indices",
    "entry_counts",
    "get_compressed_slot_mapping",
    "slot_mapping_from_positions",
]


def decode_rows(starts: Tensor, ends: Tensor, rows_per_request: int, max_len: int, offset: int = 0) -> DecodeRows:
    """Positions of ``rows_per_request`` rows of each request, and which of them are padding.

    Args:
        starts: int64 ``[B]``; the first row of a request is at ``starts + offset``.
        ends: int64 ``[B]``; rows at or beyond them are padding.
        max_len: positions are at most ``max_len - 1``, for which there are tables and rotations.
    """
    if runs_triton(starts):
        from deepseek_attn.kernels.indices.step_indices import decode_rows as op
    else:
        from deepseek_attn.kernels.indices.reference import decode_rows as op
    return op(starts, ends, rows_per_request, max_len, offset)


def entry_counts(positions: Tensor, is_valid: Tensor, ratio: int, topk: int) -> EntryCounts:
    """How many entries each token sees, ``(position + 1) // ratio``, and reads: at most ``topk``. 0 for padding.

    Args:
        positions: int64 ``[T]``; is_valid: bool ``[T]``.
    """
    if runs_triton(positions):
        from deepseek_attn.kernels.indices.step_indices import entry_counts as op
    else:
        from deepseek_attn.kernels.indices.reference import entry_counts as op
    return op(positions, is_valid, ratio, topk)


def decode_step_indices(
    positions: Tensor,
    token_to_req: Tensor,
    is_valid: Tensor,
    window_table: Tensor,
    window_page: int,
    window: int,
    groups: Sequence[EntryGroup],
) -> StepIndices:
    """All index tensors of a decode step, in Triton in one launch; equal to those of the functions below.

    Args:
        positions: int64 ``[T]``; token_to_req: ``[T]``; is_valid: bool ``[T]``.
        window_table: ``[B, pages]``; window_page: tokens per page; window: tokens a query sees, itself included.
        groups: one per ratio.
    """
    if runs_triton(positions):
        from deepseek_attn.kernels.indices.step_indices import decode_step_indices as op
    else:
        from deepseek_attn.kernels.indices.reference import decode_step_indices as op
    return op(positions, token_to_req, is_valid, window_table, window_page, window, groups)


def slot_mapping_from_positions(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None = None
) -> Tensor:
    """Slot of each token, int64 ``[T]``; -1 for invalid ones, negative positions and those beyond the block table.

    Args:
        positions: int64 ``[T]``; token_to_req: ``[T]`` row of ``block_table`` per token.
        block_size: tokens per page.
        is_valid: bool ``[T]``, or None for all valid.
    """
    if runs_triton(positions):
        from deepseek_attn.kernels.indices.step_indices import slot_mapping_from_positions as op
    else:
        from deepseek_attn.kernels.indices.reference import slot_mapping_from_positions as op
    return op(positions, token_to_req, block_table, block_size, is_valid)


def get_compressed_slot_mapping(
    positions: Tensor, slot_mapping: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, ratio: int
) -> Tensor:
    """Slot where each token writes its compressed entry: only the last token of a window of ``ratio`` writes one.

    Args:
        positions: int64 ``[T]``; token_to_req: ``[T]`` row of ``block_table`` per token.
        slot_mapping: int64 ``[T]`` slots of the tokens themselves; negative for padding, which writes nothing.
        block_size: compressed entries per page.
        ratio: tokens per compressed entry.

    Returns:
        int64 ``[T]``: slot of entry ``pos // ratio``, or -1.
    """
    if runs_triton(positions):
        from deepseek_attn.kernels.indices.step_indices import get_compressed_slot_mapping as op
    else:
        from deepseek_attn.kernels.indices.reference import get_compressed_slot_mapping as op
    return op(positions, slot_mapping, token_to_req, block_table, block_size, ratio)


def compute_swa_indices_and_lens(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int,
    is_valid: Tensor | None,
) -> IndexRows:
    """Slots of the sliding window of each token: positions ``max(pos - window + 1, 0) .. pos``, ascending, then -1.

    Args:
        positions: int64 ``[T]``; token_to_req: ``[T]`` row of ``block_table`` per token.
        block_size: tokens per page.
        window: tokens a query sees, itself included.
        is_valid: bool ``[T]``, or None for all valid; invalid tokens get -1 everywhere and length 0.

    Returns:
        Indices ``[T, window]`` and lengths.
    """
    if runs_triton(positions):
        from deepseek_attn.kernels.indices.step_indices import compute_swa_indices_and_lens as op
    else:
        from deepseek_attn.kernels.indices.reference import compute_swa_indices_and_lens as op
    return op(positions, token_to_req, block_table, block_size, window, is_valid)


def build_c128a_topk_indices(
    positions: Tensor,
    ratio: int,
    token_to_req: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
    is_valid: Tensor | None,
    width: int,
) -> IndexRows:
    """All closed compressed entries of each token: entries ``0 .. (pos + 1) // ratio - 1``, then -1.

    Args:
        positions: int64 ``[T]``.
        ratio: tokens per compressed entry, any positive number.
        token_to_req: ``[T]`` row of ``block_table`` per token; block_table: ``[B, pages]``. Without a block table the
            result is the entries themselves, local to the request (prefill).
        block_size: entries per page.
        is_valid: bool ``[T]``, or None for all valid; invalid tokens get -1 everywhere and length 0.
        width: columns of the result; longer rows are truncated.

    Returns:
        Indices ``[T, width]`` and lengths.
    """
    if runs_triton(positions):
        from deepseek_attn.kernels.indices.step_indices import build_c128a_topk_indices as op
    else:
        from deepseek_attn.kernels.indices.reference import build_c128a_topk_indices as op
    return op(positions, ratio, token_to_req, block_table, block_size, is_valid, width)


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
    if runs_triton(topk_indices):
        from deepseek_attn.kernels.indices.step_indices import compute_global_topk_indices_and_lens as op
    else:
        from deepseek_attn.kernels.indices.reference import compute_global_topk_indices_and_lens as op
    return op(topk_indices, token_to_req, block_table, block_size, is_valid)


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
        query_start_loc: ``[c + 1]`` cumulative query lengths; may be a slice of a longer one, only differences count.
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
    if runs_triton(topk_indices):
        from deepseek_attn.kernels.indices.step_indices import combine_topk_swa_indices as op
    else:
        from deepseek_attn.kernels.indices.reference import combine_topk_swa_indices as op
    return op(topk_indices, query_start_loc, seq_lens, gather_lens, window, ratio, topk, M, N, is_valid)
