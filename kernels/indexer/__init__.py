"""The lightning indexer: its queries, the scores of cached keys, and the keys with the highest scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.common.raw_queries import RawQueries
from deepseek_attn.kernels.indexer.types import (
    MAX_TRITON_TOPK,
    TRITON_HEAD_DIM,
    CandidateBlocks,
    IndexQueries,
    IndexQueryRows,
    PagedIndexKeys,
)
from deepseek_attn.kernels.latent.types import LatentQueries

if TYPE_CHECKING:
    from deepseek_attn.kernels.indexer import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def _in_triton(rows: IndexQueryRows) -> bool:
    """Whether the Triton kernel takes these heads, where they are."""
    return runs_triton(rows.q) and rows.q.shape[1] == rows.weights.shape[1] * TRITON_HEAD_DIM


def index_query(rows: IndexQueryRows) -> IndexQueries:
    """Applies RoPE and, if requested, the Hadamard matrix; quantises to the keys' format; folds scales into weights.

    Notes:
        Values of FP4 queries are held in e4m3, relative to the largest scale of their head, times 64: exact where the
        scales of a head differ by up to ``2**14``. A head that holds a NaN or an infinity gets NaN values or a NaN
        weight, in Triton always the weight. Zero rows are fine.

    Raises:
        ValueError: tensors that disagree, or an unknown key format. Triton serves heads of 128 channels.
    """
    return (triton_ops if _in_triton(rows) else torch_ops).index_query(rows)


def queries(raw_q: RawQueries, index: IndexQueryRows) -> tuple[Tensor, IndexQueries]:
    """`query_norm_rope` of the layer's heads and `index_query` of the indexer's, for the same tokens, in one launch.

    Args:
        raw_q: of `query_norm_rope`; index: of `index_query`.

    Returns:
        The results of both ops, bit-identical to results from separate calls.

    Raises:
        ValueError: different numbers of tokens, or arguments that either op refuses.
    """
    return (triton_ops if _in_triton(index) else torch_ops).queries(raw_q, index)


def latent_queries(queries: LatentQueries, index: IndexQueryRows) -> tuple[Tensor, IndexQueries]:
    """`absorb_queries` of a V3.2 layer and `index_query` of its indexer; for few tokens in one launch.

    Args:
        queries: of `kernels.latent.absorb_queries`; index: of `index_query`.

    Returns:
        The results of both ops, bit-identical to results from separate calls.

    Raises:
        ValueError: different numbers of tokens, or arguments that either op refuses.
    """
    return (triton_ops if _in_triton(index) else torch_ops).latent_queries(queries, index)


def index_scores(q: Tensor, k: Tensor, weights: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scores against contiguous keys, ``sum_h weights[t, h] * relu(q[t, h] . k[n])`` in float32; plain torch only.

    Args:
        q: ``[T, heads, dim]`` indexer queries; k: ``[N, dim]`` keys, shared by the heads; any float dtypes.
        weights: ``[T, heads]``, every scale of ``q`` and ``k`` included.
        dtype: see ``score_dtype`` of `IndexQueries`.

    Returns:
        float32 ``[T, N]``; no column is masked. A NaN in a query or key is a NaN in its row or column only.

    Raises:
        ValueError: shapes that disagree.

    Notes:
        One matrix product per block of rows and keys; scratch is about 16 MiB (`reference.GEMM_BYTES`).
    """
    return torch_ops.index_scores(q, k, weights, dtype)


def paged_index_scores(
    queries: IndexQueries, keys: PagedIndexKeys, num_visible: Tensor, width: int | None = None
) -> Tensor:
    """Scores of each query against the first ``num_visible[t]`` entries of its request, read from pages.

    Args:
        num_visible: integer ``[T]``, entries that a query may see.
        width: columns of the result, by default all entries that fit the block table.

    Returns:
        float32 ``[T, width]``. Columns from ``num_visible[t]`` on are -inf in plain torch and not written in Triton. A
        NaN key has a NaN score. A token's scores do not depend on the batch.

    Raises:
        ValueError: tensors or a record that the kernels do not take.
    """
    ops = triton_ops if _scored_in_triton(queries) else torch_ops
    return ops.paged_index_scores(queries, keys, num_visible, width)


def topk_indices(scores: Tensor, lens: Tensor, k: int) -> Tensor:
    """Columns of the ``k`` highest scores among the first ``lens[t]`` columns of each row; exact.

    Args:
        scores: float ``[T, N]``; columns past the length may hold anything.
        lens: integer ``[T]`` valid prefix length, clamped to ``0 .. N``.

    Returns:
        int32 ``[T, k]``: the selected columns in ascending order, then -1. A row with ``lens <= k`` selects all of its
        columns.

    Raises:
        ValueError: shapes or dtypes that disagree.

    Notes:
        Ties: the smaller index. NaN counts as -inf; such columns are valid and fill a row only after every other valid
        column. A row depends on nothing but its own scores and length. Triton serves ``k`` up to `MAX_TRITON_TOPK`.
    """
    ops = triton_ops if runs_triton(scores) and k <= MAX_TRITON_TOPK else torch_ops
    return ops.topk_indices(scores, lens, k)


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
    """The ``k`` entries with the highest scores among the first ``num_visible[t]`` of each query's request.

    Args:
        queries, keys, num_visible: as in `paged_index_scores`; width: upper bound of the entries that a query sees.
        out: int32 ``[T, k]`` with contiguous rows, to write to.
        out_slots: int32 ``[T, k]``, filled with the slots (page * entries + offset) of the selected entries, then -1.
        candidates: blocks of entries to keep, or to select from; at least ``k`` visible entries, or all of them, must
            be in those to select from.

    Returns:
        int32 ``[T, k]``: entries local to the request, ascending, then -1.

    Raises:
        ValueError: arguments that `paged_index_scores` refuses, or results of other shapes.

    Notes:
        Scores are computed for a block of queries at a time, within `SCORE_BYTES` or for one query. In Triton the
        selection takes two thirds more memory, launches depend on shapes alone, and nothing waits for the GPU. Where
        candidates limit the selection, only their keys are read. Triton serves heads of 128 channels and up to
        `MAX_TRITON_TOPK` entries and candidate blocks; plain torch, for others, waits for lengths.
    """
    selected = max(k, 0 if candidates is None else candidates.kept.shape[1])
    ops = triton_ops if _scored_in_triton(queries) and selected <= MAX_TRITON_TOPK else torch_ops
    return ops.index_select(queries, keys, num_visible, k, width, out, out_slots, candidates)


def _scored_in_triton(queries: IndexQueries) -> bool:
    return runs_triton(queries.q) and queries.q.shape[2] == TRITON_HEAD_DIM
