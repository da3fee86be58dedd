"""Triton device code of `absorb_queries`: products and rotation in one launch, or the rotation alone.

The weight is the left factor of a product: Hopper's tensor cores need at least 64 rows on the left, and only 8 on the
right, which holds the tokens of a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.row_ops_triton import rotated_rows, round_to, row_block, row_cos_sin
from deepseek_attn.kernels.latent.plan import AbsorbTiles
from deepseek_attn.kernels.latent.weights_triton import (
    LatentWeightRows,
    WeightStrides,
    block_scale,
    dequantized,
    factor_of,
)


class AbsorbArguments(NamedTuple):
    """Runtime arguments of both kernels: `LatentQueries` and the result, with strides between tokens and heads.

    Attributes:
        q: ``[tokens, heads * (nope + rope)]``; weight: the half of ``kv_b_proj``, its strides are constants.
        cos_sin: float32 ``[max_positions, rope]``; positions: int64 ``[tokens]``.
        out: ``[tokens, padded_heads, rank + rope]``.
    """

    q: Tensor
    q_stride: int
    weight: LatentWeightRows
    cos_sin: Tensor
    max_positions: int
    positions: Tensor
    out: Tensor
    out_stride: int
    out_head_stride: int
    tokens: int
    heads: int
    padded_heads: int


@dataclass(frozen=True)
class AbsorbShape:
    """Constants of both kernels: channels of a query's parts and of the latent, and tiles of them.

    Attributes:
        WEIGHT: strides of the weight.
        TILES: the plan's; BLOCK_T: tokens of a program.
        NATIVE_FP8: the GPU converts FP8.
    """

    NOPE: int
    ROPE: int
    RANK: int
    WEIGHT: WeightStrides
    TILES: AbsorbTiles
    BLOCK_T: int
    NATIVE_FP8: bool


@triton.jit
def _rotate(rows, t, head, inside, SHAPE: tl.constexpr):
    """Rotates the last channels of rows ``(t, head)``, both ``[R]``; zeros where not ``inside`` or past the heads."""
    ROPE: tl.constexpr = SHAPE.ROPE
    BLOCK: tl.constexpr = row_block(ROPE)
    DTYPE: tl.constexpr = rows.q.dtype.element_ty
    channel = tl.arange(0, BLOCK)
    t = t.to(tl.int64)
    position = tl.load(rows.positions + t, mask=inside, other=-1)
    freqs_cis = row_cos_sin(position, rows.cos_sin, rows.max_positions, ROPE, ROPE, BLOCK)
    source = rows.q + t * rows.q_stride + head * (SHAPE.NOPE + ROPE) + SHAPE.NOPE
    columns = (channel < ROPE)[None, :]
    # padding heads are read as zeros, and zeros stay zeros when they are rotated
    x = tl.load(source[:, None] + channel[None, :], mask=(inside & (head < rows.heads))[:, None] & columns, other=0)
    y = rotated_rows(x.to(tl.float32), freqs_cis, ROPE, ROPE, DTYPE)
    target = rows.out + t * rows.out_stride + head * rows.out_head_stride + SHAPE.RANK
    stored = (inside & (head < rows.padded_heads))[:, None] & columns
    tl.store(target[:, None] + channel[None, :], y.to(DTYPE), mask=stored)


@triton.jit
def absorb_head(program, token_block, rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """A block of latent channels of a head, for a block of tokens; the first block of a head also rotates.

    The program waits for the previous kernel itself: its weights are in flight by then.
    """
    RANK: tl.constexpr = SHAPE.RANK
    BLOCK_T: tl.constexpr = SHAPE.BLOCK_T
    BLOCK_RANK: tl.constexpr = SHAPE.TILES.rank
    BLOCKS: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    WEIGHT: tl.constexpr = SHAPE.WEIGHT
    DTYPE: tl.constexpr = rows.q.dtype.element_ty
    head = program // BLOCKS
    block = program % BLOCKS
    latent = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    NOPE: tl.constexpr = SHAPE.NOPE
    # channels that are multiplied at once: those of an FP8 weight that share a scale, or all
    NOPE_BLOCK: tl.constexpr = 128 if rows.weight.scale is not None else max(16, triton.next_power_of_2(NOPE))
    # the weight depends on no kernel: it is loaded while the kernel before this one still runs
    weights = ()
    for start in tl.static_range(0, NOPE, NOPE_BLOCK):
        nope = start + tl.arange(0, NOPE_BLOCK)
        w_row = rows.weight.rows + head.to(tl.int64) * WEIGHT.HEAD + nope * WEIGHT.ROW
        # padding heads have no weight: zeros in its place give zeros in the result
        w_inside = (nope < NOPE)[:, None] & (latent < tl.where(head < rows.heads, RANK, 0))[None, :]
        weights += (tl.load(w_row[:, None] + latent[None, :] * WEIGHT.RANK, mask=w_inside, other=0.0),)
    if rows.weight.scale is not None:
        # converted after all loads are issued: the first conversion waits for its tile alone
        plain = ()
        for start in tl.static_range(0, NOPE, NOPE_BLOCK):
            scale = block_scale(rows.weight, head, start, block * BLOCK_RANK, head < rows.heads, WEIGHT)
            w = weights[start // NOPE_BLOCK]
            plain += (dequantized(w, scale, DTYPE, SHAPE.NATIVE_FP8),)
    else:
        plain = weights
    if PDL:
        gdc_wait()  # until the previous kernel has written the queries
    token = token_block * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < rows.tokens
    t = token.to(tl.int64)
    q_row = rows.q + t * rows.q_stride + head * (SHAPE.NOPE + SHAPE.ROPE)
    acc = tl.zeros((BLOCK_RANK, BLOCK_T), tl.float32)
    for start in tl.static_range(0, NOPE, NOPE_BLOCK):
        nope = start + tl.arange(0, NOPE_BLOCK)
        q_inside = (token < tl.where(head < rows.heads, rows.tokens, 0))[:, None] & (nope < NOPE)[None, :]
        q = tl.load(q_row[:, None] + nope[None, :], mask=q_inside, other=0)
        # transposed, W^T q^T: the weight gives the tensor cores their 64 rows, the tokens need only be 8
        w = factor_of(plain[start // NOPE_BLOCK], DTYPE)
        acc = tl.dot(tl.trans(w), tl.trans(factor_of(q, DTYPE)), acc)
    out = rows.out + t * rows.out_stride + head * rows.out_head_stride
    stored = inside[:, None] & (latent < RANK)[None, :]
    tl.store(out[:, None] + latent[None, :], round_to(tl.trans(acc), DTYPE).to(DTYPE), mask=stored)
    if block == 0:
        _rotate(rows, token, head + tl.zeros_like(token), inside, SHAPE)


@triton.jit
def absorb_queries_kernel(rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Grid ``(padded heads * blocks of latent channels, blocks of tokens)``."""
    if PDL:
        gdc_launch_dependents()  # the next kernel may start; it waits before it reads the result
    absorb_head(tl.program_id(0), tl.program_id(1), rows, SHAPE, PDL)


@triton.jit
def rotate_queries_kernel(rows, SHAPE: tl.constexpr, PADDED: tl.constexpr):
    """Grid ``(tokens, blocks of heads)``: all but the products; ``PADDED``: there are heads to be filled with zeros."""
    BLOCK_H: tl.constexpr = SHAPE.TILES.heads
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    t = tl.program_id(0) + tl.zeros_like(head)
    _rotate(rows, t, head, t >= 0, SHAPE)
    if PADDED:
        # cuBLAS has written the latent channels of the heads; channels of padding heads are written here
        padding = ((head >= rows.heads) & (head < rows.padded_heads))[:, None]
        out = rows.out + t.to(tl.int64) * rows.out_stride + head * rows.out_head_stride
        RANK: tl.constexpr = SHAPE.RANK
        BLOCK_RANK: tl.constexpr = SHAPE.TILES.rank
        zeros = tl.zeros((BLOCK_H, BLOCK_RANK), rows.out.dtype.element_ty)
        for start in tl.static_range(0, RANK, BLOCK_RANK):
            latent = start + tl.arange(0, BLOCK_RANK)
            tl.store(out[:, None] + latent[None, :], zeros, mask=padding & (latent < RANK)[None, :])
