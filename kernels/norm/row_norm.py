"""Launches of RMS norms in Triton: one program per row."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.device import supports_pdl
from deepseek_attn.kernels.norm.reference import check_norm
from deepseek_attn.kernels.norm.row_norm_triton import rms_norm_kernel
from deepseek_attn.kernels.norm.types import NormedSum


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See `kernels.norm.rms_norm`."""
    check_norm(x, weight)
    rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, eps, weight, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, eps: float, weight: Tensor) -> NormedSum:
    """See `kernels.norm.add_rms_norm`."""
    check_norm(x, weight, residual)
    out = NormedSum(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2)))
    _launch(_rows(x), _rows(residual), eps, weight, out.normed, out.total)
    return out


def _rows(x: Tensor) -> Tensor:
    """``[rows, dim]`` with contiguous channels."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(x: Tensor, residual: Tensor | None, eps: float, weight: Tensor, out: Tensor, total: Tensor | None) -> None:
    rows, dim = x.shape
    if not rows:
        return
    pdl, block = supports_pdl(x.device), triton.next_power_of_2(dim)
    residual_stride = 0 if residual is None else residual.stride(0)
    rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        residual_stride,
        eps,
        D=dim,
        BLOCK=block,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=min(8, max(1, block // 512)),
        launch_pdl=pdl,
    )
