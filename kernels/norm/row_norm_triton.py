"""Triton device code of RMS norms."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops_triton import pdl_begin


class NormRows(NamedTuple):
    """Runtime arguments of `rms_norm_kernel`.

    Attributes:
        x, residual: ``[rows, dim]`` with strides between rows; ``residual`` None for the norm of ``x`` alone.
        weight: float32 ``[dim]``; eps: added to the mean square.
        out, total: contiguous ``[rows, dim]``, the norm and the sum; ``total`` is written with a ``residual`` only.
    """

    x: Any
    residual: Any
    weight: Any
    out: Any
    total: Any
    x_stride: Any
    residual_stride: Any
    eps: Any


@triton.jit
def rms_norm_kernel(rows, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """RMS norm of one row, or of the sum of a row and its residual."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    weight = tl.load(rows.weight + channel, mask=inside, other=0)  # no earlier launch writes the weight
    pdl_begin(PDL)  # wait until the previous kernel has written x and the residual
    x = tl.load(rows.x + row * rows.x_stride + channel, mask=inside, other=0).to(tl.float32)
    if rows.residual is not None:
        x += tl.load(rows.residual + row * rows.residual_stride + channel, mask=inside, other=0).to(tl.float32)
        tl.store(rows.total + row * CHANNELS + channel, x.to(rows.total.dtype.element_ty), mask=inside)
    # the padding up to BLOCK was read as 0 and adds nothing to the mean square
    y = x * tl.rsqrt(tl.sum(x * x, 0) / CHANNELS + rows.eps) * weight
    tl.store(rows.out + row * CHANNELS + channel, y.to(rows.out.dtype.element_ty), mask=inside)
