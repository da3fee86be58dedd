"""Arguments and constants of the device code in `row_ops_triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import fp8_view
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.row_ops_triton import Fp8Rows


def fp8_rows(buffers: QuantizedRows | None) -> Fp8Rows | None:
    """Buffers as kernel arguments; None without buffers."""
    if buffers is None:
        return None
    values, scale = buffers.values, buffers.scale
    return Fp8Rows(fp8_view(values), values.stride(0), scale, scale.stride(1))


def check_rotation(dim: int, cos_sin: Tensor) -> None:
    """Raises ValueError unless pairs of a row's ``dim`` channels can be rotated by a table."""
    rope = cos_sin.shape[1]
    if dim % 2 or rope % 2 or rope > dim or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(
            f"rows of {dim} channels with {rope} rotated ones: both must be even, and cos_sin a contiguous float32 "
            f"table [positions, rotated channels], got {cos_sin.dtype} {tuple(cos_sin.shape)}"
        )
