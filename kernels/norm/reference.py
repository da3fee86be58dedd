"""RMS norms in plain torch."""

from __future__ import annotations

from torch import Tensor

from deepseek_attn.kernels.common import norm_rope
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
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}] for x {list(x.shape)}, got {list(weight.shape)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"the residual must be {x.dtype} {list(x.shape)} as x is, got {residual.dtype} {list(residual.shape)}"
        )
