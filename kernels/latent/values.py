"""Launches of `kernels.latent.project_values` in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, fp8_view, has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.latent.reference import check_latents
from deepseek_attn.kernels.latent.types import ProjectedValues
from deepseek_attn.kernels.latent.values_triton import ValueArguments, ValueShape, project_values_kernel
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP
from deepseek_attn.kernels.linear.launch import empty_quantized_rows

MAX_TOKENS = 64
"""Tokens up to which one launch computes everything."""
HALVES = (torch.bfloat16, torch.float16)


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


def choose_config(T: int, quantize: bool) -> ValueConfig:
    """For ``T`` tokens, the fastest measured on an H200: as many weights in flight as registers hold."""
    tokens = next(n for n in (8, 16, 32, 64) if n >= min(T, 64))
    if quantize:
        return ValueConfig(128, 512, tokens, 1, 8) if tokens <= 32 else ValueConfig(128, 128, tokens, 4, 8)
    if tokens <= 16:
        return ValueConfig(64, 512, tokens, 1, 4)
    return ValueConfig(64, 128, tokens, 2 if tokens == 32 else 4, 4)


def project_values(latents: Tensor, weight: Tensor, config: ValueConfig | None = None) -> Tensor:
    """See `kernels.latent.project_values`; ``config`` overrides the choice of a launch."""
    return _project(latents, weight, None, config)


def project_values_quantized(
    latents: Tensor, weight: Tensor, pow2_scales: bool = True, config: ValueConfig | None = None
) -> ProjectedValues:
    """See `kernels.latent.project_values_quantized`; ``config`` overrides the choice of a launch."""
    T, (heads, dim, _) = len(latents), weight.shape
    buffers = None
    if dim == FP8_INPUT_GROUP and (config is not None or _in_one_launch(latents)):
        buffers = empty_quantized_rows(T, heads * dim, latents.device, pow2_scales)
    return ProjectedValues(_project(latents, weight, buffers, config), buffers)


def _in_one_launch(latents: Tensor) -> bool:
    return len(latents) <= MAX_TOKENS and latents.dtype in HALVES


def _project(latents: Tensor, weight: Tensor, buffers: QuantizedRows | None, config: ValueConfig | None) -> Tensor:
    check_latents(latents, weight)
    if latents.dtype not in FLOATS:
        raise ValueError(f"latents are float32, bfloat16 or float16, got {latents.dtype}")
    T, (heads, dim, rank) = len(latents), weight.shape
    out = torch.empty(T, heads * dim, dtype=latents.dtype, device=latents.device)
    if not out.numel():
        return out
    if config is None and not _in_one_launch(latents):
        values = out.unflatten(1, (heads, dim)).transpose(0, 1)
        torch.bmm(latents[:, :heads].transpose(0, 1), weight.transpose(1, 2), out=values)
        return out
    config = config or choose_config(T, buffers is not None)
    rows = ValueArguments(latents, latents.stride(0), latents.stride(1), weight, out, out.stride(0), T)
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
        HEAD_STRIDE=weight.stride(0),
        VALUE_STRIDE=weight.stride(1),
        RANK_STRIDE=weight.stride(2),
        BLOCK_RANK=config.rank,
        BLOCK_T=config.tokens,
        EARLY=min(config.early, blocks),
        QUANTIZE=buffers is not None,
        POW2=buffers is not None and buffers.pow2_scales,
        DTYPE=dtype,
        DOT=tl.float32 if triton.knobs.runtime.interpret else dtype,
    )
    pdl = supports_pdl(latents.device)
    project_values_kernel[(heads * triton.cdiv(dim, config.values), triton.cdiv(T, config.tokens))](
        rows,
        SHAPE=shape,
        NATIVE_FP8=has_native_fp8(latents.device),
        PDL=pdl,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )
    return out
