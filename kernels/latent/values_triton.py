"""Triton device code of `project_values`: the products of a head, quantised to FP8 in the same launch.

The weight is the left factor of a product, as in `absorb_triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8 import quantize_groups
from deepseek_attn.kernels.common.row_ops import round_to
from deepseek_attn.kernels.latent.weights_triton import block_scale, dequantized


class ValueArguments(NamedTuple):
    """Runtime arguments: latents, weight, values and their FP8 copy, with strides but for the weight's."""

    latents: Tensor
    latents_stride: int
    latents_head_stride: int
    weight: Tensor
    out: Tensor
    out_stride: int
    tokens: int
    fp8: Tensor | None = None
    fp8_stride: int | None = None
    fp8_scale: Tensor | None = None
    fp8_scale_stride: int | None = None
    scale: Tensor | None = None


@dataclass(frozen=True)
class ValueShape:
    """Constants: channels of a value and of a latent, and tiles of them and of tokens.

    Attributes:
        HEAD_STRIDE, VALUE_STRIDE, RANK_STRIDE: of the weight; SCALE_*_STRIDE: of its scale, if it is FP8.
        EARLY: blocks of latent channels whose weights are loaded before the previous kernel has ended.
        QUANTIZE: also store the values as FP8, a head in one group; POW2: with scales that are powers of two.
        DTYPE: of the values; DOT: of the factors of products: the same, but float32 in the interpreter.
    """

    V: int
    BLOCK_V: int
    RANK: int
    HEAD_STRIDE: int
    VALUE_STRIDE: int
    RANK_STRIDE: int
    BLOCK_RANK: int
    BLOCK_T: int
    EARLY: int
    QUANTIZE: bool
    POW2: bool
    DTYPE: Any
    DOT: Any
    FP8_WEIGHT: bool
    SCALE_HEAD_STRIDE: int
    SCALE_ROW_STRIDE: int
    SCALE_RANK_STRIDE: int


@triton.jit
def _weights(rows, head, value, rank, SHAPE: tl.constexpr):
    row = rows.weight + head.to(tl.int64) * SHAPE.HEAD_STRIDE + value * SHAPE.VALUE_STRIDE
    inside = (value < SHAPE.V)[:, None] & (rank < SHAPE.RANK)[None, :]
    return tl.load(row[:, None] + rank[None, :] * SHAPE.RANK_STRIDE, mask=inside, other=0.0)


@triton.jit
def _plain(w, rows, head, start, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """`_weights` from latent channel ``start`` on, as factors of a product."""
    if SHAPE.FP8_WEIGHT:
        block = tl.program_id(0) % ((SHAPE.V + SHAPE.BLOCK_V - 1) // SHAPE.BLOCK_V)
        scale = block_scale(rows.scale, head, block * SHAPE.BLOCK_V, start, head >= 0, SHAPE)
        return dequantized(w, scale, SHAPE.DTYPE, SHAPE.DOT, NATIVE_FP8)
    else:
        return w.to(SHAPE.DOT)


@triton.jit
def _latents(x_row, inside, rank, SHAPE: tl.constexpr):
    return tl.load(x_row[:, None] + rank[None, :], mask=inside[:, None] & (rank < SHAPE.RANK)[None, :], other=0)


@triton.jit
def _add_product(acc, w, x, SHAPE: tl.constexpr):
    return tl.dot(w, tl.trans(x.to(SHAPE.DOT)), acc)


@triton.jit
def project_values_kernel(rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr):
    """Grid ``(heads * blocks of value channels, blocks of tokens)``; with QUANTIZE a block is a whole head."""
    if PDL:
        gdc_launch_dependents()
    BLOCK_T: tl.constexpr = SHAPE.BLOCK_T
    BLOCK_RANK: tl.constexpr = SHAPE.BLOCK_RANK
    V: tl.constexpr = SHAPE.V
    BLOCK_V: tl.constexpr = SHAPE.BLOCK_V
    EARLY: tl.constexpr = SHAPE.EARLY
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    value = tl.program_id(0) % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    lane = tl.arange(0, BLOCK_RANK)
    # weights depend on no kernel: these are loaded while the kernel before this one still runs
    stored = ()
    for i in tl.static_range(EARLY):
        stored += (_weights(rows, head, value, i * BLOCK_RANK + lane, SHAPE),)
    early = ()
    for i in tl.static_range(EARLY):
        early += (_plain(stored[i], rows, head, i * BLOCK_RANK, SHAPE, NATIVE_FP8),)
    if PDL:
        gdc_wait()
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < rows.tokens
    t = token.to(tl.int64)
    x_row = rows.latents + t * rows.latents_stride + head * rows.latents_head_stride
    acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    for i in tl.static_range(EARLY):
        acc = _add_product(acc, early[i], _latents(x_row, inside, i * BLOCK_RANK + lane, SHAPE), SHAPE)
    for start in tl.range(EARLY * BLOCK_RANK, SHAPE.RANK, BLOCK_RANK, num_stages=STAGES):
        w = _plain(_weights(rows, head, value, start + lane, SHAPE), rows, head, start, SHAPE, NATIVE_FP8)
        acc = _add_product(acc, w, _latents(x_row, inside, start + lane, SHAPE), SHAPE)
    y = round_to(tl.trans(acc), SHAPE.DTYPE)
    kept = inside[:, None] & (value < V)[None, :]
    out = rows.out + t * rows.out_stride + head * V
    tl.store(out[:, None] + value[None, :], y.to(SHAPE.DTYPE), mask=kept)
    if SHAPE.QUANTIZE:
        code, scale = quantize_groups(y, SHAPE.POW2, NATIVE_FP8, rows.fp8.dtype.element_ty)
        target = rows.fp8 + t * rows.fp8_stride + head * V
        tl.store(target[:, None] + value[None, :], code, mask=kept)
        tl.store(rows.fp8_scale + t + head * rows.fp8_scale_stride, scale, mask=inside)
