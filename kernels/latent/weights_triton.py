"""Triton device code of FP8 weights with block scales: values as the plain weight of a `LatentWeight` holds them."""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.fp8 import decode_e4m3
from deepseek_attn.kernels.common.row_ops import round_to


@triton.jit
def block_scale(scale, head, row, channel, inside, SHAPE: tl.constexpr):
    """Scale of the block of a head that holds ``(row, channel)``; 0 where not ``inside``."""
    offset = head * SHAPE.SCALE_HEAD_STRIDE + row // 128 * SHAPE.SCALE_ROW_STRIDE
    return tl.load(scale + offset + channel // 128 * SHAPE.SCALE_RANK_STRIDE, mask=inside, other=0)


@triton.jit
def dequantized(w, scale, DTYPE: tl.constexpr, DOT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Float32 products rounded to ``DTYPE``, as ``DOT``: the same, or float32 in the interpreter."""
    product = decode_e4m3(w, NATIVE_FP8, tl.float32) * scale
    if DTYPE == DOT:
        return product.to(DTYPE)
    else:
        return round_to(product, DTYPE).to(DOT)


@triton.jit
def dequantize_kernel(
    weight, scale, out, HEIGHT: tl.constexpr, RANK: tl.constexpr, SHAPE: tl.constexpr, DTYPE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Grid ``(heads, blocks of rows, blocks of channels)``: a block with one scale, into a contiguous ``out``."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * 128 + tl.arange(0, 128)
    channel = tl.program_id(2) * 128 + tl.arange(0, 128)
    start = weight + head * SHAPE.HEAD_STRIDE + row * SHAPE.ROW_STRIDE
    w = tl.load(start[:, None] + channel[None, :] * SHAPE.RANK_STRIDE)
    factor = block_scale(scale, head, tl.program_id(1) * 128, tl.program_id(2) * 128, head >= 0, SHAPE)
    target = out + head * (HEIGHT * RANK) + row * RANK
    plain = round_to(decode_e4m3(w, NATIVE_FP8, tl.float32) * factor, DTYPE)
    tl.store(target[:, None] + channel[None, :], plain.to(DTYPE))
