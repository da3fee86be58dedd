"""Triton kernel of `reference.insert_tokens`: everything that a decode step's tokens add to a layer, in one launch.

Small batches pay for launches, not for bytes: the rows of `norm_rope_insert` and of `compress` share one grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.row_ops import begin
from deepseek_attn.kernels.insert.compress import choose_tiles, compress_and_insert, compress_launch, is_long
from deepseek_attn.kernels.insert.compress_reference import CompressBatch, CompressPart
from deepseek_attn.kernels.insert.compress_triton import pool_windows, store_state_row
from deepseek_attn.kernels.insert.norm_rope_insert import insert_key, norm_latent, norm_rope_insert, row_launch


@triton.jit(do_not_specialize=["workers", "requests"])
def _insert_tokens_kernel(
    rows,
    parts,
    batch,
    room,
    workers,
    requests,
    SHAPE: tl.constexpr,
    SHAPES: tl.constexpr,
    HOW: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first ``workers`` programs pool, which takes longest; each token has one for its key, latent and parts."""
    begin(PDL)
    program = tl.program_id(0)
    if program < workers:
        pool_windows(program, workers, requests, parts, batch, room, SHAPES, HOW, NATIVE_FP8)
    else:
        KINDS: tl.constexpr = 2 + len(SHAPES)
        t = ((program - workers) // KINDS).to(tl.int64)
        which = (program - workers) % KINDS
        if which == 0:
            insert_key(t, rows, SHAPE, NATIVE_FP8)
        elif which == 1:
            norm_latent(t, rows, SHAPE, NATIVE_FP8)
        else:
            store_state_row(t, which - 2, parts, batch, SHAPES, HOW)


def insert_tokens(
    rows: tuple,
    parts: Sequence[CompressPart],
    batch: CompressBatch | None,
    qr_fp8: QuantizedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `reference.insert_tokens`: one launch for steps of few tokens per request, as decode steps are."""
    tokens = len(rows[0])
    # a row must be summed alike in every step, so that both ways have as many warps
    warps = choose_tiles(batch.pooled_tokens).warps if parts else None
    if not parts or tokens == 0 or is_long(batch):
        outs = norm_rope_insert(*rows, qr_fp8=qr_fp8, warps=warps)
        if parts:
            compress_and_insert(parts, batch)
        return outs
    row_arguments, shape, outs = row_launch(*rows, qr_fp8=qr_fp8)
    launch = compress_launch(parts, batch)
    _insert_tokens_kernel[(launch.workers + tokens * (2 + len(parts)),)](
        row_arguments,
        *launch.arguments,
        SHAPE=shape,
        **launch.constants,
        num_warps=launch.warps,
        maxnreg=launch.registers,
        launch_pdl=launch.constants["PDL"],
    )
    return outs
