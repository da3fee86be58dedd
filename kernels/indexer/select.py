"""Scores and their top-k together, a block of queries at a time, so that long contexts take little memory."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.indexer.candidates import keep_blocks, select_candidates
from deepseek_attn.kernels.indexer.scores import paged_index_scores
from deepseek_attn.kernels.indexer.topk import topk_indices
from deepseek_attn.kernels.indexer.types import SCORE_BYTES, CandidateBlocks, IndexQueries, PagedIndexKeys


def index_select(
    queries: IndexQueries,
    keys: PagedIndexKeys,
    num_visible: Tensor,
    k: int,
    width: int | None = None,
    out: Tensor | None = None,
    out_slots: Tensor | None = None,
    candidates: CandidateBlocks | None = None,
) -> Tensor:
    """`kernels.indexer.index_select` in Triton."""
    q = queries.q
    T = q.shape[0]
    limited = candidates is not None and not candidates.fill
    if limited:
        width = candidates.kept.shape[1] * candidates.size
    elif width is None:
        width = keys.block_table.shape[1] * keys.entries
    out = torch.empty(T, k, dtype=torch.int32, device=q.device) if out is None else out
    block = rows_per_block(4 * width, SCORE_BYTES)
    buffer = torch.empty(min(T, block), width, dtype=torch.float32, device=q.device)
    for start, end in row_blocks(T, block):
        rows = slice(start, end)
        block_keys = keys._replace(token_to_req=keys.token_to_req[rows])
        visible, scores = num_visible[rows], buffer[: end - start]
        slots = None if out_slots is None else out_slots[rows]
        blocks = None if candidates is None else candidates._replace(kept=candidates.kept[rows])
        if limited:
            select_candidates(queries.of(rows), block_keys, visible, k, blocks, scores, out[rows], slots)
            continue
        paged_index_scores(queries.of(rows), block_keys, visible, width, k, scores)
        topk_indices(scores, visible, k, out[rows], block_keys, slots)
        if blocks is not None:
            keep_blocks(scores, visible, k, blocks)
    return out
