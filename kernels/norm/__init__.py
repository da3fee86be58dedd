"""RMS norm of rows, alone or of a sum with the residual."""

from __future__ import annotations

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import contract
from deepseek_attn.kernels.norm.types import NormedSum


@contract()
def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension: in float32, rounded once to the dtype of ``x``.

    Args:
        x: ``[..., dim]``; weight: float32 ``[dim]``.
        eps: added to the mean square.

    Raises:
        ValueError: a weight of another shape.
    """
    ...


@contract()
def add_rms_norm(x: Tensor, residual: Tensor, eps: float, weight: Tensor) -> NormedSum:
    """RMS norm of ``x + residual``, and the sum: both in float32, each rounded once to the dtype of ``x``.

    Args:
        x, residual: ``[..., dim]`` of one dtype; weight: float32 ``[dim]``.
        eps: added to the mean square.

    Raises:
        ValueError: shapes or dtypes that differ.
    """
    ...
