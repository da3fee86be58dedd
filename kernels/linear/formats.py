"""Formats that linear layers compute with: plain weights, FP8 blocks, packed FP4, and FP8 inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.kernels.common.quant import (
    InputFormat,
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8_block,
    fake_quant_fp8,
)

UNQUANTIZED = InputFormat()
"""Inputs of products as they are."""
FP8_BLOCK = (128, 128)  # rows and columns of an FP8 weight that share a scale; V4.1: 32
FP8_INPUT_GROUP = 128  # input channels of a token that share a scale
FP8_GROUPS = (FP8_INPUT_GROUP, 32)  # groups that Triton's kernels support


@dataclass(frozen=True)
class Segment:
    """A projection among several that share an input.

    Attributes:
        weight: ``[N, K]`` of a float dtype or float8_e4m3fn, or packed FP4, uint8 ``[N, K / 2]``.
        scale: FP8 weight: float32 ``[ceil(N / group), ceil(K / group)]``, with the group of ``input_format``, powers of
            two for groups of 32; FP4 weight: e8m0 bytes ``[N, K / 32]``; unquantised weight: None.
        input_format: how the product with a quantised weight quantises its input, in groups of 128 or 32; plain torch
            takes any group size.
        out_dtype: of the output; None: the dtype of the input.
    """

    weight: Tensor
    scale: Tensor | None = None
    input_format: InputFormat = UNQUANTIZED
    out_dtype: torch.dtype | None = None

    @property
    def reads_fp8(self) -> bool:
        """The product reads its input quantised to FP8."""
        return self.input_format.fp8 and self.scale is not None


def dequantize_weight(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Float32 values of a stored weight: FP8 with a block grid, packed FP4 with e8m0 bytes, or plain.

    The grid of an FP8 weight shows whether blocks have 128 or 32 rows and columns. For a dimension of at most 32 both
    have the same grid, because it is one block either way.
    """
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        return dequantize_fp4(weight, decode_e8m0(scale))
    small = tuple(scale.shape) == tuple(-(-size // 32) for size in weight.shape)
    return dequantize_fp8_block(weight, scale, (32, 32) if small else FP8_BLOCK)


def quantized_input(x: Tensor, format: InputFormat) -> Tensor:
    """Float32 input of a product with a quantised weight, after a round trip through FP8 if ``format`` requires it."""
    return fake_quant_fp8(x, format.group, format.pow2_scales).float() if format.fp8 else x.float()
