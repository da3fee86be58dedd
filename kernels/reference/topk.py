"""Exact top-k of index scores."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.reference.blocks import row_blocks, rows_per_block


@torch.no_grad()
def topk_indices(
    scores: Tensor,
    lens: Tensor,
    k: int,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    token_to_req: Tensor | None = None,
    page_entries: int = 0,
    out_slots: Tensor | None = None,
) -> Tensor:
    """Columns of the ``k`` highest scores among the first ``lens[t]`` columns of each row.

    Args:
        scores: float ``[T, N]``; columns past the length may hold anything.
        lens: integer ``[T]`` valid prefix length, clamped to ``0 .. N``.
        k: columns to select.
        out: like the result, to write to.
        block_table: int32 ``[B, P]``; token_to_req: ``[T]``, a row's request; page_entries: columns per page.
        out_slots: int32 ``[T, k]``, filled with the slots of the selected columns and -1.

    Returns:
        int32 ``[T, k]``: the selected columns in ascending order, then -1. A row with ``lens <= k`` selects all of its
        columns.

    Notes:
        Ties: the smaller index. NaN counts as -inf; such columns are valid and fill a row only after every other valid
        column. A row depends on nothing but its own scores and length. Scratch is bounded by ``blocks.SCRATCH_BYTES``.
    """
    if scores.dim() != 2 or lens.shape != scores.shape[:1] or k < 0:
        raise ValueError(
            f"need scores [T, N], lens [T] and k >= 0: got {tuple(scores.shape)}, {tuple(lens.shape)}, k={k}"
        )
    selected = _topk(scores, lens.long().clamp(0, scores.shape[1]), k)
    if out is not None:
        selected = out.copy_(selected)
    if out_slots is not None:
        page = block_table[token_to_req.long()].gather(1, selected.clamp(min=0).long() // page_entries)
        out_slots.copy_(torch.where(selected >= 0, page * page_entries + selected % page_entries, -1))
    return selected


def _topk(scores: Tensor, lens: Tensor, k: int) -> Tensor:
    T, N = scores.shape
    if k >= N:
        column = torch.arange(k, dtype=torch.int32, device=scores.device)
        return torch.where(column < lens[:, None], column, -1)
    out = torch.empty(T, k, dtype=torch.int32, device=scores.device)
    if k > 0:
        for start, end in row_blocks(T, rows_per_block(32 * N)):
            out[start:end] = _compact(_select(scores[start:end], lens[start:end], k), k)
    return out


def _select(scores: Tensor, lens: Tensor, k: int) -> Tensor:
    """Bool ``[rows, N]`` mask of the selected columns, ``0 < k < N``."""
    valid = torch.arange(scores.shape[1], device=scores.device) < lens[:, None]
    scores = scores.masked_fill(~valid | scores.isnan(), float("-inf"))
    threshold = scores.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above = scores > threshold
    missing = k - above.sum(1, keepdim=True)
    tied = (scores == threshold) & valid
    return above | (tied & (tied.cumsum(1, dtype=torch.int32) <= missing))


def _compact(selected: Tensor, k: int) -> Tensor:
    """int32 ``[rows, k]`` columns where ``selected`` (at most ``k`` per row) is set, ascending, then -1."""
    rows, N = selected.shape
    place = selected.cumsum(1) - 1
    place = place.masked_fill_(~selected, k)
    column = torch.arange(N, dtype=torch.int32, device=selected.device).expand(rows, N)
    out = torch.full((rows, k + 1), -1, dtype=torch.int32, device=selected.device)
    return out.scatter_(1, place, column)[:, :k]
