"""Triton device code of `index_query` and `queries`: RoPE, Hadamard matrix and quantisation in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8_triton import inverse_pow2, pow2_ceil, quantize_e4m3, round_e2m1
from deepseek_attn.kernels.common.row_ops_triton import hadamard_rows, pdl_begin, rotated_rows
from deepseek_attn.kernels.insert.norm_rope_triton import norm_heads
from deepseek_attn.kernels.latent.absorb_triton import absorb_head

_FP4_FLOOR = tl.constexpr(6.0 * 2.0**-126)


class IndexQueryArgs(NamedTuple):
    """Arguments of `index_heads` on the device: inputs of `IndexQueryRows`, outputs of `IndexQueries`.

    Attributes:
        out: the queries; FP8 as uint8 bytes.
        max_positions: rows of the ``cos_sin`` table.
    """

    q: Tensor
    weights: Tensor
    cos_sin: Tensor
    positions: Tensor
    out: Tensor
    out_weights: Tensor
    scale: float
    max_positions: int
    q_stride: int
    weights_stride: int


@dataclass(frozen=True)
class IndexQueryShape:
    """Compile-time constants of `index_heads`.

    Attributes:
        HEADS, DIM, ROPE: heads of a token, channels of a head, rotated channels.
        HALF_SPLIT, HADAMARD, KEY_FORMAT: as in `IndexQueryRows`.
        NATIVE_FP8: the GPU converts to e4m3 itself.
        BLOCK_H: heads of one program.
    """

    HEADS: int
    DIM: int
    ROPE: int
    HALF_SPLIT: bool
    HADAMARD: bool
    KEY_FORMAT: str
    NATIVE_FP8: bool
    BLOCK_H: int


@triton.jit
def index_heads(t, block, args, SHAPE: tl.constexpr):
    """RoPE and quantisation of one block of heads of token ``t``: `IndexQueryArgs` and `IndexQueryShape`."""
    HEADS: tl.constexpr = SHAPE.HEADS
    DIM: tl.constexpr = SHAPE.DIM
    ROPE: tl.constexpr = SHAPE.ROPE
    KEY_FORMAT: tl.constexpr = SHAPE.KEY_FORMAT
    NATIVE_FP8: tl.constexpr = SHAPE.NATIVE_FP8
    BLOCK_H: tl.constexpr = SHAPE.BLOCK_H
    head = block * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, DIM)
    inside = (head < HEADS)[:, None]
    row = args.q + t * args.q_stride + head[:, None] * DIM
    value = tl.load(row + channel[None, :], mask=inside, other=0.0)
    dtype = value.dtype
    x = value.to(tl.float32)
    # a row that is padding may be past the end
    position = tl.minimum(tl.load(args.positions + t), args.max_positions - 1).to(tl.int64)
    table = args.cos_sin + position * ROPE
    if SHAPE.HALF_SPLIT:
        # a channel's partner is half of the rotated channels away: it is loaded a second time
        rotary, second = channel < ROPE, channel >= ROPE // 2
        partner = tl.where(second, channel - ROPE // 2, channel + ROPE // 2)
        other = tl.load(row + partner[None, :], mask=inside & rotary[None, :], other=0.0).to(tl.float32)
        cos = tl.load(table + channel % (ROPE // 2), mask=rotary, other=1.0)[None, :]
        sin = tl.load(table + ROPE // 2 + channel % (ROPE // 2), mask=rotary, other=0.0)[None, :]
        rotated = x * cos + tl.where(second[None, :], other, -other) * sin
        x = tl.where(rotary[None, :], rotated.to(dtype).to(tl.float32), x)
    else:
        # partners are neighbours; pairs before the rotated channels get cosine 1 and sine 0
        pair = tl.arange(0, DIM // 2) - (DIM - ROPE) // 2
        cos = tl.load(table + pair, mask=pair >= 0, other=1.0)[None, :]
        sin = tl.load(table + ROPE // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
        x = rotated_rows(x, (cos, sin), DIM, ROPE, dtype)
    if SHAPE.HADAMARD:
        x = hadamard_rows(x, DIM, dtype)
    weights = (
        tl.load(args.weights + t * args.weights_stride + head, mask=head < HEADS, other=0.0).to(tl.float32) * args.scale
    )

    out = args.out + (t * HEADS + head[:, None]) * DIM + channel[None, :]
    # 0 for finite values, NaN for a NaN or an infinity: added to the weight, so that it cannot pass unseen
    nan_guard = x * 0.0
    if KEY_FORMAT == "fp8":
        # one power-of-two scale per head, folded into its weight
        amax = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
        factor = pow2_ceil(amax * 0.002232142857142857)
        tl.store(out, quantize_e4m3(x * inverse_pow2(factor)[:, None], NATIVE_FP8), mask=inside)
        weights = weights * factor + tl.sum(nan_guard, 1)
    elif KEY_FORMAT == "fp4":
        # a scale per 32 channels: the head's largest scale is folded into its weight, the ratios into the values
        groups = tl.reshape(x, (BLOCK_H, DIM // 32, 32))
        amax = tl.maximum(tl.max(tl.abs(groups), 2), _FP4_FLOOR)
        factor = pow2_ceil(amax * 0.16666666666666666)
        largest = tl.max(factor, 1)
        relative = factor * inverse_pow2(largest)[:, None] * 64.0
        groups = round_e2m1(groups * inverse_pow2(factor)[:, :, None]) * relative[:, :, None]
        value = tl.reshape(quantize_e4m3(groups, NATIVE_FP8), (BLOCK_H, DIM // 2, 2))
        even, odd = tl.split(value)  # bytes of FP4 keys hold one channel of each
        out = args.out + (t * HEADS + head[:, None]) * DIM + tl.arange(0, DIM // 2)[None, :]
        tl.store(out, even, mask=inside)
        tl.store(out + DIM // 2, odd, mask=inside)
        weights = weights * (largest * 0.015625) + tl.sum(nan_guard, 1)
    else:
        tl.store(out, x.to(dtype), mask=inside)
    tl.store(args.out_weights + t * HEADS + head, weights, mask=head < HEADS)


@triton.jit
def index_query_kernel(args, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Program ``(t, i)``: block ``i`` of the heads of token ``t``."""
    pdl_begin(PDL)  # wait until the projections are written
    index_heads(tl.program_id(0).to(tl.int64), tl.program_id(1), args, SHAPE)


@triton.jit
def queries_kernel(args, index_args, blocks, SHAPE: tl.constexpr, INDEX_SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Program ``(t, i)``: block ``i`` of the layer's heads of token ``t``, from ``blocks`` on of the indexer's."""
    pdl_begin(PDL)  # wait until the projections are written
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < blocks:
        norm_heads(t, block, args, SHAPE)
    else:
        index_heads(t, block - blocks, index_args, INDEX_SHAPE)


@triton.jit
def latent_queries_kernel(
    rows, index_args, programs, token_blocks, index_blocks, SHAPE: tl.constexpr, INDEX_SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """First ``programs`` of `absorb_head` for each of ``token_blocks``, then ``index_blocks`` of heads per token."""
    if PDL:
        gdc_launch_dependents()  # the next kernel may start: it waits by itself
    program = tl.program_id(0)
    if program < programs * token_blocks:
        # waits for the projections by itself, while its weights are on their way
        absorb_head(program % programs, program // programs, rows, SHAPE, PDL)
    else:
        if PDL:
            gdc_wait()  # until the projections are written
        program -= programs * token_blocks
        index_heads((program // index_blocks).to(tl.int64), program % index_blocks, index_args, INDEX_SHAPE)
