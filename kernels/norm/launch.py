"""Launches of RMS norms in Triton: one program per row."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import contiguous_rows
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.plans import RowsProblem
from deepseek_attn.kernels.norm.plan import NORMS
from deepseek_attn.kernels.norm.reference import check_norm
from deepseek_attn.kernels.norm.row_norm_triton import NormRows, rms_norm_kernel
from deepseek_attn.kernels.norm.types import NormedSum


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See `kernels.norm.rms_norm`."""
    return launch(x, None, eps, weight).normed


def add_rms_norm(x: Tensor, residual: Tensor, eps: float, weight: Tensor) -> NormedSum:
    """See `kernels.norm.add_rms_norm`."""
    return launch(x, residual, eps, weight)


def launch(x: Tensor, residual: Tensor | None, eps: float, weight: Tensor) -> NormedSum:
    """Norms of ``x``, or of its sum with ``residual`` and the sum; without one, ``x`` itself is the sum."""
    check_norm(x, weight, residual)
    channels = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    if count := x.numel() // max(channels, 1):
        rows = contiguous_rows(x.reshape(-1, channels))
        added = None if residual is None else contiguous_rows(residual.reshape(-1, channels))
        plan, stride = NORMS.plan(RowsProblem(count, channels), gpu(x.device)), 0 if added is None else added.stride(0)
        arguments = NormRows(rows, added, weight, out, total, rows.stride(0), stride, eps)
        block, options = plan.config.size, plan.options
        rms_norm_kernel[(count,)](arguments, CHANNELS=channels, BLOCK=block, **options)
    return NormedSum(out, x if total is None else total)
