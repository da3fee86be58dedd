"""Launches of RMS norms in Triton: one program per row."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.plans import RowsProblem
from deepseek_attn.kernels.norm.plan import plan
from deepseek_attn.kernels.norm.reference import check_norm
from deepseek_attn.kernels.norm.row_norm_triton import NormRows, rms_norm_kernel
from deepseek_attn.kernels.norm.types import NormedSum


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See `kernels.norm.rms_norm`."""
    check_norm(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(_rows(x), None, eps, weight, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, eps: float, weight: Tensor) -> NormedSum:
    """See `kernels.norm.add_rms_norm`."""
    check_norm(x, weight, residual)
    out = NormedSum(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2)))
    launch(_rows(x), _rows(residual), eps, weight, out.normed, out.total)
    return out


def _rows(x: Tensor) -> Tensor:
    """``[rows, dim]`` with contiguous channels."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def launch(x: Tensor, residual: Tensor | None, eps: float, weight: Tensor, out: Tensor, total: Tensor | None) -> None:
    """Writes the norms of ``x``, or of ``x + residual`` to ``out`` and the sum to ``total``; all ``[rows, dim]``."""
    count, channels = x.shape
    if not count:
        return
    made, residual_stride = (
        plan(RowsProblem(count, channels), gpu(x.device)),
        0 if residual is None else residual.stride(0),
    )
    arguments = NormRows(x, residual, weight, out, total, x.stride(0), residual_stride, eps)
    block, options = made.config.size, made.options
    rms_norm_kernel[(count,)](arguments, CHANNELS=channels, BLOCK=block, enable_fp_fusion=True, **options)
