"""Triton device code of RMS norms."""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops import begin


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm of one row; with ``residual_ptr`` of the sum, which goes to ``total_ptr``. Outputs are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    weight = tl.load(weight_ptr + channel, mask=inside, other=0)  # no launch before this one writes it
    begin(PDL)
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + channel, mask=inside, other=0).to(tl.float32)
        tl.store(total_ptr + row * D + channel, x.to(total_ptr.dtype.element_ty), mask=inside)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight
    tl.store(out_ptr + row * D + channel, y.to(out_ptr.dtype.element_ty), mask=inside)
