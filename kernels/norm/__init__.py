"""RMS norm of rows, alone or of a sum with the residual."""

from __future__ import annotations

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.norm.types import NormedSum


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension: in float32, rounded once to the dtype of ``x``.

    Args:
        x: ``[..., dim]``; weight: float32 ``[dim]``.
        eps: added to the mean square.

    Raises:
        ValueError: a weight of another shape.
    """
    if runs_triton(x):
        from deepseek_attn.kernels.norm.launch import rms_norm as op
    else:
        from deepseek_attn.kernels.norm.reference import rms_norm as op
    return op(x, eps, weight)


def add_rms_norm(x: Tensor, residual: Tensor, eps: float, weight: Tensor) -> NormedSum:
    """RMS norm of ``x + residual``, and the sum: both in float32, each rounded once to the dtype of ``x``.

    Args:
        x, residual: ``[..., dim]`` of one dtype; weight: float32 ``[dim]``.
        eps: added to the mean square.

    Raises:
        ValueError: shapes or dtypes that differ.
    """
    if runs_triton(x):
        from deepseek_attn.kernels.norm.launch import add_rms_norm as op
    else:
        from deepseek_attn.kernels.norm.reference import add_rms_norm as op
    return op(x, residual, eps, weight)
