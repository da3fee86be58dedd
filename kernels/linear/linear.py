"""Linear layers in Triton, for any GPU from compute capability 8.0 on: several projections of one input in one launch.

With few tokens a launch reads the weights at memory speed, and quantises its input on the way. With more, the input is
quantised once for all; with many, large products are left to cuBLAS. The device code is in `linear_kernels`, and for
quantised inputs on Hopper in `linear_hopper_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.linear.launch import empty_quantized_rows, launch_products, quantize, whole_rows
from deepseek_attn.kernels.linear.launch_hopper import fits_hopper, launch_hopper
from deepseek_attn.kernels.linear.reference import FP8_INPUT_GROUP, Segment
from deepseek_attn.kernels.linear.tiles import QUANTIZE_ABOVE, HopperTiles, Tiles, cublas_is_faster

TOGETHER_FROM = 256  # rows; with 128, the five plain projections of a C4A layer take 1.6 us longer as one product


def multi_linear(
    x: Tensor,
    segments: Sequence[Segment],
    pow2: bool = True,
    quantized: tuple[Tensor, Tensor] | None = None,
    tiles: Tiles | HopperTiles | None = None,
) -> list[Tensor]:
    """Same as `reference.linear.multi_linear`, for plain and FP8 weights.

    Args:
        tiles: how to cut the launches; by default chosen from shapes, and cuBLAS computes what is large.

    Notes:
        With quantised inputs, the products of one 128-channel block are summed as the tensor cores do it: on compute
        capability 9.0 with about 14 bits, unless the output is float32.
    """
    _check_input(x)
    for segment in segments:
        _check_segment(segment, x)
    if quantized is not None:
        _check_quantized(quantized, x)
    if not len(x) or not segments:
        return [_empty(x, segment) for segment in segments]
    x = x if x.stride(1) == 1 else x.contiguous()
    rounds = any(segment.fp8_input and segment.scale is not None for segment in segments)
    if quantized is None and rounds and len(x) > QUANTIZE_ABOVE:
        quantized = quantize_input(x, pow2)
    outs = _by_cublas(x, segments, quantized) if tiles is None else [None] * len(segments)
    todo = [i for i, out in enumerate(outs) if out is None]
    outs = [_empty(x, segment) if out is None else out for out, segment in zip(outs, segments, strict=True)]
    groups = {True: {}, False: {}}
    for i in todo:
        segment, fp8 = segments[i], segments[i].scale is not None
        key = (fp8 and segment.fp8_input, segment.weight.dtype, outs[i].dtype)
        groups[fp8].setdefault(key, []).append(i)
    for scaled, plain in zip_longest(groups[True].values(), groups[False].values(), fillvalue=()):
        fp8_input = bool(scaled) and segments[scaled[0]].fp8_input
        products = (
            [(segments[i].weight, segments[i].scale, outs[i]) for i in scaled],
            [(segments[i].weight, outs[i]) for i in plain],
        )
        if isinstance(tiles, HopperTiles) or (tiles is None and fp8_input and fits_hopper(x, *products, quantized)):
            launch_hopper(x, *products, quantized, tiles=tiles)
        else:
            launch_products(x, *products, fp8_input=fp8_input, pow2=pow2, quantized=quantized, tiles=tiles)
    return outs


def quantize_input(x: Tensor, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """Same as `reference.linear.quantize_input`, on a GPU with FP8 (compute capability 8.9 or higher) or without.

    Notes:
        A group that holds a NaN or an infinity gets the scale NaN, whatever its values.
    """
    _check_input(x)
    if x.shape[1] % FP8_INPUT_GROUP:
        raise ValueError(f"x must have a multiple of {FP8_INPUT_GROUP} channels, got {tuple(x.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    q, scale = quantize(x, 1, pow2)
    return q[0], scale


def empty_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where another op can write ``x [M, K]`` as `quantize_input` would."""
    q, scale = empty_quantized_rows(*x.shape, 1, x.device)
    return q[0], scale.t()


def scaled_mm_fits(weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether cuBLAS's block-scaled FP8 product takes this FP8 weight, for some number of rows."""
    return (
        out_dtype == torch.bfloat16
        and gpu(weight.device).capability == (9, 0)
        and weight.shape[0] % 128 == 0
        and weight.shape[1] % 512 == 0  # a row of scales is a multiple of 16 bytes
    )


def scaled_mm(q: Tensor, q_scale: Tensor, weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """cuBLAS's product of quantised rows and an FP8 weight with block scales, into bfloat16 ``out [M, N]``.

    Rows and scales are those of `whole_rows`.
    """
    torch._scaled_mm(q, weight.t(), q_scale, scale.t(), out_dtype=torch.bfloat16, out=out)


def _by_cublas(x: Tensor, segments: Sequence[Segment], quantized: tuple[Tensor, Tensor] | None) -> list[Tensor | None]:
    """The outputs by cuBLAS; None where it has no such product or would take longer.

    Plain weights that lie behind one another in memory are one product, whose columns are the outputs.
    """
    outs = []
    runs = _neighbours(segments) if len(x) >= TOGETHER_FROM else [(i, [len(s.weight)]) for i, s in enumerate(segments)]
    for first, rows in runs:
        segment = segments[first]
        if len(rows) > 1:
            weight = segment.weight.as_strided((sum(rows), x.shape[1]), segment.weight.stride())
            segment = replace(segment, weight=weight)
        out = _product(x, segment, quantized)
        outs += [None] * len(rows) if out is None else out.split(rows, dim=1)
    return outs


def _neighbours(segments: Sequence[Segment]) -> list[tuple[int, list[int]]]:
    """Runs of plain weights each of which ends where the next begins: the first one's place and the rows of each."""
    runs, end = [], None
    for i, segment in enumerate(segments):
        weight = segment.weight
        plain = segment.scale is None
        here = weight.untyped_storage().data_ptr(), weight.data_ptr(), weight.dtype, segment.out_dtype
        if plain and here == end:
            runs[-1][1].append(len(weight))
        else:
            runs.append((i, [len(weight)]))
        end = (here[0], here[1] + weight.nbytes, *here[2:]) if plain else None
    return runs


def _product(x: Tensor, segment: Segment, quantized: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """The output of a segment by cuBLAS, or None where it has no such product or would take longer."""
    weight, out_dtype = segment.weight, segment.out_dtype or x.dtype
    hopper = gpu(x.device).capability == (9, 0) and out_dtype != torch.float32
    if not cublas_is_faster(len(x), *weight.shape, fp8=segment.scale is not None, hopper=hopper):
        return None
    if segment.scale is not None:
        if not segment.fp8_input or not scaled_mm_fits(weight, out_dtype):
            return None
        q, q_scale = whole_rows(*quantized)
        out = torch.empty(len(q), len(weight), dtype=out_dtype, device=x.device)
        scaled_mm(q, q_scale, weight, segment.scale, out)
        return out[: len(x)]
    if weight.dtype != x.dtype:
        return None
    if out_dtype == x.dtype:
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=torch.float32) if out_dtype == torch.float32 else None


def _empty(x: Tensor, segment: Segment) -> Tensor:
    return x.new_empty(len(x), len(segment.weight), dtype=segment.out_dtype or x.dtype)


def _check_input(x: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise ValueError(f"x must be [M, K] float32, bfloat16 or float16, got {tuple(x.shape)} {x.dtype}")


def _check_segment(segment: Segment, x: Tensor) -> None:
    weight, scale = segment.weight, segment.scale
    if scale is not None:
        check_scaled_weight(weight, scale, x.shape[1], segment.fp8_input)
    elif weight.dtype not in FLOATS or weight.shape[1:] != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(
            f"a weight without a scale must be a contiguous float32, bfloat16 or float16 [N, {x.shape[1]}], got "
            f"{tuple(weight.shape)} {weight.dtype}, strides {weight.stride()}"
        )
    if segment.out_dtype not in (None, *FLOATS):
        raise ValueError(f"outputs are float32, bfloat16 or float16, got {segment.out_dtype}")


def check_scaled_weight(weight: Tensor, scale: Tensor, K: int, fp8_input: bool) -> None:
    """Raises ValueError unless ``weight`` and ``scale`` are an FP8 weight of ``K`` channels with block scales."""
    if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32 or not scale.is_contiguous():
        raise ValueError(
            f"a quantised weight must be float8_e4m3fn with contiguous float32 scales, got {weight.dtype} with "
            f"{scale.dtype}; reference.linear computes with packed FP4"
        )
    if weight.dim() != 2 or weight.shape[1] != K or not weight.is_contiguous():
        raise ValueError(
            f"a weight must be a contiguous [N, {K}], got {tuple(weight.shape)}, strides {weight.stride()}"
        )
    grid = tuple(triton.cdiv(size, 128) for size in weight.shape)
    if tuple(scale.shape) != grid:
        raise ValueError(f"scale {list(scale.shape)} does not fit weight {list(weight.shape)}: expected {list(grid)}")
    if fp8_input and K % FP8_INPUT_GROUP:
        raise ValueError(f"FP8 inputs need a multiple of {FP8_INPUT_GROUP} channels, got {K}")


def _check_quantized(quantized: tuple[Tensor, Tensor], x: Tensor) -> None:
    q, scale = quantized
    shape, grid = tuple(x.shape), (len(x), x.shape[1] // FP8_INPUT_GROUP)
    if tuple(q.shape) != shape or q.dtype != torch.float8_e4m3fn or q.stride(1) != 1:
        raise ValueError(
            f"quantised x must be {shape} float8_e4m3fn with contiguous rows, got {tuple(q.shape)} {q.dtype}"
        )
    if tuple(scale.shape) != grid or scale.dtype != torch.float32 or (len(x) > 1 and scale.stride(0) != 1):
        raise ValueError(
            f"scales of quantised x must be {grid} float32 with stride 1 along the rows, as quantize_input makes them; "
            f"got {tuple(scale.shape)} {scale.dtype} with strides {scale.stride()}"
        )
