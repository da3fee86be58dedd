"""Triton kernel that expands an FP8 weight in blocks of 32 to bfloat16, exactly, for a product of cuBLAS."""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.fp8_triton import decode_e4m3


@triton.jit
def expand_weight_kernel(
    weight, scale, out, K: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, NATIVE_FP8: tl.constexpr
):
    """Grid ``(N / ROWS, channels of K)``: e4m3 ``[N, K]`` times float32 powers of two, one per 32 rows and channels.

    ``ROWS`` is 32, so that the rows of a tile share their scales.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    group = tl.program_id(1) * (CHANNELS // 32) + tl.arange(0, CHANNELS // 32)
    inside = (channel < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + channel[None, :]
    w = decode_e4m3(tl.load(weight + at, mask=inside, other=0.0), NATIVE_FP8, tl.float32)
    factor = tl.load(scale + tl.program_id(0).to(tl.int64) * (K // 32) + group, mask=group < K // 32, other=0)
    factor = tl.reshape(tl.broadcast_to(factor[:, None], (CHANNELS // 32, 32)), (CHANNELS,))
    tl.store(out + at, (w * factor[None, :]).to(tl.bfloat16), mask=inside)
