"""Scores and their top-k together, a block of queries at a time, so that long contexts take little memory."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.indexer.scores import paged_index_scores
from deepseek_attn.kernels.indexer.topk import topk_indices
from deepseek_attn.kernels.indexer.types import SCORE_BYTES, IndexQueries, PagedIndexKeys


def index_select(
    queries: IndexQueries,
    keys: PagedIndexKeys,
    num_visible: Tensor,
    k: int,
    width: int | None = None,
    out: Tensor | None = None,
    out_slots: Tensor | None = None,
) -> Tensor:
    """`kernels.indexer.index_select` in Triton."""
    q, weights = queries
    T = q.shape[0]
    width = keys.block_table.shape[1] * keys.entries if width is None else width
    out = torch.empty(T, k, dtype=torch.int32, device=q.device) if out is None else out
    block = rows_per_block(4 * width, SCORE_BYTES)
    buffer = torch.empty(min(T, block), width, dtype=torch.float32, device=q.device)
    for start, end in row_blocks(T, block):
        rows = slice(start, end)
        block_keys = keys._replace(token_to_req=keys.token_to_req[rows])
        scores = buffer[: end - start]
        paged_index_scores(IndexQueries(q[rows], weights[rows]), block_keys, num_visible[rows], width, k, scores)
        slots = None if out_slots is None else out_slots[rows]
        topk_indices(scores, num_visible[rows], k, out[rows], block_keys, slots)
    return out
