"""Linear layers over plain, FP8-block and packed-FP4 weights: projections of one input, and block-diagonal products.

Triton computes with bfloat16 and float16 weights and with FP8 weights under float32 scales. Float32 weights are left
to `torch.nn.functional.linear`, and packed FP4 ones to the reference: published checkpoints have FP4 in routed experts
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.common.invariance import batch_invariant, in_row_tiles
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.linear.formats import FP8_GROUPS, Segment

if TYPE_CHECKING:
    from deepseek_attn.kernels.linear import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def _in_triton(segment: Segment) -> bool:
    """Whether the Triton kernels compute with this weight, where it is."""
    weight, scale = segment.weight, segment.scale
    if not runs_triton(weight):
        return False
    if scale is None:
        return weight.dtype in (torch.bfloat16, torch.float16)
    is_fp8 = weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    return is_fp8 and segment.input_format.group in FP8_GROUPS


def multi_linear(x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None = None) -> list[Tensor]:
    """``x W^T`` for each segment, summed in float32 and rounded once.

    On a GPU all segments that Triton computes are one launch where there are few tokens; with many, large products are
    cuBLAS's. Plain weights that are adjacent in memory may become one product.

    Args:
        x: ``[M, K]`` float32, bfloat16 or float16.
        segments: projections from the same ``K``, whose FP8 inputs have scales of one kind; none gives an empty list.
        quantized: x in FP8, for segments whose groups have its number of channels, if the caller has it already.

    Returns:
        ``[M, N]`` for each segment, in its ``out_dtype`` or the dtype of x. A token with NaN or infinity has NaN in all
        outputs of segments with FP8 inputs.

    Raises:
        ValueError: on a GPU, shapes, dtypes or strides that the kernels do not support; FP8 inputs whose ``K`` is not a
            multiple of the group.

    Notes:
        Triton sums FP8 products of the channels of one scale as the tensor cores do: on compute capability 9.0 with
        about 14 bits, unless the output is float32.
    """
    if not (fused := [segment for segment in segments if _in_triton(segment)]):
        return [_in_torch(x, segment, quantized) for segment in segments]
    computed = iter(triton_ops.multi_linear(x, fused, quantized))
    return [next(computed) if _in_triton(segment) else _in_torch(x, segment, quantized) for segment in segments]


def quantize_input(x: Tensor, pow2_scales: bool = True) -> QuantizedRows:
    """Quantises the input of FP8 linears per token and 128 channels.

    Args:
        x: ``[M, K]`` float32, bfloat16 or float16, K a multiple of 128.
        pow2_scales: round scales up to powers of two ("ue8m0"), as V4 does; otherwise ``amax / 448``.

    Returns:
        float8_e4m3fn ``[M, K]`` and float32 scales ``[M, K / 128]`` with stride 1 along the rows. A group that holds
        NaN or infinity dequantises to NaN; in Triton its scale is NaN.

    Raises:
        ValueError: K is not a multiple of 128, or x has another rank or dtype.
    """
    return (triton_ops if runs_triton(x) else torch_ops).quantize_input(x, pow2_scales)


def empty_quantized(x: Tensor, segments: Sequence[Segment]) -> QuantizedRows | None:
    """Allocates FP8 values and scales that the op which writes ``x [M, K]`` fills as well, for `multi_linear`.

    None where that saves nothing: a segment does not read FP8 inputs or is not computed by Triton, or there are so few
    tokens that the products quantise their input as they read it.
    """
    read = {segment.input_format for segment in segments}
    if len(read) != 1 or not all(_in_triton(segment) and segment.reads_fp8 for segment in segments):
        return None
    return triton_ops.empty_quantized(x, segments)


def grouped_linear(
    o: Tensor, segment: Segment, groups: int, positions: Tensor | None = None, cos_sin: Tensor | None = None
) -> tuple[Tensor, QuantizedRows | None]:
    """``z[t, g] = W[g] o[t, g]``: inverse RoPE of attention's output, then a block-diagonal product.

    Heads go to the groups in order, and ``W = segment.weight.view(groups, N, K)``.

    Args:
        o: ``[M, H, d]`` float32, bfloat16 or float16, H a multiple of ``groups``; ``K = H / groups * d``.
        segment: weight ``[groups * N, K]``, and how its product reads the rotated heads; the output has the dtype of o.
        positions: int64 ``[M]``, positions at which the last channels of each head are rotated back; None leaves them.
            On a GPU, tokens at negative positions are not rotated.
        cos_sin: float32 ``[positions, rope_dim]``, cosines then sines of the pairs ``(2i, 2i + 1)``.

    Returns:
        ``[M, groups * N]`` in the dtype of ``o``; and ``quantize_input(output, pow2_scales)`` where that needs no
        further launch, else None. The rotated heads are rounded to the dtype of ``o`` as well.

    Raises:
        ValueError: on a GPU, shapes or dtypes that do not fit; positions without cos_sin or the reverse.
    """
    ops = triton_ops if _in_triton(segment) else torch_ops
    return ops.grouped_linear(o, segment, groups, positions, cos_sin)


def grouped_linear_of_quantized(
    o: QuantizedRows, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, QuantizedRows | None]:
    """`grouped_linear` of heads that are rotated back and quantised already, as `attend_raw_q` returns them.

    Args:
        o: values ``[groups, M, K]``.
        weight, scale: FP8 ``[groups * N, K]``, as in `Segment`, of groups of 128.
        dtype: of the output.
    """
    ops = triton_ops if _in_triton(Segment(weight, scale)) else torch_ops
    return ops.grouped_linear_of_quantized(o, weight, scale, dtype)


def _in_torch(x: Tensor, segment: Segment, quantized: QuantizedRows | None) -> Tensor:
    weight, out_dtype = segment.weight, segment.out_dtype
    if segment.scale is None and (out_dtype is None or out_dtype == weight.dtype == x.dtype):
        return in_row_tiles(lambda rows: F.linear(rows, weight), x)
    if batch_invariant():
        return in_row_tiles(lambda rows: torch_ops.multi_linear(rows, [segment])[0], x)
    return torch_ops.multi_linear(x, [segment], quantized)[0]
