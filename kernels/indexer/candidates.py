"""Launches of `index_select` with candidate blocks in Triton: how blocks are kept, and the selection among them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import gpu, supports_pdl
from deepseek_attn.kernels.indexer.candidates_triton import (
    block_scores_kernel,
    candidate_entries_kernel,
    candidate_scores_kernel,
)
from deepseek_attn.kernels.indexer.scores import ScoresLaunchConfig, check_scores, key_operand_types, score_constants
from deepseek_attn.kernels.indexer.topk import topk_indices
from deepseek_attn.kernels.indexer.types import CandidateBlocks, IndexQueries, PagedIndexKeys

BLOCKS = 256  # blocks of entries that a program of `block_scores_kernel` reduces
ENTRIES = 512  # selected entries of a program of `candidate_entries_kernel`


def keep_blocks(scores: Tensor, num_visible: Tensor, skip: int, candidates: CandidateBlocks) -> None:
    """Fills ``candidates.kept`` from ``scores [T, W]``, which `paged_index_scores` made with this ``skip``."""
    (T, width), size, kept = scores.shape, candidates.size, candidates.kept
    if kept.numel() == 0:
        return
    count, early = triton.cdiv(width, size), supports_pdl(scores.device)
    best = torch.empty(T, count, dtype=torch.float32, device=scores.device)
    counts = torch.empty(T, dtype=torch.int32, device=scores.device)
    block_scores_kernel[(T, max(1, triton.cdiv(count, BLOCKS)))](
        scores,
        num_visible,
        best,
        counts,
        width,
        skip,
        scores.stride(0),
        best.stride(0),
        SIZE=size,
        SIZE_PADDED=triton.next_power_of_2(size),
        BLOCKS=BLOCKS,
        PDL=early,
        enable_fp_fusion=True,
        num_warps=4,
        launch_pdl=early,
    )
    topk_indices(best, counts, kept.shape[1], kept)


def select_candidates(
    queries: IndexQueries,
    keys: PagedIndexKeys,
    num_visible: Tensor,
    k: int,
    candidates: CandidateBlocks,
    scores: Tensor,
    out: Tensor,
    out_slots: Tensor | None = None,
) -> None:
    """The ``k`` best entries of each query in its blocks; ``scores``: float32 ``[T, n * size]``, scratch."""
    candidate_scores(queries, keys, num_visible, candidates, k, scores)
    topk_indices(scores, num_visible, k, out)
    if out.numel() == 0:
        return
    early, kept = supports_pdl(out.device), candidates.kept
    candidate_entries_kernel[(len(out), triton.cdiv(k, ENTRIES))](
        out,
        num_visible,
        kept,
        keys.block_table,
        keys.token_to_req,
        out if out_slots is None else out_slots,
        out.stride(0),
        kept.stride(0),
        keys.block_table.stride(0),
        0 if out_slots is None else out_slots.stride(0),
        K=k,
        SIZE=candidates.size,
        PAGE=0 if out_slots is None else keys.entries,
        BLOCK=min(ENTRIES, triton.next_power_of_2(k)),
        PDL=early,
        enable_fp_fusion=True,
        num_warps=4,
        launch_pdl=early,
    )


def candidate_scores(
    queries: IndexQueries,
    keys: PagedIndexKeys,
    num_visible: Tensor,
    candidates: CandidateBlocks,
    skip: int,
    out: Tensor,
    config: ScoresLaunchConfig | None = None,
) -> Tensor:
    """Scores of the entries of each query's blocks, in the order of ``candidates.kept``, which ascends before its -1s.

    The first ``num_visible[t]`` columns of a row are written, -inf where there is no visible entry. There are at least
    as many as the query has candidates, so that `topk_indices` takes ``num_visible`` for the length of the row.

    Args:
        skip: rows of up to as many visible entries get no scores; out: float32 ``[T, n * size]``.
        config: by default chosen from shapes alone; its ``tokens`` are 1.
    """
    size, kept = candidates.size, candidates.kept
    key_format = check_scores(queries, keys, num_visible)
    T, columns = len(queries.q), kept.shape[1] * size
    if kept.dim() != 2 or len(kept) != T or kept.dtype != torch.int32 or (columns > size and kept.stride(1) != 1):
        raise ValueError(
            f"candidate blocks must be int32 [{T}, n] with contiguous rows, got {list(kept.shape)} {kept.dtype}, "
            f"strides {kept.stride()}"
        )
    if out.shape != (T, columns) or out.dtype != torch.float32 or (columns > 1 and out.stride(1) != 1):
        raise ValueError(
            f"scores of candidates must be float32 [{T}, {columns}] with contiguous rows, got {list(out.shape)} "
            f"{out.dtype}, strides {out.stride()}"
        )
    if out.numel() == 0 or keys.block_table.numel() == 0:
        return out
    capability, processors = gpu(queries.q.device)
    q, pool, dtype = key_operand_types(queries.q, keys, key_format, capability)
    pdl = capability >= (9, 0)
    if config is None:
        config = choose_config(T, columns, dtype == tl.float32, capability, processors)
    candidate_scores_kernel[(T, config.splits)](
        q,
        queries.weights,
        pool,
        keys.block_table,
        keys.token_to_req,
        num_visible,
        kept,
        out,
        columns,
        skip,
        pool.stride(0),
        keys.block_table.stride(0),
        kept.stride(0),
        out.stride(0),
        **score_constants(queries, keys, key_format, dtype, capability, config),
        SIZE=size,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=4,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )
    return out


def choose_config(
    T: int, columns: int, exact: bool, capability: tuple[int, int], processors: int
) -> ScoresLaunchConfig:
    """Tiling for ``T`` queries of up to ``columns`` candidates.

    One tile each where all programs run at a time; else several waves of programs, of four tiles at least, because a
    last wave of few long ones would take as long as a full one.
    """
    if exact:
        return ScoresLaunchConfig(1, 32, 1, max(1, min(8 * processors // T, triton.cdiv(columns, 64))))
    keys = 128 if capability[0] == 9 else 64
    tiles, resident = triton.cdiv(columns, keys), 4 * processors
    splits = max(resident // T, min(triton.cdiv(4 * resident, T), triton.cdiv(tiles, 4)))
    return ScoresLaunchConfig(1, keys, 3, min(tiles, splits))
