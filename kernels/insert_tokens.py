"""Triton kernel of `reference.insert_tokens`: everything that a decode step's tokens add to a layer, in one launch.

Small batches pay for launches, not for bytes: the rows of `norm_rope_insert` and of `compress` share one grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.compress import (
    choose_tiles,
    compress_and_insert,
    compress_launch,
    compress_token,
    fits_one_launch,
)
from deepseek_attn.kernels.norm_rope_insert import insert_key, norm_latent, norm_rope_insert, row_launch
from deepseek_attn.kernels.reference.compress import CompressBatch, CompressPart
from deepseek_attn.kernels.row_ops import begin, early_launch


@triton.jit
def _insert_tokens_kernel(
    rows,
    parts,
    batch,
    SHAPE: tl.constexpr,
    SHAPES: tl.constexpr,
    RATIO: tl.constexpr,
    COFF: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    READS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    if which == 0:
        insert_key(t, rows, SHAPE, NATIVE_FP8)
    elif which == 1:
        norm_latent(t, rows, SHAPE)
    else:
        compress_token(t, which - 2, parts, batch, SHAPES, RATIO, COFF, ROWS, True, True, LANES, READS, NATIVE_FP8)


def insert_tokens(rows: tuple, parts: Sequence[CompressPart], batch: CompressBatch | None) -> tuple[Tensor, Tensor]:
    """Same as `reference.insert_tokens`: one launch where the step is short enough for `compress` to take one."""
    tokens = len(rows[0])
    # a row must be summed alike in every step, so that both ways have as many warps
    warps = choose_tiles(batch.pooled_tokens).warps if parts else None
    if not parts or tokens == 0 or not fits_one_launch(batch):
        outs = norm_rope_insert(*rows, warps=warps)
        if parts:
            compress_and_insert(parts, batch)
        return outs
    row_arguments, shape, outs = row_launch(*rows)
    arguments, constants = compress_launch(parts, batch)
    early = early_launch(rows[0].device)
    _insert_tokens_kernel[(tokens, 2 + len(parts))](
        row_arguments, *arguments, SHAPE=shape, **constants, PDL=early, num_warps=warps, launch_pdl=early
    )
    return outs
