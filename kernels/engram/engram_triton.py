"""Triton device code of the Engram ops: FP8 rows to numbers, and the gate that adds them to the streams."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8_triton import decode_e4m3, decode_e8m0
from deepseek_attn.kernels.common.row_ops_triton import pdl_begin
from deepseek_attn.kernels.engram.types import SCALE_GROUP

_GROUP = tl.constexpr(SCALE_GROUP)


class EngramGate(NamedTuple):
    """Runtime arguments of `engram_gate_kernel`.

    Attributes:
        streams, out: contiguous ``[T, M, D]``, before and after.
        kv: ``[T, (M + 1) D]``, rows ``kv_stride`` apart: a key for each stream, then the value.
        q_weight, k_weight: float32 ``[M, D]``; eps: of the norms.
    """

    streams: Any
    kv: Any
    q_weight: Any
    k_weight: Any
    out: Any
    kv_stride: Any
    eps: Any


@triton.jit(do_not_specialize=["rows"])
def engram_dequantize_kernel(
    values_ptr,
    scales_ptr,
    out_ptr,
    rows,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(i,)``: ``ROWS`` rows of ``COLUMNS`` e4m3 bytes, with a scale for each `SCALE_GROUP` of them."""
    pdl_begin(PDL)  # wait until the rows have been written
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < COLUMNS)
    value = tl.load(values_ptr + row * COLUMNS + column, mask=inside, other=0)
    # columns of a group load the same byte
    scale = decode_e8m0(tl.load(scales_ptr + row * (COLUMNS // _GROUP) + column // _GROUP, mask=inside, other=0))
    value = decode_e4m3(value, NATIVE_FP8, tl.float32) * scale
    tl.store(out_ptr + row * COLUMNS + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def engram_gate_kernel(
    args, SMALLEST: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr
):
    """Program ``(t, j)``: stream ``j`` of token ``t``."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    # weights first: no kernel of a step writes them
    q_weight = tl.load(args.q_weight + j * D + channel, mask=inside, other=0)
    k_weight = tl.load(args.k_weight + j * D + channel, mask=inside, other=0)
    if PDL:
        gdc_wait()  # until streams and kv have been written
        gdc_launch_dependents()
    at = (t * M + j) * D + channel
    x = tl.load(args.streams + at, mask=inside, other=0).to(tl.float32)
    key = tl.load(args.kv + t * args.kv_stride + j * D + channel, mask=inside, other=0).to(tl.float32)
    value = tl.load(args.kv + t * args.kv_stride + M * D + channel, mask=inside, other=0).to(tl.float32)
    # product of the two normed rows: their RMS divides the sum once
    dot = tl.sum(x * q_weight * k_weight * key, 0)
    dot = dot / tl.sqrt_rn(tl.sum(x * x, 0) / D + args.eps) / tl.sqrt_rn(tl.sum(key * key, 0) / D + args.eps)
    dot = dot * (D**-0.5)
    root = tl.sqrt_rn(tl.maximum(tl.abs(dot), SMALLEST, propagate_nan=tl.PropagateNan.ALL))
    root = tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root)  # the sign of -0 is negative
    gated = x + value / (1 + tl.exp(-root))
    tl.store(args.out + at, gated.to(args.out.dtype.element_ty), mask=inside)
