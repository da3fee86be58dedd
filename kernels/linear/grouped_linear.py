"""The grouped output projection of attention in Triton: inverse rotary embedding, rounding to FP8, products by group.

A first launch rotates and rounds the heads. A second one multiplies all groups, or with many tokens cuBLAS does, group
by group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.linear.launch import launch_products, quantize, whole_rows
from deepseek_attn.kernels.linear.launch_hopper import fits_hopper, launch_hopper
from deepseek_attn.kernels.linear.linear import check_scaled_weight, empty_quantized, scaled_mm, scaled_mm_fits
from deepseek_attn.kernels.linear.tiles import QUANTIZE_ABOVE, HopperTiles, Tiles, cublas_is_faster


def grouped_linear(
    o: Tensor,
    weight: Tensor,
    scale: Tensor,
    groups: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    fp8_input: bool = False,
    pow2: bool = True,
    tiles: Tiles | HopperTiles | None = None,
) -> Tensor:
    """Same as `reference.grouped_linear.grouped_linear`, for FP8 weights and ``o`` whose heads follow one another.

    Args:
        tiles: how to cut the launch; by default chosen from shapes, and cuBLAS computes what is large.
    """
    return _grouped_linear(o, weight, scale, groups, positions, cos_sin, fp8_input, pow2, tiles, False)[0]


def grouped_linear_quantized(
    o: Tensor,
    weight: Tensor,
    scale: Tensor,
    groups: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    fp8_input: bool = False,
    pow2: bool = True,
    tiles: HopperTiles | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """`grouped_linear`, and ``quantize_input(output, pow2)`` where that takes no further launch, else None."""
    return _grouped_linear(o, weight, scale, groups, positions, cos_sin, fp8_input, pow2, tiles, True)


def _grouped_linear(
    o: Tensor,
    weight: Tensor,
    scale: Tensor,
    groups: int,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    fp8_input: bool,
    pow2: bool,
    tiles: Tiles | HopperTiles | None,
    rounds: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    M, H, d = _checked_shape(o, groups, positions, cos_sin)
    K, N = H // groups * d, weight.shape[0]
    check_scaled_weight(weight, scale, K, fp8_input)
    if N % groups:
        raise ValueError(f"a weight of {N} rows cannot be cut into {groups} groups")
    x = o.flatten(1) if o.stride(1) == d and o.stride(2) == 1 else o.contiguous().flatten(1)
    out = torch.empty(M, N, dtype=o.dtype, device=o.device)
    if M == 0:
        return out, None
    rope = None if positions is None else (positions, cos_sin, d)
    # not on the way, as `linear` quantises: each head is read by many programs, and that took 5 us more for 8 tokens
    quantized = None
    if fp8_input and (rope is not None or M > QUANTIZE_ABOVE):
        quantized = quantize(x, groups, pow2, rope)
    elif rope is not None:
        x = quantize(x, 1, pow2, rope, fp8=False)[0][0]
    scaled = [(weight, scale, out)]
    hopper = fits_hopper(x, scaled, [], quantized, N // groups)
    block = weight[: N // groups]
    large = quantized is not None and tiles is None and cublas_is_faster(M, *block.shape, fp8=True, hopper=hopper)
    if large and scaled_mm_fits(block, out.dtype):
        return _by_cublas(*quantized, weight, scale, groups), None
    if isinstance(tiles, HopperTiles) or (tiles is None and hopper):
        rounded = empty_quantized(out) if rounds else None
        launch_hopper(x, scaled, [], quantized, groups=groups, rounded=rounded, pow2=pow2, tiles=tiles)
        return out, rounded
    launch_products(x, scaled, [], fp8_input=fp8_input, pow2=pow2, quantized=quantized, groups=groups, tiles=tiles)
    return out, None


def _by_cublas(q: Tensor, q_scale: Tensor, weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    """Products by group of ``q [groups, M, K]`` with scales ``[M, groups * K / 128]``."""
    M, rows = q.shape[1], weight.shape[0] // groups
    parts = zip(q, q_scale.chunk(groups, dim=1), weight.chunk(groups), scale.chunk(groups), strict=True)
    out = None
    for g, (part, part_scale, block, block_scale) in enumerate(parts):
        part, part_scale = whole_rows(part, part_scale)
        if out is None:
            out = torch.empty(len(part), groups * rows, dtype=torch.bfloat16, device=q.device)
        scaled_mm(part, part_scale, block, block_scale, out[:, g * rows : (g + 1) * rows])
    return out[:M]


def _checked_shape(o: Tensor, groups: int, positions: Tensor | None, cos_sin: Tensor | None) -> tuple[int, int, int]:
    if o.dim() != 3 or o.dtype not in FLOATS or o.shape[1] % groups:
        raise ValueError(
            f"o must be [M, H, d] float32, bfloat16 or float16 with a multiple of {groups} heads, got "
            f"{tuple(o.shape)} {o.dtype}"
        )
    if (positions is None) != (cos_sin is None):
        raise ValueError("positions and cos_sin go together: give both, or neither to leave the heads unrotated")
    if positions is None:
        return o.shape
    if positions.shape != (len(o),) or positions.is_floating_point():
        raise ValueError(f"positions must be integers [{len(o)}], got {tuple(positions.shape)} {positions.dtype}")
    d = o.shape[2]
    if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or cos_sin.shape[1] > d:
        raise ValueError(
            f"cos_sin must be a contiguous float32 [positions, at most {d}], got {tuple(cos_sin.shape)} {cos_sin.dtype}"
        )
    if d % 2 or cos_sin.shape[1] % 2:
        raise ValueError(f"pairs of channels are rotated: d and rope_dim must be even, got {d} and {cos_sin.shape[1]}")
    return o.shape
