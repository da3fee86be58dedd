"""RMS norm of rows, alone or of a sum with the residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.norm.types import NormedSum

if TYPE_CHECKING:
    from deepseek_attn.kernels.norm import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension: in float32, rounded once to the dtype of ``x``.

    Args:
        x: ``[..., dim]``; weight: float32 ``[dim]``.
        eps: added to the mean square.

    Raises:
        ValueError: a weight of another shape.
    """
    return (triton_ops if runs_triton(x) else torch_ops).rms_norm(x, eps, weight)


def add_rms_norm(x: Tensor, residual: Tensor, eps: float, weight: Tensor) -> NormedSum:
    """RMS norm of ``x + residual``, and the sum: both in float32, each rounded once to the dtype of ``x``.

    Args:
        x, residual: ``[..., dim]`` of one dtype; weight: float32 ``[dim]``.
        eps: added to the mean square.

    Raises:
        ValueError: shapes or dtypes that differ.
    """
    return (triton_ops if runs_triton(x) else torch_ops).add_rms_norm(x, residual, eps, weight)
