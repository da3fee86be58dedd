"""Triton device code for rows of a step's tokens and for heads of its queries: one program per row or block of heads.

How a row is summed does not depend on the other rows of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.fp8 import quantize_groups
from deepseek_attn.kernels.common.row_ops import (
    begin,
    normed_rows,
    rotated_rows,
    row_cos_sin,
    row_weight,
    store_rows,
)


class TokenArguments(NamedTuple):
    """Runtime arguments of `insert_key` and `norm_latent`: tensors of `TokenRows`, each with its row stride."""

    kv: Tensor
    kv_stride: int
    kv_weight: Tensor
    kv_out: Tensor
    kv_out_stride: int
    qr: Tensor
    qr_stride: int
    q_weight: Tensor
    qr_out: Tensor
    qr_out_stride: int
    positions: Tensor
    cos_sin: Tensor
    max_positions: int
    slots: Tensor
    eps: float
    pool: Tensor
    page_stride: int
    fp8: Tensor | None = None
    fp8_stride: int | None = None
    fp8_scale: Tensor | None = None
    fp8_scale_stride: int | None = None


@dataclass(frozen=True)
class TokenShape:
    """Constants of `insert_key` and `norm_latent`.

    Attributes:
        D: channels of a key; NOPE, N, RECORD, PLAIN: of the pool, see `row_ops.entry_constants`.
        ROPE: rotated channels; BLOCK: tile of ``D`` channels, a power of two; DTYPE: of a key.
        LORA, LORA_BLOCK, LORA_DTYPE: channels, tile and dtype of a latent.
        QUANTIZE: also store the latent as FP8; POW2: with scales that are powers of two.
    """

    D: int
    NOPE: int
    ROPE: int
    BLOCK: int
    N: int
    RECORD: int
    PLAIN: Any
    DTYPE: Any
    LORA: int
    LORA_BLOCK: int
    LORA_DTYPE: Any
    QUANTIZE: bool
    POW2: bool


class HeadArguments(NamedTuple):
    """Runtime arguments of `norm_heads`."""

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
    """Constants of `norm_heads`: channels of a head, rotated ones, tile, heads of a program, dtype; NORM: or not."""

    D: int
    ROPE: int
    BLOCK: int
    HEADS: int
    DTYPE: Any
    NORM: bool = True


class EntryArguments(NamedTuple):
    """Runtime arguments of `rope_insert_kernel`."""

    rows: Tensor
    row_stride: int
    positions: Tensor
    cos_sin: Tensor
    max_positions: int
    slots: Tensor
    pool: Tensor
    page_stride: int


@dataclass(frozen=True)
class EntryShape:
    """Constants of `rope_insert_kernel`: channels, rotated ones, tile, dtype of the rows; and of the pool."""

    D: int
    ROPE: int
    BLOCK: int
    DTYPE: Any
    N: int
    NOPE: int
    RECORD: int
    PLAIN: Any


@triton.jit
def load_row(row_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    """``D`` values as float32 ``[1, BLOCK]``, zeros behind them."""
    channel = tl.arange(0, BLOCK)[None, :]
    return tl.load(row_ptr + channel, mask=channel < D, other=0).to(tl.float32)


@triton.jit
def store_row(row_ptr, y, D: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Stores the first ``D`` values of ``y [1, BLOCK]`` as ``DTYPE``."""
    channel = tl.arange(0, BLOCK)[None, :]
    tl.store(row_ptr + channel, y.to(DTYPE), mask=channel < D)


@triton.jit
def insert_key(t, rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm, rotation and cache write of the key of token ``t``; ``rows`` are `TokenArguments`, of a `TokenShape`."""
    D: tl.constexpr = SHAPE.D
    ROPE: tl.constexpr = SHAPE.ROPE
    BLOCK: tl.constexpr = SHAPE.BLOCK
    DTYPE: tl.constexpr = SHAPE.DTYPE
    one = tl.arange(0, 1)
    # all loads are issued before the first result is needed
    position = tl.load(rows.positions + t + one)
    slot = tl.load(rows.slots + t + one).to(tl.int64)
    x = load_row(rows.kv + t * rows.kv_stride, D, BLOCK)
    weight = row_weight(rows.kv_weight, D, BLOCK)
    freqs_cis = row_cos_sin(position, rows.cos_sin, rows.max_positions, D, ROPE, BLOCK)
    y = rotated_rows(normed_rows(x, weight, rows.eps, D, DTYPE), freqs_cis, D, ROPE, DTYPE)
    store_row(rows.kv_out + t * rows.kv_out_stride, y, D, BLOCK, DTYPE)
    store_rows(y, slot, rows.pool, rows.page_stride, SHAPE.N, D, SHAPE.NOPE, BLOCK, SHAPE.RECORD, SHAPE.PLAIN,
               NATIVE_FP8)  # fmt: skip


@triton.jit
def norm_latent(t, rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm of the query latent of token ``t``, and the normed row quantised to FP8 with ``SHAPE.QUANTIZE``.

    ``rows`` and ``SHAPE`` may be any tuples with the fields of `TokenArguments` and `TokenShape` that this reads.
    """
    LORA: tl.constexpr = SHAPE.LORA
    BLOCK: tl.constexpr = SHAPE.LORA_BLOCK
    DTYPE: tl.constexpr = SHAPE.LORA_DTYPE
    x = load_row(rows.qr + t * rows.qr_stride, LORA, BLOCK)
    y = normed_rows(x, row_weight(rows.q_weight, LORA, BLOCK), rows.eps, LORA, DTYPE)
    store_row(rows.qr_out + t * rows.qr_out_stride, y, LORA, BLOCK, DTYPE)
    if SHAPE.QUANTIZE:
        _store_quantized(t, y.to(DTYPE), rows, LORA, BLOCK, NATIVE_FP8, SHAPE.POW2)


@triton.jit
def _store_quantized(t, y, rows, LORA: tl.constexpr, BLOCK: tl.constexpr, NATIVE_FP8: tl.constexpr, POW2: tl.constexpr):
    """Stores ``y [1, BLOCK]`` as FP8 values with a scale per 128 channels, the input of an FP8 linear."""
    group = tl.arange(0, BLOCK // 128)
    groups = tl.reshape(y.to(tl.float32), (BLOCK // 128, 128))
    value, scale = quantize_groups(groups, POW2, NATIVE_FP8, rows.fp8.dtype.element_ty)
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(rows.fp8 + t * rows.fp8_stride + channel, value, mask=channel < LORA)
    tl.store(rows.fp8_scale + t + group * rows.fp8_scale_stride, scale, mask=group < LORA // 128)


@triton.jit
def norm_heads(t, block, rows, SHAPE: tl.constexpr):
    """Norm and rotation of one block of heads of token ``t``; ``rows`` are `HeadArguments`, of a `HeadShape`."""
    D: tl.constexpr = SHAPE.D
    ROPE: tl.constexpr = SHAPE.ROPE
    BLOCK: tl.constexpr = SHAPE.BLOCK
    DTYPE: tl.constexpr = SHAPE.DTYPE
    head = block * SHAPE.HEADS + tl.arange(0, SHAPE.HEADS)
    channel = tl.arange(0, BLOCK)
    column = (channel < D)[None, :]
    position = tl.load(rows.positions + t) + tl.zeros_like(head)
    freqs_cis = row_cos_sin(position, rows.cos_sin, rows.max_positions, D, ROPE, BLOCK)
    row = rows.q + t * rows.q_stride + head * D
    x = tl.load(row[:, None] + channel[None, :], mask=column & (head < rows.num_heads)[:, None], other=0)
    y = x.to(tl.float32)
    if SHAPE.NORM:
        y = normed_rows(y, None, rows.eps, D, DTYPE)
    y = rotated_rows(y, freqs_cis, D, ROPE, DTYPE)
    out = rows.out + t * rows.out_stride + head * rows.out_head_stride
    tl.store(out[:, None] + channel[None, :], y.to(DTYPE), mask=column & (head < rows.padded_heads)[:, None])


@triton.jit
def norm_rope_insert_kernel(rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr, PDL: tl.constexpr):
    """Grid ``(tokens, 2)``: the key and the latent of a token."""
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        insert_key(t, rows, SHAPE, NATIVE_FP8)
    else:
        norm_latent(t, rows, SHAPE, NATIVE_FP8)


@triton.jit
def query_norm_rope_kernel(rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Grid ``(tokens, blocks of heads)``."""
    begin(PDL)
    norm_heads(tl.program_id(0).to(tl.int64), tl.program_id(1), rows, SHAPE)


@triton.jit
def rope_insert_kernel(rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr, PDL: tl.constexpr):
    """Grid ``(tokens,)``: rotation and cache write of a row; ``rows`` are `EntryArguments`, of an `EntryShape`."""
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = SHAPE.D
    ROPE: tl.constexpr = SHAPE.ROPE
    BLOCK: tl.constexpr = SHAPE.BLOCK
    one = tl.arange(0, 1)
    position = tl.load(rows.positions + t + one)
    slot = tl.load(rows.slots + t + one).to(tl.int64)
    x = load_row(rows.rows + t * rows.row_stride, D, BLOCK)
    freqs_cis = row_cos_sin(position, rows.cos_sin, rows.max_positions, D, ROPE, BLOCK)
    y = rotated_rows(x, freqs_cis, D, ROPE, SHAPE.DTYPE)
    store_rows(y, slot, rows.pool, rows.page_stride, SHAPE.N, D, SHAPE.NOPE, BLOCK, SHAPE.RECORD, SHAPE.PLAIN,
               NATIVE_FP8)  # fmt: skip
