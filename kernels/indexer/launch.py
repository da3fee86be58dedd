"""Launches of the indexer's queries, scores and selection in Triton and, on Hopper, in Gluon.

`index_select` computes scores and their top-k together, a block of queries at a time, so that long contexts take
little memory; with candidate blocks it also keeps blocks, or selects among the entries of the kept blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.common.checks import INTS, check
from deepseek_attn.kernels.common.counters import counters_of
from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import (
    KernelRows,
    RowsProblem,
    SharedLaunch,
    cdiv,
    launch_options,
    pdl_options,
    unlisted_plans,
)
from deepseek_attn.kernels.common.raw_queries import RawQueries
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.indexer.candidates_triton import (
    CandidateRows,
    block_scores_kernel,
    candidate_entries_kernel,
    candidate_scores_kernel,
)
from deepseek_attn.kernels.indexer.plan import (
    BLOCKS,
    CANDIDATE_SCORES,
    ENTRIES,
    QUERIES,
    SCORES,
    TOPK,
    ScoresProblem,
    TopkProblem,
)
from deepseek_attn.kernels.indexer.query_triton import (
    IndexQueryArgs,
    IndexQueryShape,
    index_query_kernel,
    latent_queries_kernel,
    queries_kernel,
)
from deepseek_attn.kernels.indexer.reference import check_index_rows, check_tokens
from deepseek_attn.kernels.indexer.scores_decode_hopper import index_scores_decode_hopper_kernel
from deepseek_attn.kernels.indexer.scores_hopper import index_scores_hopper_kernel
from deepseek_attn.kernels.indexer.scores_triton import ScoreRows, ScoresShape, index_scores_kernel
from deepseek_attn.kernels.indexer.topk_triton import TopkRows, topk_kernel
from deepseek_attn.kernels.indexer.types import (
    KEY_FORMATS,
    SCORE_BYTES,
    TRITON_HEAD_DIM,
    CandidateBlocks,
    IndexQueries,
    IndexQueryRows,
    PagedIndexKeys,
)
from deepseek_attn.kernels.insert.launch import head_launch
from deepseek_attn.kernels.latent.launch import absorb_launch, absorb_queries
from deepseek_attn.kernels.latent.types import LatentQueries


def index_query(rows: IndexQueryRows) -> IndexQueries:
    """`kernels.indexer.index_query` in Triton, for heads of 128 channels."""
    launch = _index_launch(rows, "index_query_kernel")
    if all(launch.grid):
        index_query_kernel[launch.grid](launch.arguments, SHAPE=launch.shape, **launch.plan.options)
    return launch.out


def queries(raw_q: RawQueries, index: IndexQueryRows) -> tuple[Tensor, IndexQueries]:
    """`kernels.indexer.queries` in Triton, for rows that `query_norm_rope` and `index_query` take there."""
    with unlisted_plans():
        _, arguments, shape, out, (tokens, blocks) = head_launch(raw_q)
    launch = _index_launch(index, "queries_kernel")
    check_tokens(tokens, index)
    if tokens:
        grid, shapes = (tokens, blocks + launch.grid[1]), {"SHAPE": shape, "INDEX_SHAPE": launch.shape}
        queries_kernel[grid](arguments, launch.arguments, blocks, **shapes, **launch.plan.options)
    return out, launch.out


def latent_queries(queries: LatentQueries, index: IndexQueryRows) -> tuple[Tensor, IndexQueries]:
    """`kernels.indexer.latent_queries` in Triton, for rows that `absorb_queries` and `index_query` take there."""
    tokens = len(queries.q)
    check_tokens(tokens, index)
    with unlisted_plans():
        absorbed = absorb_launch(queries)
    if absorbed.plan.rotation is not None:  # cuBLAS multiplies
        del absorbed  # allocated anew
        return absorb_queries(queries), index_query(index)
    launch = _index_launch(index, "latent_queries_kernel")
    (programs, token_blocks), (_, blocks) = absorbed.grid, launch.grid
    if tokens:
        arguments = absorbed.arguments, launch.arguments, programs, token_blocks, blocks
        shapes = {"SHAPE": absorbed.shape, "INDEX_SHAPE": launch.shape}
        latent_queries_kernel[(programs * token_blocks + tokens * blocks,)](*arguments, **shapes, **launch.plan.options)
    return absorbed.out, launch.out


def _index_launch(rows: IndexQueryRows, kernel: str) -> SharedLaunch:
    """Checks the rows, plans their launch by ``kernel`` and allocates the results."""
    check_index_rows(rows)
    q, weights, cos_sin, fmt, dim = rows.q, rows.weights, rows.cos_sin, rows.key_format, TRITON_HEAD_DIM
    T, H = weights.shape
    out = torch.empty(T, H, dim, dtype=q.dtype if fmt == "plain" else torch.float8_e4m3fn, device=q.device)
    out_weights = torch.empty(T, H, dtype=torch.float32, device=q.device)
    plan = QUERIES.plan(KernelRows(T, dim, kernel=kernel), gpu(q.device))
    args = IndexQueryArgs(
        q, weights, cos_sin, rows.positions, out if fmt == "plain" else out.view(torch.uint8), out_weights, rows.scale,
        len(cos_sin), q.stride(0), weights.stride(0),
    )  # fmt: skip
    shape = IndexQueryShape(
        H, dim, cos_sin.shape[1], rows.half_split, rows.hadamard, fmt, plan.native_fp8, plan.config.size
    )
    grid = T, cdiv(H, shape.BLOCK_H)
    return SharedLaunch(plan, args, shape, IndexQueries(out, out_weights, rows.score_dtype), grid)


def index_select(
    queries: IndexQueries, keys: PagedIndexKeys, num_visible: Tensor, k: int, width: int | None = None,
    out: Tensor | None = None, out_slots: Tensor | None = None, candidates: CandidateBlocks | None = None,
) -> Tensor:  # fmt: skip
    """`kernels.indexer.index_select` in Triton."""
    width = checked_width(queries, keys, num_visible, width)
    T, device = len(queries.q), queries.q.device
    out = torch.empty(T, k, dtype=torch.int32, device=device) if out is None else out
    check("out", out, (T, k), torch.int32, rows=True)
    check("out_slots", out_slots, (T, k), torch.int32, rows=True)
    if candidates is not None:
        check("candidate blocks", candidates.kept, (T, "n"), torch.int32, rows=True)
        width = width if candidates.fill else candidates.kept.shape[1] * candidates.size
    block = rows_per_block(4 * width, SCORE_BYTES)
    buffer = torch.empty(min(T, block), width, dtype=torch.float32, device=device)
    for start, end in row_blocks(T, block):
        rows, scores = slice(start, end), buffer[: end - start]
        chosen, slots = out[rows], None if out_slots is None else out_slots[rows]
        visible, row_keys = num_visible[rows], keys._replace(token_to_req=keys.token_to_req[rows])
        blocks = None if candidates is None else candidates._replace(kept=candidates.kept[rows])
        if blocks is None or blocks.fill:
            launch_scores(queries.of(rows), row_keys, visible, k, scores)
            launch_topk(scores, visible, chosen, row_keys, slots)
            if blocks is not None:
                keep_blocks(scores, visible, k, blocks)
        else:
            launch_scores(queries.of(rows), row_keys, visible, k, scores, blocks)
            launch_topk(scores, visible, chosen)
            launch_candidate_entries(chosen, slots, visible, row_keys, blocks)
    return out


def paged_index_scores(
    queries: IndexQueries, keys: PagedIndexKeys, num_visible: Tensor, width: int | None = None
) -> Tensor:
    """`kernels.indexer.paged_index_scores` in Triton."""
    T, width = len(queries.q), checked_width(queries, keys, num_visible, width)
    out = torch.empty(T, width, dtype=torch.float32, device=queries.q.device)
    launch_scores(queries, keys, num_visible, 0, out)
    return out


def launch_scores(
    queries: IndexQueries, keys: PagedIndexKeys, num_visible: Tensor, skip: int, out: Tensor,
    candidates: CandidateBlocks | None = None,
) -> None:  # fmt: skip
    """Writes the scores of a request's first entries, or of each query's candidates, to float32 ``out [T, W]``.

    Rows with at most ``skip`` visible entries get no scores. The columns of candidates, ``n * size``, are in the order
    of ``candidates.kept``, which ascends before its -1s. The first ``num_visible[t]`` of them are written, -inf for
    invisible entries; they include all candidates of the query, so `launch_topk` takes this as the length of the row.
    """
    q, pool, table, (T, H, dim), width = queries.q, keys.pool, keys.block_table, queries.q.shape, out.shape[1]
    if not out.numel() or not table.numel():
        return
    key_format, rounded = KEY_FORMATS[keys.record.name], queries.score_dtype != torch.float32
    exact = key_format == "plain" and (q.dtype != keys.record.dtype or q.dtype == torch.float32)
    aligned = all(rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.itemsize % 16 == 0 for rows in (q, pool))
    problem = ScoresProblem(T, len(table), width, H, dim, key_format, exact, rounded, aligned, batch_invariant())
    plan = (SCORES if candidates is None else CANDIDATE_SCORES).plan(problem, gpu(out.device))
    config, grid = plan.config, (cdiv(T, plan.config.tokens), plan.config.splits)
    if key_format == "plain":
        pool, dtype = pool.view(keys.record.dtype), torch.float32 if exact else q.dtype
    elif plan.native_fp8:
        pool, dtype = pool.view(torch.float8_e4m3fn) if key_format == "fp8" else pool, torch.float8_e4m3fn
    else:
        q, dtype = q.view(torch.uint8), torch.float16
    rows = ScoreRows(q, queries.weights, pool, out, pool.stride(0), out.stride(0))
    lists = table, keys.token_to_req, num_visible
    arguments = rows, *lists, T, width, skip, table.stride(0)
    if plan.kernel == "index_scores_hopper_kernel":
        index_scores_hopper_kernel[grid](*arguments, PAGE=keys.entries, **launch_options())
    elif plan.kernel == "index_scores_decode_hopper_kernel":
        constants = {"PAGE": keys.entries, "TOKENS": config.tokens, "FP4": key_format == "fp4"}
        index_scores_decode_hopper_kernel[grid](*arguments, **constants, **launch_options(pdl=True))
    else:
        shape = ScoresShape(
            H, dim, keys.entries, key_format, plan.native_fp8, TRITON_DTYPES[dtype], TRITON_DTYPES[queries.score_dtype],
            config.tokens, config.keys, config.stages,
        )  # fmt: skip
        options = {"SHAPE": shape, "num_stages": config.stages, **pdl_options(4, plan.pdl)}
        if candidates is None:
            index_scores_kernel[grid](*arguments, **options)
        else:
            kept, size = candidates.kept, candidates.size
            blocks = rows, kept, kept.stride(0), *lists, width, skip, table.stride(0)
            candidate_scores_kernel[grid](*blocks, SIZE=size, **options)


def launch_candidate_entries(
    out: Tensor, out_slots: Tensor | None, num_visible: Tensor, keys: PagedIndexKeys, candidates: CandidateBlocks
) -> None:
    """Replaces selected columns ``out [T, k]`` by their entries, and writes the entries' slots."""
    if not out.numel():
        return
    (T, k), kept, table = out.shape, candidates.kept, keys.block_table
    plan = ENTRIES.plan(RowsProblem(T, k), gpu(out.device))
    entries = plan.config.size
    slots = out if out_slots is None else out_slots  # the kernel takes a pointer even if PAGE disables its use
    strides = out.stride(0), kept.stride(0), 0 if out_slots is None else slots.stride(0)
    constants = {"K": k, "SIZE": candidates.size, "PAGE": 0 if out_slots is None else keys.entries, "BLOCK": entries}
    arguments = CandidateRows(out, kept, slots, *strides), table, keys.token_to_req, num_visible, table.stride(0)
    candidate_entries_kernel[(T, cdiv(k, entries))](*arguments, **constants, **plan.options)


def keep_blocks(scores: Tensor, num_visible: Tensor, skip: int, candidates: CandidateBlocks) -> None:
    """Fills ``candidates.kept`` from ``scores [T, W]``, which `launch_scores` made with this ``skip``."""
    (T, width), size, kept = scores.shape, candidates.size, candidates.kept
    if kept.numel() == 0:
        return
    count = cdiv(width, size)
    plan = BLOCKS.plan(RowsProblem(T, count), gpu(scores.device))
    blocks = plan.config.size
    best = torch.empty(T, count, dtype=torch.float32, device=scores.device)
    counts = torch.empty(T, dtype=torch.int32, device=scores.device)
    arguments = scores, num_visible, best, counts, width, skip, scores.stride(0), best.stride(0)
    block_scores_kernel[(T, max(1, cdiv(count, blocks)))](*arguments, SIZE=size, BLOCKS=blocks, **plan.options)
    launch_topk(best, counts, kept)


def topk_indices(scores: Tensor, lens: Tensor, k: int) -> Tensor:
    """`kernels.indexer.topk_indices` in Triton, for float32 scores."""
    check("scores", scores, ("T", "W"), torch.float32, rows=True)
    check("lens", lens, (len(scores),), INTS)
    return launch_topk(scores, lens, torch.empty(len(scores), k, dtype=torch.int32, device=scores.device))


def launch_topk(
    scores: Tensor, lens: Tensor, out: Tensor, keys: PagedIndexKeys | None = None, out_slots: Tensor | None = None
) -> Tensor:
    """Writes the columns of the highest scores to ``out [T, k]``, and with ``keys`` their slots; one launch.

    Rows longer than ``capacity`` need scratch: a bit for each score, and 8 bytes for each candidate that a program can
    hold. Programs share a row only where there are few rows; they count arrivals in `counters_of`.
    """
    if not out.numel():
        return out
    plan = TOPK.plan(TopkProblem(len(scores), scores.shape[1], k=out.shape[1]), gpu(scores.device))
    (T, W), device, config = scores.shape, scores.device, plan.config
    # the kernel takes pointers even if PAGE disables their use
    table, requests, slots, page_entries = out, lens, out, 0
    if keys is not None and out_slots is not None:
        table, requests, slots, page_entries = keys.block_table, keys.token_to_req, out_slots, keys.entries
    long_rows = T if config.capacity < W else 0
    marks = torch.empty(long_rows, 4 * cdiv(W, 128), dtype=torch.int32, device=device)
    candidates = torch.empty(long_rows, config.splits, config.capacity, dtype=torch.int64, device=device)
    counts = torch.empty(T, config.splits, dtype=torch.int32, device=device)
    arrivals = counters_of(device) if config.splits > 1 else counts
    strides = scores.stride(0), out.stride(0), slots.stride(0)
    rows = TopkRows(scores, out, slots, marks, candidates, counts, arrivals, *strides)
    topk_kernel[(T, config.splits)](
        *(rows, lens, table, requests, W, table.stride(0)),
        CONFIG=config,
        K=out.shape[1],
        ALIGNED=W % 4 == 0 and scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0,
        PAGE=page_entries,
        maxnreg=config.max_registers,
        **pdl_options(config.num_warps, plan.pdl),
    )
    return out


def checked_width(queries: IndexQueries, keys: PagedIndexKeys, num_visible: Tensor, width: int | None) -> int:
    """Columns of scores, by default all entries of a block table.

    Raises:
        ValueError: arguments that the kernels of scores do not take.
    """
    q, (record, pool, page_entries, block_table, token_to_req) = queries.q, keys
    if record.name not in KEY_FORMATS:
        raise ValueError(f"index keys are records {', '.join(KEY_FORMATS)}, got {record.name}")
    dtypes = FLOATS if record.name == "plain" else (torch.float8_e4m3fn,)
    check(f"q for {record.name} keys", q, ("T", "H", record.dim), dtypes, contiguous=True)
    check("weights", queries.weights, q.shape[:2], torch.float32, contiguous=True)
    record.check_pool(pool, page_entries, 4)
    check("block_table", block_table, ("B", "P"), rows=True)
    check("token_to_req", token_to_req, q.shape[:1])
    check("num_visible", num_visible, q.shape[:1])
    entries = block_table.shape[1] * page_entries
    width = entries if width is None else width
    if not 0 <= width <= entries:
        raise ValueError(f"width must be in 0 .. {entries}, the entries of a block table, got {width}")
    return width
