"""The grouped output projection of attention in Triton: inverse RoPE, quantisation to FP8, products by group.

A first launch rotates and quantises the heads. A second one multiplies all groups, or with many tokens cuBLAS does,
group by group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.invariance import planned_rows
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.linear.cublas import padded_rows, scaled_mm, scaled_mm_fits
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP, quantizes_once
from deepseek_attn.kernels.linear.launch import (
    FP8Product,
    Products,
    Rope,
    launch_products,
    quantize_rows,
    rotate_rows,
)
from deepseek_attn.kernels.linear.launch_config import (
    FewHopperConfig,
    HopperLaunchConfig,
    LaunchConfig,
    cublas_is_faster,
    quantizes_output,
)
from deepseek_attn.kernels.linear.launch_hopper import few_hopper_config, fits_hopper, launch_few_hopper, launch_hopper
from deepseek_attn.kernels.linear.linear import check_fp8_weight


def grouped_linear(
    o: Tensor,
    weight: Tensor,
    scale: Tensor,
    groups: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    fp8_input: bool = False,
    pow2_scales: bool = True,
    fp8_group: int = FP8_INPUT_GROUP,
    config: LaunchConfig | HopperLaunchConfig | FewHopperConfig | None = None,
) -> Tensor:
    """See `deepseek_attn.kernels.linear.grouped_linear`; for FP8 weights. ``config`` overrides cuBLAS and tiling."""
    return _grouped_linear(
        o, weight, scale, groups, positions, cos_sin, fp8_input, pow2_scales, fp8_group, config, False
    )[0]


def grouped_linear_quantized(
    o: Tensor,
    weight: Tensor,
    scale: Tensor,
    groups: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    fp8_input: bool = False,
    pow2_scales: bool = True,
    fp8_group: int = FP8_INPUT_GROUP,
    config: HopperLaunchConfig | FewHopperConfig | None = None,
) -> tuple[Tensor, QuantizedRows | None]:
    """See `deepseek_attn.kernels.linear.grouped_linear_quantized`."""
    return _grouped_linear(
        o, weight, scale, groups, positions, cos_sin, fp8_input, pow2_scales, fp8_group, config, True
    )


def grouped_linear_of_quantized(
    o: QuantizedRows, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, QuantizedRows | None]:
    """See `deepseek_attn.kernels.linear.grouped_linear_of_quantized`."""
    if o.values.dim() != 3 or len(weight) % len(o.values):
        raise ValueError(f"a weight of {len(weight)} rows needs values [groups, M, K], got {tuple(o.values.shape)}")
    groups, M, K = o.values.shape
    check_fp8_weight(weight, scale, K, True, FP8_INPUT_GROUP)
    out = torch.empty(M, len(weight), dtype=dtype, device=weight.device)
    if M == 0:
        return out, None
    x = out.new_empty(1).expand(M, groups * K)  # stands for the input, of which only shape and dtype are read
    return _multiply(x, Products([FP8Product(weight, scale, out)]), o, groups, o.pow2_scales, None, True)


def _grouped_linear(
    o: Tensor,
    weight: Tensor,
    scale: Tensor,
    groups: int,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    fp8_input: bool,
    pow2_scales: bool,
    fp8_group: int,
    config: LaunchConfig | HopperLaunchConfig | FewHopperConfig | None,
    quantize_output: bool,
) -> tuple[Tensor, QuantizedRows | None]:
    M, H, d = _checked_shape(o, groups, positions, cos_sin)
    K, N = H // groups * d, weight.shape[0]
    check_fp8_weight(weight, scale, K, fp8_input, fp8_group)
    if N % groups:
        raise ValueError(f"a weight of {N} rows cannot be divided into {groups} groups")
    x = o.flatten(1) if o.stride(1) == d and o.stride(2) == 1 else o.contiguous().flatten(1)
    out = torch.empty(M, N, dtype=o.dtype, device=o.device)
    if M == 0:
        return out, None
    rope = None if positions is None or cos_sin is None else Rope(positions, cos_sin, d)
    # not in the product, unlike `linear`: many programs read each head, which took 5 us more for 8 tokens
    quantized = None
    if fp8_input and fp8_group == FP8_INPUT_GROUP and (rope is not None or quantizes_once(M)):
        quantized = quantize_rows(x, pow2_scales, groups, rope)
    elif rope is not None:
        x = rotate_rows(x, rope)
    products = Products([FP8Product(weight, scale, out)], fp8_input=fp8_input, fp8_group=fp8_group)
    return _multiply(x, products, quantized, groups, pow2_scales, config, quantize_output)


def _multiply(
    x: Tensor,
    products: Products,
    quantized: QuantizedRows | None,
    groups: int,
    pow2_scales: bool,
    config: LaunchConfig | HopperLaunchConfig | FewHopperConfig | None,
    quantize_output: bool,
) -> tuple[Tensor, QuantizedRows | None]:
    """The output of the only product of ``products``, and with ``quantize_output`` also quantised if that is free.

    Args:
        x: ``[M, groups * K]``; of the values nothing is read if it is ``quantized``.
    """
    weight, scale, out = products.fp8[0]
    M, N = out.shape
    few = config if isinstance(config, FewHopperConfig) else None
    if config is None and quantized is not None:
        few = few_hopper_config(x, [weight], [out.dtype], True, groups)
    if few is not None:
        quantizes = quantize_output and few.rows == 128
        output = empty_quantized_rows(M, N, x.device, pow2_scales) if quantizes else None
        launch_few_hopper(
            x, products.fp8, quantized, few, pow2_scales=pow2_scales, groups=groups, quantized_output=output
        )
        return out, output
    hopper = fits_hopper(x, products, quantized, N // groups)
    block = weight[: N // groups]
    if quantized is not None and config is None:
        large = cublas_is_faster(M, *block.shape, fp8=True, hopper=hopper)
        if large and scaled_mm_fits(block, out.dtype):
            return _by_cublas(quantized, weight, scale, groups), None
    if quantized is not None and (isinstance(config, HopperLaunchConfig) or (config is None and hopper)):
        quantizes = quantize_output and quantizes_output(planned_rows(M))
        output = empty_quantized_rows(M, N, x.device, pow2_scales) if quantizes else None
        launch_hopper(x, products, quantized, groups=groups, quantized_output=output, config=config)
        return out, output
    launch_products(x, products, pow2_scales=pow2_scales, quantized=quantized, groups=groups, config=config)
    return out, None


def _by_cublas(quantized: QuantizedRows, weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    """Products by group of values ``[groups, M, K]`` with scales ``[M, groups * K / 128]``."""
    M, N = quantized.values.shape[1], len(weight)
    scales = quantized.scale.chunk(groups, dim=1)
    by_group = [
        padded_rows(QuantizedRows(values, group_scale))
        for values, group_scale in zip(quantized.values, scales, strict=True)
    ]
    out = torch.empty(len(by_group[0].values), N, dtype=torch.bfloat16, device=weight.device)
    blocks = zip(by_group, weight.chunk(groups), scale.chunk(groups), out.chunk(groups, dim=1), strict=True)
    for rows, block, block_scale, columns in blocks:
        scaled_mm(rows, block, block_scale, columns)
    return out[:M]


def _checked_shape(o: Tensor, groups: int, positions: Tensor | None, cos_sin: Tensor | None) -> tuple[int, int, int]:
    if o.dim() != 3 or o.dtype not in FLOATS or o.shape[1] % groups:
        raise ValueError(
            f"o must be [M, H, d] float32, bfloat16 or float16 with a multiple of {groups} heads, got "
            f"{tuple(o.shape)} {o.dtype}"
        )
    if (positions is None) != (cos_sin is None):
        raise ValueError("positions and cos_sin go together: give both, or neither to leave the heads unrotated")
    M, H, d = o.shape
    if positions is None or cos_sin is None:
        return M, H, d
    if positions.shape != (M,) or positions.is_floating_point():
        raise ValueError(f"positions must be integers [{M}], got {tuple(positions.shape)} {positions.dtype}")
    if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or cos_sin.shape[1] > d:
        raise ValueError(
            f"cos_sin must be a contiguous float32 [positions, at most {d}], got {tuple(cos_sin.shape)} {cos_sin.dtype}"
        )
    if d % 2 or cos_sin.shape[1] % 2:
        raise ValueError(f"pairs of channels are rotated: d and rope_dim must be even, got {d} and {cos_sin.shape[1]}")
    return M, H, d
