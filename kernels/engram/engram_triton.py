"""Triton device code of the Engram ops on a device: rows to numbers, and the gate that adds them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8 import decode_e4m3, decode_e8m0
from deepseek_attn.kernels.common.row_ops import begin


@triton.jit(do_not_specialize=["rows"])
def dequantize_kernel(
    values_ptr,
    scales_ptr,
    out_ptr,
    rows,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(i,)``: ``ROWS`` rows of ``COLUMNS`` e4m3 bytes, with a scale for each ``GROUP`` of them."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < COLUMNS)
    value = tl.load(values_ptr + row * COLUMNS + column, mask=inside, other=0)
    scale = decode_e8m0(tl.load(scales_ptr + row * (COLUMNS // GROUP) + column // GROUP, mask=inside, other=0))
    value = decode_e4m3(value, NATIVE_FP8, tl.float32) * scale
    tl.store(out_ptr + row * COLUMNS + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    streams_ptr,
    kv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    kv_stride,
    eps,
    SMALLEST: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(t, j)``: stream ``j`` of token ``t``. Weights are read before the launch ahead has ended."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    q_weight = tl.load(q_weight_ptr + j * D + channel, mask=inside, other=0)
    k_weight = tl.load(k_weight_ptr + j * D + channel, mask=inside, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = (t * M + j) * D + channel
    x = tl.load(streams_ptr + at, mask=inside, other=0).to(tl.float32)
    key = tl.load(kv_ptr + t * kv_stride + j * D + channel, mask=inside, other=0).to(tl.float32)
    value = tl.load(kv_ptr + t * kv_stride + M * D + channel, mask=inside, other=0).to(tl.float32)
    dot = tl.sum(x * q_weight * k_weight * key, 0)
    dot = dot / tl.sqrt_rn(tl.sum(x * x, 0) / D + eps) / tl.sqrt_rn(tl.sum(key * key, 0) / D + eps) * (D**-0.5)
    root = tl.sqrt_rn(tl.maximum(tl.abs(dot), SMALLEST, propagate_nan=tl.PropagateNan.ALL))
    root = tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root)  # the sign of -0 is negative
    gated = x + value / (1 + tl.exp(-root))
    tl.store(out_ptr + at, gated.to(out_ptr.dtype.element_ty), mask=inside)
