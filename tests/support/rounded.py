"""Values after rounding to a format and back."""

from __future__ import annotations

from torch import Tensor

from deepseek_attn.kernels.common.quant import dequantize_fp4, quantize_fp4


def fake_quant_fp4(x: Tensor) -> Tensor:
    """``x`` after a round trip through ``quantize_fp4``, in the dtype of ``x``."""
    return dequantize_fp4(*quantize_fp4(x)).to(x.dtype)
