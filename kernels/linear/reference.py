"""Linear layers in plain torch, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.common.invariance import in_row_tiles
from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at
from deepseek_attn.kernels.common.quant import QuantizedRows, dequantize_fp8, quantize_fp8
from deepseek_attn.kernels.linear.formats import (
    FP8_INPUT_GROUP,
    Segment,
    dequantize_weight,
    quantized_input,
)

UPCAST_ROWS = 16384  # rows of a plain weight upcast to float32 at once: an output head has 129280


def multi_linear(x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None = None) -> list[Tensor]:
    """See `deepseek_attn.kernels.linear.multi_linear`."""
    outs = []
    for segment in segments:
        weight, scale = segment.weight, segment.scale
        if not segment.reads_fp8:
            x32 = x.float()
        elif quantized is None or quantized.group != segment.input_format.group:
            x32 = quantized_input(x, segment.input_format)
        else:
            x32 = dequantize_fp8(quantized.values, quantized.scale, quantized.group).to(x.dtype).float()
        if scale is None and weight.dtype != torch.float32:
            y = torch.cat([F.linear(x32, rows.float()) for rows in weight.split(UPCAST_ROWS)], dim=-1)
        else:
            y = F.linear(x32, dequantize_weight(weight, scale))
        outs.append(y.to(segment.out_dtype or x.dtype))
    return outs


def quantize_input(x: Tensor, pow2_scales: bool = True) -> QuantizedRows:
    """See `deepseek_attn.kernels.linear.quantize_input`."""
    values, scale = quantize_fp8(x, FP8_INPUT_GROUP, pow2=pow2_scales)
    return QuantizedRows(values, scale.t().contiguous().t(), pow2_scales)


def grouped_linear(
    o: Tensor, segment: Segment, groups: int, positions: Tensor | None = None, cos_sin: Tensor | None = None
) -> tuple[Tensor, None]:
    """See `deepseek_attn.kernels.linear.grouped_linear`; without quantised output."""
    if positions is not None and cos_sin is not None:
        o = apply_rope(o, freqs_cis_at(cos_sin, positions), inverse=True)
    x, weight = o.reshape(len(o), groups, -1), segment.weight
    if segment.scale is not None:
        x, weight = quantized_input(x, segment.input_format), dequantize_weight(weight, segment.scale)
    blocks = weight.view(groups, -1, x.shape[2]).transpose(1, 2)
    z = in_row_tiles(lambda rows: torch.bmm(rows.transpose(0, 1), blocks).transpose(0, 1), x)
    return z.to(o.dtype).flatten(1), None


def grouped_linear_of_quantized(
    o: QuantizedRows, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, None]:
    """See `deepseek_attn.kernels.linear.grouped_linear_of_quantized`; without quantised output."""
    groups, M, _ = o.values.shape
    x = dequantize_fp8(o.values.transpose(0, 1).flatten(1), o.scale, FP8_INPUT_GROUP).to(dtype)
    return grouped_linear(x.view(M, groups, -1), Segment(weight, scale), groups)
