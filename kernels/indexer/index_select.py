"""Scores and their top-k together, a block of queries at a time, so that long contexts take little memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.indexer.index_scores import paged_index_scores
from deepseek_attn.kernels.indexer.topk import topk_indices

SCORE_BYTES = 64 << 20  # scores of one block of queries


def index_select(
    q: Tensor,
    weights: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    block_table: Tensor,
    token_to_req: Tensor,
    visible: Tensor,
    k: int,
    width: int | None = None,
    out: Tensor | None = None,
    out_slots: Tensor | None = None,
) -> Tensor:
    """Same as `reference.index_select`, on a GPU.

    Notes:
        Scratch is ``SCORE_BYTES`` for scores, or those of one query, and two thirds as much for the selection. How many
        launches there are depends on shapes alone.
    """
    T = q.shape[0]
    width = block_table.shape[1] * page_entries if width is None else width
    out = torch.empty(T, k, dtype=torch.int32, device=q.device) if out is None else out
    block = max(1, SCORE_BYTES // (4 * max(width, 1)))
    scores = torch.empty(min(T, block), width, dtype=torch.float32, device=q.device)
    keys = record, pool, page_entries, block_table
    for start in range(0, T, block):
        rows = slice(start, min(start + block, T))
        part = scores[: rows.stop - start]
        paged_index_scores(q[rows], weights[rows], *keys, token_to_req[rows], visible[rows], width, k, part)
        slots = None if out_slots is None else out_slots[rows]
        topk_indices(part, visible[rows], k, out[rows], block_table, token_to_req[rows], page_entries, slots)
    return out
