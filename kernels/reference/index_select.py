"""Scores and their top-k together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepseek_attn.kernels.reference.index_scores import paged_index_scores
from deepseek_attn.kernels.reference.topk import topk_indices


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
    """The ``k`` entries with the highest scores among the first ``visible[t]`` of each query's request.

    Args and result as in `paged_index_scores` and `topk_indices`: int32 ``[T, k]``, entries local to the request,
    ascending, then -1; ``width``: no query sees more entries.
    """
    keys = record, pool, page_entries, block_table
    scores = paged_index_scores(q, weights, *keys, token_to_req, visible, width, k)
    return topk_indices(scores, visible, k, out, block_table, token_to_req, page_entries, out_slots)
