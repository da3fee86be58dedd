"""`kernels.insert.insert_tokens` in Triton: all that a decode step's tokens add to a layer, in one launch.

Small batches pay for launches, not for bytes: the rows of `norm_rope_insert` and of `compress` share one grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops import begin
from deepseek_attn.kernels.insert.compress import compress_and_insert, compress_launch, launch_config, reuses_ring_rows
from deepseek_attn.kernels.insert.compress_triton import pool_windows, store_state_row
from deepseek_attn.kernels.insert.norm_rope import norm_rope_insert, token_launch
from deepseek_attn.kernels.insert.norm_rope_triton import insert_key, norm_latent
from deepseek_attn.kernels.insert.types import CompressBatch, CompressPart, LatentAndKey, TokenRows


@triton.jit(do_not_specialize=["pool_programs", "requests"])
def insert_tokens_kernel(
    rows,
    parts,
    batch,
    scratch,
    pool_programs,
    requests,
    SHAPE: tl.constexpr,
    SHAPES: tl.constexpr,
    CONFIG: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first ``pool_programs`` pool windows, the longest work; then per token: key, latent, a ring row per part."""
    begin(PDL)
    program = tl.program_id(0)
    if program < pool_programs:
        pool_windows(program, pool_programs, requests, parts, batch, scratch, SHAPES, CONFIG, NATIVE_FP8)
    else:
        KINDS: tl.constexpr = 2 + len(SHAPES)
        t = ((program - pool_programs) // KINDS).to(tl.int64)
        kind = (program - pool_programs) % KINDS
        if kind == 0:
            insert_key(t, rows, SHAPE, NATIVE_FP8)
        elif kind == 1:
            norm_latent(t, rows, SHAPE, NATIVE_FP8)
        else:
            store_state_row(t, kind - 2, parts, batch, SHAPES, CONFIG)


def insert_tokens(tokens: TokenRows, compressors: Sequence[CompressPart], batch: CompressBatch | None) -> LatentAndKey:
    """See `kernels.insert.insert_tokens`."""
    num_tokens = len(tokens.qr)
    if batch is None:
        return norm_rope_insert(tokens)
    if num_tokens == 0 or reuses_ring_rows(batch):
        # as many warps as in the fused launch: a row's sum must not depend on the step
        outs = norm_rope_insert(tokens, launch_config(batch.pooled_tokens).warps)
        compress_and_insert(compressors, batch)
        return outs
    row, compress = token_launch(tokens), compress_launch(compressors, batch)
    insert_tokens_kernel[(compress.pool_programs + num_tokens * (2 + len(compressors)),)](
        row.rows,
        *compress.arguments,
        SHAPE=row.shape,
        **compress.constants,
        enable_fp_fusion=True,
        num_warps=compress.config.warps,
        launch_pdl=compress.constants["PDL"],
    )
    return row.outs
