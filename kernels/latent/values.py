"""Launches of `kernels.latent.project_values` in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, fp8_view, gpu, has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.invariance import planned_rows
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.latent.reference import check_latents
from deepseek_attn.kernels.latent.types import LatentWeight, ProjectedValues
from deepseek_attn.kernels.latent.values_triton import ValueArguments, ValueShape, project_values_kernel
from deepseek_attn.kernels.latent.weights import (
    dequantize_weight,
    fits_one_launch,
    multiply_heads,
    scale_constants,
    stored_rows,
)
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP


@dataclass(frozen=True)
class ValueConfig:
    """Launch configuration of `project_values_kernel`.

    Attributes:
        values, rank, tokens: value channels, latent channels and tokens of a program's tiles.
        early: blocks of latent channels whose weights are loaded before the previous kernel has ended.
        warps, stages: of a program.
    """

    values: int
    rank: int
    tokens: int
    early: int
    warps: int
    stages: int = 3


def choose_config(T: int, quantize: bool, fp8_weight: bool, capability: tuple[int, int]) -> ValueConfig:
    """For ``T`` tokens, the fastest measured on an H200: as many weights in flight as registers hold.

    Elsewhere than on compute capability 9 and 10 a whole head, as quantising needs, goes through shared memory tile by
    tile: there is no earlier launch to gain from (8.x), or 99 KiB for weights that pass from registers to a product.
    """
    tokens = next(n for n in (8, 16, 32, 64) if n >= min(T, 64))
    if quantize and capability[0] not in (9, 10):
        return ValueConfig(128, 128, tokens, 0, 8, stages=2)
    if fp8_weight:  # a tile has one scale; four are in flight
        return ValueConfig(128, 128, tokens, 4, 8) if quantize else ValueConfig(64, 128, tokens, 4, 4)
    if quantize:
        return ValueConfig(128, 512, tokens, 1, 8) if tokens <= 32 else ValueConfig(128, 128, tokens, 4, 8)
    if tokens <= 16:
        return ValueConfig(64, 512, tokens, 1, 4)
    return ValueConfig(64, 128, tokens, 2 if tokens == 32 else 4, 4)


def project_values(latents: Tensor, weight: LatentWeight) -> Tensor:
    """See `kernels.latent.project_values`."""
    return _project(latents, weight, None)


def project_values_quantized(latents: Tensor, weight: LatentWeight, pow2_scales: bool = True) -> ProjectedValues:
    """See `kernels.latent.project_values_quantized`."""
    T, (heads, dim, _) = len(latents), weight.shape
    buffers = None
    if dim == FP8_INPUT_GROUP and fits_one_launch(latents, weight):
        buffers = empty_quantized_rows(T, heads * dim, latents.device, pow2_scales)
    return ProjectedValues(_project(latents, weight, buffers), buffers)


def _project(latents: Tensor, weight: LatentWeight, buffers: QuantizedRows | None) -> Tensor:
    check_latents(latents, weight)
    if latents.dtype not in FLOATS:
        raise ValueError(f"latents are float32, bfloat16 or float16, got {latents.dtype}")
    T, (heads, dim, rank) = len(latents), weight.shape
    out = torch.empty(T, heads * dim, dtype=latents.dtype, device=latents.device)
    if not out.numel():
        return out
    if not fits_one_launch(latents, weight):
        plain = dequantize_weight(weight, latents.dtype)
        multiply_heads(latents[:, :heads], plain.transpose(1, 2), out.unflatten(1, (heads, dim)))
        return out
    capability, fp8_weight = gpu(latents.device).capability, weight.scale is not None
    config = choose_config(planned_rows(T), buffers is not None, fp8_weight, capability)
    stored = stored_rows(weight)
    rows = ValueArguments(
        latents, latents.stride(0), latents.stride(1), stored, out, out.stride(0), T, scale=weight.scale
    )
    if buffers is not None:
        rows = rows._replace(
            fp8=fp8_view(buffers.values),
            fp8_stride=buffers.values.stride(0),
            fp8_scale=buffers.scale,
            fp8_scale_stride=buffers.scale.stride(1),
        )
    dtype = TRITON_DTYPES[latents.dtype]
    blocks = triton.cdiv(rank, config.rank)
    shape = ValueShape(
        V=dim,
        BLOCK_V=config.values,
        RANK=rank,
        HEAD_STRIDE=stored.stride(0),
        VALUE_STRIDE=stored.stride(1),
        RANK_STRIDE=stored.stride(2),
        BLOCK_RANK=config.rank,
        BLOCK_T=config.tokens,
        EARLY=min(config.early, blocks),
        QUANTIZE=buffers is not None,
        POW2=buffers is not None and buffers.pow2_scales,
        DTYPE=dtype,
        DOT=tl.float32 if triton.knobs.runtime.interpret else dtype,
        **scale_constants(weight),
    )
    pdl = supports_pdl(latents.device)
    project_values_kernel[(heads * triton.cdiv(dim, config.values), triton.cdiv(T, config.tokens))](
        rows,
        SHAPE=shape,
        NATIVE_FP8=has_native_fp8(latents.device),
        PDL=pdl,
        STAGES=config.stages,
        enable_fp_fusion=True,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )
    return out
