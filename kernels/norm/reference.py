"""RMS norms in plain torch."""

from __future__ import annotations

from torch import Tensor

from deepseek_attn.kernels.common import norm_rope
from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.norm.types import NormedSum


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See `kernels.norm.rms_norm`."""
    check_norm(x, weight)
    return norm_rope.rms_norm(x, eps, weight)


def add_rms_norm(x: Tensor, residual: Tensor, eps: float, weight: Tensor) -> NormedSum:
    """See `kernels.norm.add_rms_norm`."""
    check_norm(x, weight, residual)
    total = x.float() + residual.float()
    return NormedSum(norm_rope.rms_norm(total, eps, weight).to(x.dtype), total.to(x.dtype))


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """Raises ValueError unless there is a weight per channel, and the residual is like ``x``."""
    check("weight", weight, x.shape[-1:])
    check("the residual", residual, x.shape, x.dtype)
