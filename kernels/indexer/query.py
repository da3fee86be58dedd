"""Launches of `index_query` and `queries` in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import SharedLaunch, cdiv, unlisted_plans
from deepseek_attn.kernels.common.raw_queries import RawQueries
from deepseek_attn.kernels.indexer.plan import IndexQueryProblem, plan_queries
from deepseek_attn.kernels.indexer.query_triton import (
    IndexQueryArgs,
    IndexQueryShape,
    index_query_kernel,
    latent_queries_kernel,
    queries_kernel,
)
from deepseek_attn.kernels.indexer.types import KEY_FORMATS, TRITON_HEAD_DIM, IndexQueries, IndexQueryRows
from deepseek_attn.kernels.insert.launch import head_launch
from deepseek_attn.kernels.latent.launch import absorb_launch, absorb_queries
from deepseek_attn.kernels.latent.types import LatentQueries


def index_query(rows: IndexQueryRows) -> IndexQueries:
    """`kernels.indexer.index_query` in Triton, for heads of 128 channels."""
    launch = _index_launch(rows, "index_query_kernel")
    if all(launch.grid):
        options = launch.plan.options
        index_query_kernel[launch.grid](launch.arguments, SHAPE=launch.shape, enable_fp_fusion=True, **options)
    return launch.out


def queries(raw_q: RawQueries, index: IndexQueryRows) -> tuple[Tensor, IndexQueries]:
    """`kernels.indexer.queries` in Triton, for rows that `query_norm_rope` and `index_query` take there."""
    with unlisted_plans():
        _, arguments, shape, out, (tokens, blocks) = head_launch(raw_q)
    launch = _index_launch(index, "queries_kernel")
    _check_tokens(tokens, index)
    if tokens:
        queries_kernel[(tokens, blocks + launch.grid[1])](
            *(arguments, launch.arguments, blocks),
            SHAPE=shape,
            INDEX_SHAPE=launch.shape,
            enable_fp_fusion=True,
            **launch.plan.options,
        )
    return out, launch.out


def latent_queries(queries: LatentQueries, index: IndexQueryRows) -> tuple[Tensor, IndexQueries]:
    """`kernels.indexer.latent_queries` in Triton, for rows that `absorb_queries` and `index_query` take there."""
    tokens = len(queries.q)
    _check_tokens(tokens, index)
    with unlisted_plans():
        absorbed = absorb_launch(queries)
    if absorbed.plan.rotation is not None:  # cuBLAS multiplies
        return absorb_queries(queries._replace(out=absorbed.out)), index_query(index)
    launch = _index_launch(index, "latent_queries_kernel")
    (programs, token_blocks), (_, blocks) = absorbed.grid, launch.grid
    if tokens:
        latent_queries_kernel[(programs * token_blocks + tokens * blocks,)](
            *(absorbed.arguments, launch.arguments, programs, token_blocks, blocks),
            SHAPE=absorbed.shape,
            INDEX_SHAPE=launch.shape,
            enable_fp_fusion=True,
            **launch.plan.options,
        )
    return absorbed.out, launch.out


def _check_tokens(tokens: int, index: IndexQueryRows) -> None:
    if len(index.q) != tokens:
        raise ValueError(f"queries of {tokens} tokens, and of {len(index.q)} for the indexer: must be the same")


def _index_launch(rows: IndexQueryRows, kernel: str) -> SharedLaunch:
    """Checks the rows, plans their launch by ``kernel`` and allocates the results."""
    q, weights, cos_sin, positions, fmt = rows.q, rows.weights, rows.cos_sin, rows.positions, rows.key_format
    dim = TRITON_HEAD_DIM
    check("weights", weights, ("T", "heads"), FLOATS, rows=True)
    T, H = weights.shape
    check("q", q, (T, dim * H), FLOATS, rows=True)
    if fmt not in KEY_FORMATS:
        raise ValueError(f"index keys are {', '.join(KEY_FORMATS)}, got {fmt!r}")
    check("positions", positions, (T,))
    check("cos_sin", cos_sin, ("positions", "rope_dim"), torch.float32, contiguous=True)
    out = torch.empty(T, H, dim, dtype=q.dtype if fmt == "plain" else torch.float8_e4m3fn, device=q.device)
    out_weights = torch.empty(T, H, dtype=torch.float32, device=q.device)
    plan = plan_queries(IndexQueryProblem(T, dim, batch_invariant(), kernel), gpu(q.device))
    args = IndexQueryArgs(
        *(q, weights, cos_sin, positions),
        out=out if fmt == "plain" else out.view(torch.uint8),
        out_weights=out_weights,
        scale=rows.scale,
        max_positions=cos_sin.shape[0],
        q_stride=q.stride(0),
        weights_stride=weights.stride(0),
    )
    shape = IndexQueryShape(
        HEADS=H,
        DIM=dim,
        ROPE=cos_sin.shape[1],
        HALF_SPLIT=rows.half_split,
        HADAMARD=rows.hadamard,
        STAGES=dim.bit_length() - 1,
        KEY_FORMAT=fmt,
        NATIVE_FP8=plan.native_fp8,
        BLOCK_H=plan.config.heads,
    )
    results = IndexQueries(out, out_weights, rows.score_dtype)
    return SharedLaunch(plan, args, shape, results, (T, cdiv(H, shape.BLOCK_H)))
