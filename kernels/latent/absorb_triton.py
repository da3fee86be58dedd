"""Triton device code of `absorb_queries`: products and rotation in one launch, or the rotation alone.

The weight is the left factor of a product: Hopper's tensor cores need at least 64 rows there and as few as 8 on the
right, where the tokens of a decode step are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.row_ops import rotated_rows, round_to, row_cos_sin
from deepseek_attn.kernels.latent.weights_triton import block_scale, dequantized


class AbsorbArguments(NamedTuple):
    """Runtime arguments: tensors of `LatentQueries`, with strides but for the weight's."""

    q: Tensor
    q_stride: int
    weight: Tensor
    cos_sin: Tensor
    max_positions: int
    positions: Tensor
    out: Tensor
    out_stride: int
    out_head_stride: int
    tokens: int
    heads: int
    padded_heads: int
    scale: Tensor | None = None


@dataclass(frozen=True)
class AbsorbShape:
    """Constants: channels of a query's parts and of the latent, tiles of them and of tokens, and the dtype.

    Attributes:
        NOPE_BLOCK: channels without rotation that are multiplied at once.
        HEAD_STRIDE, NOPE_STRIDE, RANK_STRIDE: of the weight; SCALE_*_STRIDE: of its scale, if it is FP8.
        BLOCK_RANK: latent channels of a program; BLOCK_T: tokens; BLOCK_H: heads of a program that only rotates.
        DOT: dtype of the factors of products; that of the queries, but float32 in the interpreter.
    """

    NOPE: int
    NOPE_BLOCK: int
    ROPE: int
    ROPE_BLOCK: int
    RANK: int
    HEAD_STRIDE: int
    NOPE_STRIDE: int
    RANK_STRIDE: int
    BLOCK_RANK: int
    BLOCK_T: int
    BLOCK_H: int
    DTYPE: Any
    DOT: Any
    FP8_WEIGHT: bool
    SCALE_HEAD_STRIDE: int
    SCALE_ROW_STRIDE: int
    SCALE_RANK_STRIDE: int
    NATIVE_FP8: bool


@triton.jit
def _rotate(rows, t, head, inside, SHAPE: tl.constexpr):
    """Rotates the last channels of rows ``(t, head)``, both ``[R]``; zeros where not ``inside`` or past the heads."""
    ROPE: tl.constexpr = SHAPE.ROPE
    BLOCK: tl.constexpr = SHAPE.ROPE_BLOCK
    channel = tl.arange(0, BLOCK)
    t = t.to(tl.int64)
    position = tl.load(rows.positions + t, mask=inside, other=-1)
    freqs_cis = row_cos_sin(position, rows.cos_sin, rows.max_positions, ROPE, ROPE, BLOCK)
    source = rows.q + t * rows.q_stride + head * (SHAPE.NOPE + ROPE) + SHAPE.NOPE
    columns = (channel < ROPE)[None, :]
    x = tl.load(source[:, None] + channel[None, :], mask=(inside & (head < rows.heads))[:, None] & columns, other=0)
    y = rotated_rows(x.to(tl.float32), freqs_cis, ROPE, ROPE, SHAPE.DTYPE)
    target = rows.out + t * rows.out_stride + head * rows.out_head_stride + SHAPE.RANK
    stored = (inside & (head < rows.padded_heads))[:, None] & columns
    tl.store(target[:, None] + channel[None, :], y.to(SHAPE.DTYPE), mask=stored)


@triton.jit
def absorb_head(program, token_block, rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """A block of latent channels of a head, for a block of tokens; the first block of a head also rotates."""
    RANK: tl.constexpr = SHAPE.RANK
    BLOCK_T: tl.constexpr = SHAPE.BLOCK_T
    BLOCK_RANK: tl.constexpr = SHAPE.BLOCK_RANK
    BLOCKS: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    head = program // BLOCKS
    block = program % BLOCKS
    latent = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    NOPE: tl.constexpr = SHAPE.NOPE
    NOPE_BLOCK: tl.constexpr = SHAPE.NOPE_BLOCK
    # the weight depends on no kernel: it is loaded while the kernel before this one still runs
    weights = ()
    for start in tl.static_range(0, NOPE, NOPE_BLOCK):
        nope = start + tl.arange(0, NOPE_BLOCK)
        w_row = rows.weight + head.to(tl.int64) * SHAPE.HEAD_STRIDE + nope * SHAPE.NOPE_STRIDE
        w_inside = (nope < NOPE)[:, None] & (latent < tl.where(head < rows.heads, RANK, 0))[None, :]
        weights += (tl.load(w_row[:, None] + latent[None, :] * SHAPE.RANK_STRIDE, mask=w_inside, other=0.0),)
    if SHAPE.FP8_WEIGHT:
        plain = ()
        for start in tl.static_range(0, NOPE, NOPE_BLOCK):
            scale = block_scale(rows.scale, head, start, block * BLOCK_RANK, head < rows.heads, SHAPE)
            w = weights[start // NOPE_BLOCK]
            plain += (dequantized(w, scale, SHAPE.DTYPE, SHAPE.DOT, SHAPE.NATIVE_FP8),)
    else:
        plain = weights
    if PDL:
        gdc_wait()
    token = token_block * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < rows.tokens
    t = token.to(tl.int64)
    q_row = rows.q + t * rows.q_stride + head * (SHAPE.NOPE + SHAPE.ROPE)
    acc = tl.zeros((BLOCK_RANK, BLOCK_T), tl.float32)
    for start in tl.static_range(0, NOPE, NOPE_BLOCK):
        nope = start + tl.arange(0, NOPE_BLOCK)
        q_inside = (token < tl.where(head < rows.heads, rows.tokens, 0))[:, None] & (nope < NOPE)[None, :]
        q = tl.load(q_row[:, None] + nope[None, :], mask=q_inside, other=0)
        acc = tl.dot(tl.trans(plain[start // NOPE_BLOCK].to(SHAPE.DOT)), tl.trans(q.to(SHAPE.DOT)), acc)
    out = rows.out + t * rows.out_stride + head * rows.out_head_stride
    stored = inside[:, None] & (latent < RANK)[None, :]
    tl.store(out[:, None] + latent[None, :], round_to(tl.trans(acc), SHAPE.DTYPE).to(SHAPE.DTYPE), mask=stored)
    if block == 0:
        _rotate(rows, token, head + tl.zeros_like(token), inside, SHAPE)


@triton.jit
def absorb_queries_kernel(rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Grid ``(padded heads * blocks of latent channels, blocks of tokens)``."""
    if PDL:
        gdc_launch_dependents()
    absorb_head(tl.program_id(0), tl.program_id(1), rows, SHAPE, PDL)


@triton.jit
def rotate_queries_kernel(rows, SHAPE: tl.constexpr, PADDED: tl.constexpr):
    """Grid ``(tokens, blocks of heads)``: all but the products; ``PADDED``: there are heads to be filled with zeros."""
    head = tl.program_id(1) * SHAPE.BLOCK_H + tl.arange(0, SHAPE.BLOCK_H)
    t = tl.program_id(0) + tl.zeros_like(head)
    _rotate(rows, t, head, t >= 0, SHAPE)
    if PADDED:
        padding = ((head >= rows.heads) & (head < rows.padded_heads))[:, None]
        out = rows.out + t.to(tl.int64) * rows.out_stride + head * rows.out_head_stride
        RANK: tl.constexpr = SHAPE.RANK
        BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
        BLOCK_RANK: tl.constexpr = SHAPE.BLOCK_RANK
        zeros = tl.zeros((BLOCK_H, BLOCK_RANK), rows.out.dtype.element_ty)
        for start in tl.static_range(0, RANK, BLOCK_RANK):
            latent = start + tl.arange(0, BLOCK_RANK)
            tl.store(out[:, None] + latent[None, :], zeros, mask=padding & (latent < RANK)[None, :])
