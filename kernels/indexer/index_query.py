"""Queries of the lightning indexer in Triton: rotary embedding, Hadamard matrix and rounding in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.fp8 import round_e4m3
from deepseek_attn.kernels.common.row_ops import begin
from deepseek_attn.kernels.indexer.reference import FORMATS

_FP4_FLOOR = tl.constexpr(6.0 * 2.0**-126)
_DIM = 128
WARPS = 4


@triton.jit
def _e4m3(x, NATIVE_FP8: tl.constexpr):
    """float32 values of magnitude up to 448 to e4m3, or to its bytes where the GPU has no FP8."""
    if NATIVE_FP8:
        return x.to(tl.float8e4nv)
    else:
        # float16 has the same bits in its fields, for numbers 2**8 times smaller
        bits = (round_e4m3(x) * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (((bits >> 7) & 0x7F) | sign).to(tl.uint8)


@triton.jit
def _pow2ceil(x):
    """The smallest power of two that is >= x, for x >= 2**-127."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(x):
    """1 / x of powers of two from 2**-126 to 2**126."""
    return ((254 << 23) - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(x):
    """float32 values rounded to e2m1's, ties to the even code."""
    a = tl.abs(x)
    value = tl.where(a > 0.25, 0.5, 0.0) + tl.where(a >= 0.75, 0.5, 0.0) + tl.where(a > 1.25, 0.5, 0.0)
    value += tl.where(a >= 1.75, 0.5, 0.0) + tl.where(a > 2.5, 1.0, 0.0) + tl.where(a >= 3.5, 1.0, 0.0)
    value += tl.where(a > 5.0, 2.0, 0.0)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _hadamard(x, ROWS: tl.constexpr, DIM: tl.constexpr, ROUNDS: tl.constexpr):
    """``x [ROWS, DIM] @ H``, unscaled. A round adds and subtracts neighbours and moves on to the next bit."""
    for _round in tl.static_range(ROUNDS):
        a, b = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, DIM))
    return x


@triton.jit
def index_heads(t, block, rows, SHAPE: tl.constexpr):
    """Rotation and rounding of one block of heads of token ``t``; arguments are those of `index_launch`."""
    q_ptr, weights_ptr, cos_sin_ptr, positions_ptr = rows[0], rows[1], rows[2], rows[3]
    out_ptr, weights_out_ptr, scale, max_positions = rows[4], rows[5], rows[6], rows[7]
    q_stride, weights_stride = rows[8], rows[9]
    H: tl.constexpr = SHAPE[0]
    DIM: tl.constexpr = SHAPE[1]
    ROPE: tl.constexpr = SHAPE[2]
    HALF_SPLIT: tl.constexpr = SHAPE[3]
    ROTATE: tl.constexpr = SHAPE[4]
    ROUNDS: tl.constexpr = SHAPE[5]
    FORMAT: tl.constexpr = SHAPE[6]
    NATIVE_FP8: tl.constexpr = SHAPE[7]
    BLOCK_H: tl.constexpr = SHAPE[8]
    head = block * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, DIM)
    inside = (head < H)[:, None]
    row = q_ptr + t * q_stride + head[:, None] * DIM
    value = tl.load(row + channel[None, :], mask=inside, other=0.0)
    dtype = value.dtype
    x = value.to(tl.float32)
    # a row that is padding may be past the end
    position = tl.minimum(tl.load(positions_ptr + t), max_positions - 1).to(tl.int64)
    table = cos_sin_ptr + position * ROPE
    if HALF_SPLIT:
        rotary, second = channel < ROPE, channel >= ROPE // 2
        partner = tl.where(second, channel - ROPE // 2, channel + ROPE // 2)
        other = tl.load(row + partner[None, :], mask=inside & rotary[None, :], other=0.0).to(tl.float32)
        cos = tl.load(table + channel % (ROPE // 2), mask=rotary, other=1.0)[None, :]
        sin = tl.load(table + ROPE // 2 + channel % (ROPE // 2), mask=rotary, other=0.0)[None, :]
        rotated = x * cos + tl.where(second[None, :], other, -other) * sin
        x = tl.where(rotary[None, :], rotated.to(dtype).to(tl.float32), x)
    else:
        pair = tl.arange(0, DIM // 2) - (DIM - ROPE) // 2
        cos = tl.load(table + pair, mask=pair >= 0, other=1.0)[None, :]
        sin = tl.load(table + ROPE // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
        real, imaginary = tl.split(tl.reshape(x, (BLOCK_H, DIM // 2, 2)))
        rotary = (pair >= 0)[None, :]
        new_real = tl.where(rotary, real * cos - imaginary * sin, real)
        new_imaginary = tl.where(rotary, real * sin + imaginary * cos, imaginary)
        x = tl.reshape(tl.join(new_real, new_imaginary), (BLOCK_H, DIM)).to(dtype).to(tl.float32)
    if ROTATE:
        x = (_hadamard(x, BLOCK_H, DIM, ROUNDS) * (DIM**-0.5)).to(dtype).to(tl.float32)
    weights = tl.load(weights_ptr + t * weights_stride + head, mask=head < H, other=0.0).to(tl.float32) * scale

    out = out_ptr + (t * H + head[:, None]) * DIM + channel[None, :]
    # a NaN or an infinity: its group decodes to NaN, so that it cannot pass unseen
    spoilt = x * 0.0
    if FORMAT == "fp8":
        amax = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
        factor = _pow2ceil(amax * 0.002232142857142857)
        tl.store(out, _e4m3(x * _inverse(factor)[:, None], NATIVE_FP8), mask=inside)
        weights = weights * factor + tl.sum(spoilt, 1)
    elif FORMAT == "fp4":
        groups = tl.reshape(x, (BLOCK_H, DIM // 32, 32))
        amax = tl.maximum(tl.max(tl.abs(groups), 2), _FP4_FLOOR)
        factor = _pow2ceil(amax * 0.16666666666666666)
        largest = tl.max(factor, 1)
        shared = factor * _inverse(largest)[:, None] * 64.0
        groups = _e2m1(groups * _inverse(factor)[:, :, None]) * shared[:, :, None]
        value = tl.reshape(_e4m3(groups, NATIVE_FP8), (BLOCK_H, DIM // 2, 2))
        even, odd = tl.split(value)
        out = out_ptr + (t * H + head[:, None]) * DIM + tl.arange(0, DIM // 2)[None, :]
        tl.store(out, even, mask=inside)
        tl.store(out + DIM // 2, odd, mask=inside)
        weights = weights * (largest * 0.015625) + tl.sum(spoilt, 1)
    else:
        tl.store(out, x.to(dtype), mask=inside)
    tl.store(weights_out_ptr + t * H + head, weights, mask=head < H)


@triton.jit
def _index_query_kernel(rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    index_heads(tl.program_id(0).to(tl.int64), tl.program_id(1), rows, SHAPE)


def index_query(
    q: Tensor,
    weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    scale: float,
    fmt: str,
    rotate: bool = False,
    half_split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Same as `reference.index_query`, on a GPU, for heads of 128 channels.

    Notes:
        A head that holds a NaN or an infinity gets a NaN weight.
    """
    rows, shape, outs, blocks = index_launch(q, weights, cos_sin, positions, scale, fmt, rotate, half_split)
    if len(q) and blocks:
        early = supports_pdl(q.device)
        _index_query_kernel[(len(q), blocks)](rows, SHAPE=shape, PDL=early, num_warps=WARPS, launch_pdl=early)
    return outs


def index_launch(
    q: Tensor,
    weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    scale: float,
    fmt: str,
    rotate: bool = False,
    half_split: bool = False,
) -> tuple[tuple, tuple, tuple[Tensor, Tensor], int]:
    """Arguments ``rows`` and constant ``SHAPE`` of `index_heads`, the outputs, and blocks of heads of a token.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
    if weights.dim() != 2 or q.dim() != 2 or q.shape != (weights.shape[0], _DIM * weights.shape[1]) or q.stride(1) != 1:
        raise ValueError(
            f"need q [T, heads * {_DIM}] with contiguous rows and weights [T, heads], got {tuple(q.shape)}, strides "
            f"{q.stride()}, and {tuple(weights.shape)}"
        )
    if weights.stride(1) != 1 or not q.is_floating_point() or not weights.is_floating_point():
        raise ValueError(f"q and weights must be floats in contiguous rows, got {q.dtype} and {weights.dtype}")
    if fmt not in FORMATS:
        raise ValueError(f"index keys are {', '.join(FORMATS)}, got {fmt!r}")
    T, H = weights.shape
    if positions.shape != (T,) or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(
            f"need positions [{T}] and a contiguous float32 cos_sin table, got {tuple(positions.shape)} and "
            f"{tuple(cos_sin.shape)} {cos_sin.dtype}"
        )
    out = torch.empty(T, H, _DIM, dtype=q.dtype if fmt == "plain" else torch.float8_e4m3fn, device=q.device)
    weights_out = torch.empty(T, H, dtype=torch.float32, device=q.device)
    native = has_native_fp8(q.device)
    heads = 16 if T < 64 else 32
    target = out if native or fmt == "plain" else out.view(torch.uint8)
    inputs = (q, weights, cos_sin, positions)
    rows = (*inputs, target, weights_out, scale, cos_sin.shape[0], q.stride(0), weights.stride(0))
    rounds = _DIM.bit_length() - 1
    shape = (H, _DIM, cos_sin.shape[1], half_split, rotate, rounds, fmt, native, heads)
    return rows, shape, (out, weights_out), triton.cdiv(H, heads)
