"""Triton device code of `project_values`: the products of a head, quantised to FP8 in the same launch.

The weight is the left factor of a product, as in `absorb_triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.row_ops_triton import Fp8Rows, round_to, store_fp8_groups
from deepseek_attn.kernels.latent.plan import ValueTiles
from deepseek_attn.kernels.latent.weights_triton import (
    LatentWeightRows,
    WeightStrides,
    block_scale,
    dequantized,
    factor_of,
)


class ValueArguments(NamedTuple):
    """Runtime arguments of `project_values_kernel`, with strides between tokens and heads.

    Attributes:
        latents: ``[tokens, heads, rank]``; weight: the half of ``kv_b_proj``, its strides are constants.
        out: ``[tokens, heads * v_head_dim]``; fp8: the same quantised, a head in one group; or None.
    """

    latents: Tensor
    latents_stride: int
    latents_head_stride: int
    weight: LatentWeightRows
    out: Tensor
    out_stride: int
    tokens: int
    fp8: Fp8Rows | None


@dataclass(frozen=True)
class ValueShape:
    """Constants of `project_values_kernel`: channels of a value and of a latent.

    Attributes:
        WEIGHT: strides of the weight.
        TILES: the plan's; BLOCK_T: tokens of a program.
        POW2: scales of the FP8 copy are powers of two.
        NATIVE_FP8: the GPU has instructions that convert FP8.
    """

    V: int
    RANK: int
    WEIGHT: WeightStrides
    TILES: ValueTiles
    BLOCK_T: int
    POW2: bool
    NATIVE_FP8: bool


@triton.jit
def _weights(rows, head, value, rank, SHAPE: tl.constexpr):
    """Weights ``[BLOCK_V, BLOCK_RANK]`` of a head as they are stored, zeros outside."""
    row = rows.weight.rows + head.to(tl.int64) * SHAPE.WEIGHT.HEAD + value * SHAPE.WEIGHT.ROW
    inside = (value < SHAPE.V)[:, None] & (rank < SHAPE.RANK)[None, :]
    return tl.load(row[:, None] + rank[None, :] * SHAPE.WEIGHT.RANK, mask=inside, other=0.0)


@triton.jit
def _plain(w, rows, head, start, SHAPE: tl.constexpr):
    """`_weights` from latent channel ``start`` on, as factors of a product."""
    if rows.weight.scale is not None:
        WEIGHT: tl.constexpr = SHAPE.WEIGHT
        block = tl.program_id(0) % ((SHAPE.V + SHAPE.TILES.values - 1) // SHAPE.TILES.values)
        scale = block_scale(rows.weight, head, block * SHAPE.TILES.values, start, head >= 0, WEIGHT)
        return dequantized(w, scale, rows.latents.dtype.element_ty, SHAPE.NATIVE_FP8)
    else:
        return factor_of(w, rows.latents.dtype.element_ty)


@triton.jit
def _latents(x_row, inside, rank, SHAPE: tl.constexpr):
    """Attended latents ``[BLOCK_T, BLOCK_RANK]`` of the head, zeros outside."""
    return tl.load(x_row[:, None] + rank[None, :], mask=inside[:, None] & (rank < SHAPE.RANK)[None, :], other=0)


@triton.jit
def _add_product(acc, w, x):
    """``acc + w x^T``: the weight gives the tensor cores their 64 rows, the tokens need only be 8."""
    return tl.dot(w, tl.trans(factor_of(x, x.dtype)), acc)


@triton.jit
def project_values_kernel(rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Grid ``(heads * blocks of value channels, blocks of tokens)``; a block is a whole head if it is quantised."""
    if PDL:
        gdc_launch_dependents()  # the next kernel may start; it waits before it reads the values
    BLOCK_T: tl.constexpr = SHAPE.BLOCK_T
    BLOCK_RANK: tl.constexpr = SHAPE.TILES.rank
    V: tl.constexpr = SHAPE.V
    BLOCK_V: tl.constexpr = SHAPE.TILES.values
    EARLY: tl.constexpr = min(SHAPE.TILES.early_blocks, (SHAPE.RANK + BLOCK_RANK - 1) // BLOCK_RANK)
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    value = tl.program_id(0) % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    lane = tl.arange(0, BLOCK_RANK)
    # weights depend on no kernel: these are loaded while the kernel before this one still runs
    stored = ()
    for i in tl.static_range(EARLY):
        stored += (_weights(rows, head, value, i * BLOCK_RANK + lane, SHAPE),)
    # converted after all loads are issued, so that none of them waits for a conversion
    early = ()
    for i in tl.static_range(EARLY):
        early += (_plain(stored[i], rows, head, i * BLOCK_RANK, SHAPE),)
    if PDL:
        gdc_wait()  # until the previous kernel has written the latents
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < rows.tokens
    t = token.to(tl.int64)
    x_row = rows.latents + t * rows.latents_stride + head * rows.latents_head_stride
    acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    # the blocks whose weights wait in registers
    for i in tl.static_range(EARLY):
        acc = _add_product(acc, early[i], _latents(x_row, inside, i * BLOCK_RANK + lane, SHAPE))
    # later blocks pass through shared memory, STAGES blocks ahead of their product
    for start in tl.range(EARLY * BLOCK_RANK, SHAPE.RANK, BLOCK_RANK, num_stages=SHAPE.TILES.stages):
        w = _plain(_weights(rows, head, value, start + lane, SHAPE), rows, head, start, SHAPE)
        acc = _add_product(acc, w, _latents(x_row, inside, start + lane, SHAPE))
    DTYPE: tl.constexpr = rows.out.dtype.element_ty
    y = round_to(tl.trans(acc), DTYPE)
    kept = inside[:, None] & (value < V)[None, :]
    out = rows.out + t * rows.out_stride + head * V
    tl.store(out[:, None] + value[None, :], y.to(DTYPE), mask=kept)
    if rows.fp8 is not None:
        # the rounded values are quantised, as a launch of its own would read them; a row of y is one group
        codes = rows.fp8.codes + t * rows.fp8.stride + head * V
        scales = rows.fp8.scale + t + head * rows.fp8.scale_stride
        store_fp8_groups(y, codes[:, None] + value[None, :], scales, kept, inside, SHAPE.POW2, SHAPE.NATIVE_FP8)
