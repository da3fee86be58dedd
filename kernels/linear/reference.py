"""Linear layers over plain, FP8-block and packed-FP4 weights, in float32.

The grouped output projection of attention: inverse rotary embedding, then a block-diagonal product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at
from deepseek_attn.kernels.common.quant import (
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8,
    dequantize_fp8_block,
    fake_quant_fp8,
    quantize_fp8,
)

FP8_BLOCK = (128, 128)
FP4_GROUP = 32
FP8_INPUT_GROUP = 128


@dataclass(frozen=True)
class Segment:
    """One of several projections of the same input.

    Attributes:
        weight: ``[N, K]`` of a float dtype; or float8_e4m3fn; or packed FP4, uint8 ``[N, K / 2]``.
        scale: float32 ``[ceil(N / 128), ceil(K / 128)]`` of an FP8 weight, e8m0 bytes ``[N, K / 32]`` of an FP4 one;
            None for a plain weight.
        fp8_input: round the input to FP8 per token and 128 channels; for quantised weights only.
        out_dtype: of the output; None means that of the input.
    """

    weight: Tensor
    scale: Tensor | None = None
    fp8_input: bool = False
    out_dtype: torch.dtype | None = None


def multi_linear(
    x: Tensor, segments: Sequence[Segment], pow2: bool = True, quantized: tuple[Tensor, Tensor] | None = None
) -> list[Tensor]:
    """``x W^T`` of each segment: ``[M, N]`` in the segment's output dtype, float32 sums and one rounding.

    Args:
        x: ``[M, K]``, float32, bfloat16 or float16.
        segments: projections of the same ``K``.
        pow2: FP8 scales of inputs are powers of two.
        quantized: ``quantize_input(x, pow2)``, where the caller has it already.
    """
    outs = []
    for segment in segments:
        if segment.fp8_input and segment.scale is not None:
            x32 = quantized_input(x, True, pow2) if quantized is None else _dequantized(quantized, x.dtype)
        else:
            x32 = x.float()
        y = F.linear(x32, dequantize_weight(segment.weight, segment.scale))
        outs.append(y.to(segment.out_dtype or x.dtype))
    return outs


def quantize_input(x: Tensor, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """Rounds the input of FP8 linears per token and 128 channels.

    Args:
        x: ``[M, K]``, K a multiple of 128.

    Returns:
        ``(q, scale)``: float8_e4m3fn ``[M, K]`` and float32 ``[M, K / 128]``, the scales of one group of channels next
        to each other (strides 1 and M), as cuBLAS takes them.
    """
    q, scale = quantize_fp8(x, FP8_INPUT_GROUP, pow2=pow2)
    return q, scale.t().contiguous().t()


def dequantize_weight(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Float32 values of a stored weight: FP8 with a block grid, packed FP4 with e8m0 bytes, or plain."""
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        return dequantize_fp4(weight, decode_e8m0(scale), FP4_GROUP)
    return dequantize_fp8_block(weight, scale, FP8_BLOCK)


def quantized_input(x: Tensor, fp8: bool, pow2: bool = True) -> Tensor:
    """The input of a linear as float32, after the FP8 rounding per token and 128 channels if ``fp8``."""
    return fake_quant_fp8(x, FP8_INPUT_GROUP, pow2).float() if fp8 else x.float()


def _dequantized(quantized: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    return dequantize_fp8(*quantized, FP8_INPUT_GROUP).to(dtype).float()


def grouped_linear(
    o: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    groups: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    fp8_input: bool = False,
    pow2: bool = True,
) -> Tensor:
    """``z[t, g] = W[g] o[t, g]`` where heads are cut into ``groups`` and ``W = weight.view(groups, N, K)``.

    Args:
        o: ``[M, H, d]`` attention outputs, H a multiple of ``groups``; ``K = H / groups * d``.
        weight, scale: ``[groups * N, K]``, as in `Segment`.
        positions: ``[M]`` positions at which the last channels of each head are rotated back; None leaves them.
        cos_sin: float32 ``[positions, rope_dim]``, cosines then sines of the pairs ``(2i, 2i + 1)``.
        fp8_input: round the rotated heads to FP8 per token and 128 channels; for a quantised weight only.
        pow2: FP8 scales are powers of two.

    Returns:
        ``[M, groups * N]`` in the dtype of ``o``. The rotated heads are rounded to that dtype as well.
    """
    if positions is not None:
        o = apply_rope(o, freqs_cis_at(cos_sin, positions), inverse=True)
    x = o.reshape(len(o), groups, -1)
    quantized = scale is not None
    x32 = quantized_input(x, fp8_input, pow2) if quantized else x
    matrix = dequantize_weight(weight, scale) if quantized else weight
    z = torch.bmm(x32.transpose(0, 1), matrix.view(groups, -1, x.shape[2]).transpose(1, 2))
    return z.transpose(0, 1).to(o.dtype).flatten(1)
