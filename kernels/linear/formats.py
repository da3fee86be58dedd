"""Formats that linear layers compute with: plain weights, FP8 blocks, packed FP4, and FP8 inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.kernels.common.invariance import planned_rows
from deepseek_attn.kernels.common.quant import decode_e8m0, dequantize_fp4, dequantize_fp8_block, fake_quant_fp8

FP8_BLOCK = (128, 128)  # rows and columns of an FP8 weight that share a scale; V4.1: 32
FP4_GROUP = 32  # input channels of an FP4 weight row that share a scale
FP8_INPUT_GROUP = 128  # input channels of a token that share a scale
FP8_GROUPS = (FP8_INPUT_GROUP, 32)  # what Triton's kernels take in its place
QUANTIZE_ABOVE = 8  # tokens up to which each Triton program quantises the part of the input that it reads


@dataclass(frozen=True)
class Segment:
    """One of several projections of the same input.

    Attributes:
        weight: ``[N, K]`` of a float dtype; or float8_e4m3fn; or packed FP4, uint8 ``[N, K / 2]``.
        scale: float32 ``[ceil(N / fp8_group), ceil(K / fp8_group)]`` of an FP8 weight, e8m0 bytes ``[N, K / 32]`` of
            an FP4 one; None for a plain weight.
        fp8_input: quantise the input to FP8 per token and ``fp8_group`` channels; for quantised weights only.
        out_dtype: of the output; None means that of the input.
        fp8_group: channels of an FP8 input, and rows and columns of an FP8 weight, that share a scale: 128 or 32, or in
            plain torch any number.
    """

    weight: Tensor
    scale: Tensor | None = None
    fp8_input: bool = False
    out_dtype: torch.dtype | None = None
    fp8_group: int = FP8_INPUT_GROUP

    @property
    def reads_fp8(self) -> bool:
        """The product reads its input quantised to FP8."""
        return self.fp8_input and self.scale is not None

    @property
    def reads_fp8_once(self) -> bool:
        """It reads it quantised by a launch before: in groups of 32, programs always quantise what they read."""
        return self.reads_fp8 and self.fp8_group == FP8_INPUT_GROUP


def quantizes_once(num_tokens: int) -> bool:
    """Whether the input of FP8 products is quantised before them: with few tokens each program does it as it reads."""
    return planned_rows(num_tokens) > QUANTIZE_ABOVE


def dequantize_weight(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Float32 values of a stored weight: FP8 with a block grid, packed FP4 with e8m0 bytes, or plain.

    The grid of FP8 says whether blocks are of 128 or of 32 rows and columns: it has one size for both where a dimension
    is at most 32, which is one block either way.
    """
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        return dequantize_fp4(weight, decode_e8m0(scale), FP4_GROUP)
    small = tuple(scale.shape) == tuple(-(-size // 32) for size in weight.shape)
    return dequantize_fp8_block(weight, scale, (32, 32) if small else FP8_BLOCK)


def quantized_input(x: Tensor, fp8: bool, pow2_scales: bool = True, group: int = FP8_INPUT_GROUP) -> Tensor:
    """Float32 input of a linear; with ``fp8``, after a round trip through FP8 per token and ``group`` channels."""
    return fake_quant_fp8(x, group, pow2_scales).float() if fp8 else x.float()
