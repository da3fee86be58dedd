"""Linear layers in Triton, for any GPU from compute capability 8.0 on: several projections of one input in one launch.

With few tokens a launch reads the weights at memory speed and quantises its input itself. With more, the input is
quantised once for all; with many, large products are left to cuBLAS. Device code: `linear_triton`; on Hopper
`linear_hopper` for quantised inputs and `linear_few_hopper` for large weights and few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.linear.cublas import products_by_cublas
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP, Segment, quantizes_once
from deepseek_attn.kernels.linear.launch import (
    FP8Product,
    PlainProduct,
    Products,
    launch_products,
    quantize_rows,
)
from deepseek_attn.kernels.linear.launch_config import FewHopperConfig, HopperLaunchConfig, LaunchConfig
from deepseek_attn.kernels.linear.launch_hopper import few_hopper_config, fits_hopper, launch_few_hopper, launch_hopper


def multi_linear(
    x: Tensor,
    segments: Sequence[Segment],
    pow2_scales: bool = True,
    quantized: QuantizedRows | None = None,
    config: LaunchConfig | HopperLaunchConfig | FewHopperConfig | None = None,
) -> list[Tensor]:
    """See `deepseek_attn.kernels.linear.multi_linear`; no FP4 weights. ``config`` overrides cuBLAS and tiling."""
    _check_input(x)
    for segment in segments:
        _check_segment(segment, x)
    if quantized is not None:
        _check_quantized(quantized, x)
    if not len(x) or not segments:
        return [_empty(x, segment) for segment in segments]
    x = x if x.stride(1) == 1 else x.contiguous()
    if quantized is None and quantizes_once(len(x)) and any(segment.reads_fp8_once for segment in segments):
        quantized = quantize_input(x, pow2_scales)
    outs = products_by_cublas(x, segments, quantized) if config is None else [None] * len(segments)
    todo = [i for i, out in enumerate(outs) if out is None]
    outs = [_empty(x, segment) if out is None else out for out, segment in zip(outs, segments, strict=True)]
    for products in _launches([(segments[i], outs[i]) for i in todo]):
        few = config if isinstance(config, FewHopperConfig) else None
        if config is None and products.reads_fp8_once and not products.plain:
            weights, dtypes = [fp8.weight for fp8 in products.fp8], [fp8.out.dtype for fp8 in products.fp8]
            few = few_hopper_config(x, weights, dtypes, quantized is not None)
        on_hopper = isinstance(config, HopperLaunchConfig)
        if few is not None:
            launch_few_hopper(x, products.fp8, quantized, few, pow2_scales=pow2_scales)
        elif on_hopper or (config is None and products.fp8_input and fits_hopper(x, products, quantized)):
            launch_hopper(x, products, quantized, config=config)
        else:
            launch_products(x, products, pow2_scales=pow2_scales, quantized=quantized, config=config)
    return outs


def _launches(todo: Sequence[tuple[Segment, Tensor]]) -> Iterator[Products]:
    """Packs segments and their outputs into as few launches as the kernels allow.

    A launch has FP8 weights of one kind and plain weights of one kind, where a kind is all that the compiled kernel
    depends on: the dtypes of weight and output, whether the input is quantised, and ``fp8_group``. So everything that
    projects the input of a layer is one launch: query latent and key in FP8, with compressors and index weights in
    bfloat16. Each kind of FP8 weights is paired with one of plain weights, in order; a kind left over has a separate
    launch.
    """
    fp8: dict[tuple, list[FP8Product]] = {}
    plain: dict[tuple, list[PlainProduct]] = {}
    for segment, out in todo:
        kind = segment.reads_fp8, segment.weight.dtype, out.dtype
        if segment.scale is None:
            plain.setdefault(kind, []).append(PlainProduct(segment.weight, out))
        else:
            fp8.setdefault((*kind, segment.fp8_group), []).append(FP8Product(segment.weight, segment.scale, out))
    for fp8_kind, plain_kind in zip_longest(fp8, plain):
        fp8_input, *_, fp8_group = fp8_kind or (False, FP8_INPUT_GROUP)
        yield Products(fp8.get(fp8_kind, []), plain.get(plain_kind, []), fp8_input, fp8_group)


def quantize_input(x: Tensor, pow2_scales: bool = True) -> QuantizedRows:
    """See `deepseek_attn.kernels.linear.quantize_input`; on a GPU with FP8 (from 8.9 on) or without."""
    _check_input(x)
    if x.shape[1] % FP8_INPUT_GROUP:
        raise ValueError(f"x must have a multiple of {FP8_INPUT_GROUP} channels, got {tuple(x.shape)}")
    return quantize_rows(x if x.stride(1) == 1 else x.contiguous(), pow2_scales)


def empty_quantized(x: Tensor, segments: Sequence[Segment], pow2_scales: bool = True) -> QuantizedRows | None:
    """See `deepseek_attn.kernels.linear.empty_quantized`; for segments that read FP8 once."""
    if not quantizes_once(len(x)):
        weights, dtypes = zip(*((segment.weight, segment.out_dtype or x.dtype) for segment in segments), strict=True)
        if few_hopper_config(x, weights, dtypes, True) is None:
            return None
    return empty_quantized_rows(*x.shape, x.device, pow2_scales)


def _empty(x: Tensor, segment: Segment) -> Tensor:
    return x.new_empty(len(x), len(segment.weight), dtype=segment.out_dtype or x.dtype)


def _check_input(x: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise ValueError(f"x must be [M, K] float32, bfloat16 or float16, got {tuple(x.shape)} {x.dtype}")


def _check_segment(segment: Segment, x: Tensor) -> None:
    weight, scale = segment.weight, segment.scale
    if scale is not None:
        check_fp8_weight(weight, scale, x.shape[1], segment.fp8_input, segment.fp8_group)
    elif weight.dtype not in FLOATS or weight.shape[1:] != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(
            f"a weight without a scale must be a contiguous float32, bfloat16 or float16 [N, {x.shape[1]}], got "
            f"{tuple(weight.shape)} {weight.dtype}, strides {weight.stride()}"
        )
    if segment.out_dtype not in (None, *FLOATS):
        raise ValueError(f"outputs are float32, bfloat16 or float16, got {segment.out_dtype}")


def check_fp8_weight(weight: Tensor, scale: Tensor, K: int, fp8_input: bool, fp8_group: int) -> None:
    """Raises ValueError unless ``weight`` and ``scale`` are an FP8 weight of ``K`` channels with block scales."""
    if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32 or not scale.is_contiguous():
        raise ValueError(
            f"a quantised weight must be float8_e4m3fn with contiguous float32 scales, got {weight.dtype} with "
            f"{scale.dtype}; kernels.linear.reference computes with packed FP4"
        )
    if weight.dim() != 2 or weight.shape[1] != K or not weight.is_contiguous():
        raise ValueError(
            f"a weight must be a contiguous [N, {K}], got {tuple(weight.shape)}, strides {weight.stride()}"
        )
    grid = tuple(triton.cdiv(size, fp8_group) for size in weight.shape)
    if tuple(scale.shape) != grid:
        raise ValueError(f"scale {list(scale.shape)} does not fit weight {list(weight.shape)}: expected {list(grid)}")
    if fp8_input and K % fp8_group:
        raise ValueError(f"FP8 inputs need a multiple of {fp8_group} channels, got {K}")


def _check_quantized(quantized: QuantizedRows, x: Tensor) -> None:
    values, scale = quantized.values, quantized.scale
    shape, grid = tuple(x.shape), (len(x), x.shape[1] // FP8_INPUT_GROUP)
    if tuple(values.shape) != shape or values.dtype != torch.float8_e4m3fn or values.stride(1) != 1:
        raise ValueError(
            f"quantised x must be {shape} float8_e4m3fn with contiguous rows, got {tuple(values.shape)} {values.dtype}"
        )
    if tuple(scale.shape) != grid or scale.dtype != torch.float32 or (len(x) > 1 and scale.stride(0) != 1):
        raise ValueError(
            f"scales of quantised x must be {grid} float32 with stride 1 along the rows, as quantize_input makes them; "
            f"got {tuple(scale.shape)} {scale.dtype} with strides {scale.stride()}"
        )
