"""Triton device code for rows of a step's tokens and for heads of its queries: one program per row or block of heads.

The order of a row's sums does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.row_ops_triton import (
    Fp8Rows,
    normed_rows,
    pdl_begin,
    rotated_rows,
    row_block,
    row_cos_sin,
    row_weight,
    store_fp8_groups,
    store_rows,
)


class KeyArguments(NamedTuple):
    """Runtime arguments of rows that are normed, rotated and stored: keys, key latents or index keys.

    Attributes:
        rows: ``[T, d]`` float32, bfloat16 or float16; stride: between them.
        weight: float32 of their norm, None for rows that are not normed; bias: of a layer norm, else None.
        out: ``[T, d]`` where the rows go besides the pool, or None.
        positions: int64 ``[T]``; cos_sin: float32 ``[max_positions, rope]``.
        slots: int64 ``[T]``; eps: of the norm; pool: uint8 ``[pages, page bytes]``.
    """

    rows: Tensor
    stride: int
    weight: Tensor | None
    bias: Tensor | None
    out: Tensor | None
    out_stride: int
    positions: Tensor
    cos_sin: Tensor
    max_positions: int
    slots: Tensor
    eps: float
    pool: Tensor
    page_stride: int


class QueryLatentArguments(NamedTuple):
    """Runtime arguments of `norm_query_latent`, with strides between rows.

    Attributes:
        qr, out: ``[T, lora]``; weight: float32 ``[lora]``; eps: of the norm.
        fp8: where the normed latent goes as FP8, or None.
    """

    qr: Tensor
    stride: int
    weight: Tensor
    out: Tensor
    out_stride: int
    eps: float
    fp8: Fp8Rows | None


@dataclass(frozen=True)
class QueryLatentShape:
    """Constants of `norm_query_latent`: channels of a latent; POW2, GROUP: of FP8 scales."""

    LORA: int
    POW2: bool
    GROUP: int


class HeadArguments(NamedTuple):
    """Runtime arguments of `norm_heads`.

    Attributes:
        q: ``[T, num_heads * d]``; cos_sin: float32 ``[max_positions, rope]``; positions: int64 ``[T]``.
        out: ``[T, padded_heads, d]``; eps: of the norm.
    """

    q: Tensor
    cos_sin: Tensor
    positions: Tensor
    out: Tensor
    eps: float
    max_positions: int
    num_heads: int
    padded_heads: int
    q_stride: int
    out_stride: int
    out_head_stride: int


@dataclass(frozen=True)
class HeadShape:
    """Constants of `norm_heads`: channels of a head, rotated channels, heads of a program; NORM: or no norm."""

    D: int
    ROPE: int
    HEADS: int
    NORM: bool = True


@triton.jit
def load_row(row_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    """``D`` values as float32 ``[1, BLOCK]``, zeros behind them."""
    channel = tl.arange(0, BLOCK)[None, :]
    return tl.load(row_ptr + channel, mask=channel < D, other=0).to(tl.float32)


@triton.jit
def store_row(row_ptr, y, D: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the first ``D`` values of ``y [1, BLOCK]``."""
    channel = tl.arange(0, BLOCK)[None, :]
    tl.store(row_ptr + channel, y.to(row_ptr.dtype.element_ty), mask=channel < D)


@triton.jit
def insert_key(t, key, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm, rotation and cache write of row ``t``; the arguments are `KeyArguments` and `EntryFormat`."""
    D: tl.constexpr = SHAPE.D
    ROPE: tl.constexpr = SHAPE.ROPE
    BLOCK: tl.constexpr = row_block(D)
    DTYPE: tl.constexpr = key.rows.dtype.element_ty
    one = tl.arange(0, 1)
    # all loads are issued before the first result is needed
    position = tl.load(key.positions + t + one)
    slot = tl.load(key.slots + t + one).to(tl.int64)
    y = load_row(key.rows + t * key.stride, D, BLOCK)
    if key.weight is not None:
        weight = row_weight(key.weight, D, BLOCK)
    freqs_cis = row_cos_sin(position, key.cos_sin, key.max_positions, D, ROPE, BLOCK)
    if key.weight is not None:
        y = normed_rows(y, weight, key.eps, D, DTYPE)
    y = rotated_rows(y, freqs_cis, D, ROPE, DTYPE)
    # the rounded row goes out as it is, and into the pool as its record has it
    if key.out is not None:
        store_row(key.out + t * key.out_stride, y, D, BLOCK)
    store_rows(y, slot, key.pool, key.page_stride, SHAPE, NATIVE_FP8)


@triton.jit
def norm_query_latent(t, query, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm of the query latent of token ``t``, and the normed row as FP8 if there are buffers for it."""
    LORA: tl.constexpr = SHAPE.LORA
    BLOCK: tl.constexpr = triton.next_power_of_2(LORA)
    DTYPE: tl.constexpr = query.qr.dtype.element_ty
    # row and weight are both in flight before the sum needs them
    x = load_row(query.qr + t * query.stride, LORA, BLOCK)
    y = normed_rows(x, row_weight(query.weight, LORA, BLOCK), query.eps, LORA, DTYPE)
    store_row(query.out + t * query.out_stride, y, LORA, BLOCK)
    if query.fp8 is not None:
        # y is rounded already: these are the codes that a linear would compute from the stored row
        fp8 = query.fp8
        GROUP: tl.constexpr = SHAPE.GROUP
        group = tl.arange(0, BLOCK // GROUP)
        groups = tl.reshape(y, (BLOCK // GROUP, GROUP))
        channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        codes, scales = fp8.codes + t * fp8.stride + channel, fp8.scale + t + group * fp8.scale_stride
        store_fp8_groups(groups, codes, scales, channel < LORA, group < LORA // GROUP, SHAPE.POW2, NATIVE_FP8)


@triton.jit
def norm_heads(t, block, rows, SHAPE: tl.constexpr):
    """Norm and rotation of one block of heads of token ``t``; the arguments are `HeadArguments` and `HeadShape`."""
    D: tl.constexpr = SHAPE.D
    ROPE: tl.constexpr = SHAPE.ROPE
    BLOCK: tl.constexpr = row_block(D)
    DTYPE: tl.constexpr = rows.q.dtype.element_ty
    head = block * SHAPE.HEADS + tl.arange(0, SHAPE.HEADS)
    channel = tl.arange(0, BLOCK)
    column = (channel < D)[None, :]
    # cosines and sines are loaded before the heads: their latency is hidden
    position = tl.load(rows.positions + t) + tl.zeros_like(head)
    freqs_cis = row_cos_sin(position, rows.cos_sin, rows.max_positions, D, ROPE, BLOCK)
    row = rows.q + t * rows.q_stride + head * D
    # padding heads are read as zeros, which norm and rotation leave as they are
    x = tl.load(row[:, None] + channel[None, :], mask=column & (head < rows.num_heads)[:, None], other=0)
    y = x.to(tl.float32)
    if SHAPE.NORM:
        y = normed_rows(y, None, rows.eps, D, DTYPE)
    y = rotated_rows(y, freqs_cis, D, ROPE, DTYPE)
    out = rows.out + t * rows.out_stride + head * rows.out_head_stride
    tl.store(out[:, None] + channel[None, :], y.to(DTYPE), mask=column & (head < rows.padded_heads)[:, None])


@triton.jit
def norm_rope_insert_kernel(
    key, query, SHAPE: tl.constexpr, QUERY_SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr, PDL: tl.constexpr
):
    """Grid ``(tokens, 2)``: the key and the query latent of a token."""
    pdl_begin(PDL)  # wait until the previous kernel has written both
    t = tl.program_id(0).to(tl.int64)
    # one program per row, so that the loads of one row do not wait for the sum of another
    if tl.program_id(1) == 0:
        insert_key(t, key, SHAPE, NATIVE_FP8)
    else:
        norm_query_latent(t, query, QUERY_SHAPE, NATIVE_FP8)


@triton.jit
def query_norm_rope_kernel(rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Grid ``(tokens, blocks of heads)``."""
    pdl_begin(PDL)  # wait until the previous kernel has written the queries
    norm_heads(tl.program_id(0).to(tl.int64), tl.program_id(1), rows, SHAPE)


@triton.jit
def rope_insert_kernel(key, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr, PDL: tl.constexpr):
    """Grid ``(tokens,)``: rotation and cache write of a row that is not normed."""
    pdl_begin(PDL)  # wait until the previous kernel has written the rows
    insert_key(tl.program_id(0).to(tl.int64), key, SHAPE, NATIVE_FP8)
