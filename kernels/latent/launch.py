"""Launches of the projections into and out of the latent space: Triton kernels, and cuBLAS for many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import fp8_view, gpu
from deepseek_attn.kernels.common.invariance import batch_invariant, in_row_tiles
from deepseek_attn.kernels.common.plans import SharedLaunch, cdiv, launch_options
from deepseek_attn.kernels.common.quant import empty_quantized_rows
from deepseek_attn.kernels.common.rows import fp8_rows
from deepseek_attn.kernels.latent.absorb_triton import (
    AbsorbArguments,
    AbsorbShape,
    absorb_queries_kernel,
    rotate_queries_kernel,
)
from deepseek_attn.kernels.latent.plan import LatentPlan, LatentProblem, plan_absorb, plan_values
from deepseek_attn.kernels.latent.reference import check_latents, check_queries
from deepseek_attn.kernels.latent.types import WEIGHT_BLOCK, LatentQueries, LatentWeight, ProjectedValues
from deepseek_attn.kernels.latent.values_triton import ValueArguments, ValueShape, project_values_kernel
from deepseek_attn.kernels.latent.weights_triton import LatentWeightRows, WeightStrides, latent_dequantize_kernel


def absorb_queries(queries: LatentQueries) -> Tensor:
    """See `kernels.latent.absorb_queries`."""
    plan, rows, shape, out, grid = absorb_launch(queries)
    if not out.numel():
        return out
    if plan.rotation is None:
        absorb_queries_kernel[grid](rows, SHAPE=shape, **plan.product.options)
        return out
    # cuBLAS writes the latent channels of the result's rows, and the rotation fills their other channels
    (heads, nope, rank), warps = queries.weight.rows.shape, plan.rotation.config.warps
    plain, q = dequantize_weight(queries.weight, out.dtype, plan), queries.q.unflatten(-1, (heads, -1))
    _multiply_heads(q[..., :nope], plain, out[:, :heads, :rank], plan)
    rotate_queries_kernel[(len(out), cdiv(out.shape[1], shape.TILES.heads))](
        rows, SHAPE=shape, PADDED=out.shape[1] > heads, **launch_options(warps)
    )
    return out


def absorb_launch(queries: LatentQueries) -> SharedLaunch:
    """Checks the tensors, plans, and allocates the result.

    Raises:
        ValueError: tensors that disagree or that the kernels do not support.
    """
    check_queries(queries)
    q, weight, cos_sin, positions, padded_heads = queries
    (heads, nope, rank), T, rope = weight.rows.shape, len(q), cos_sin.shape[1]
    plan = plan_absorb(_problem(q, weight), gpu(q.device))
    out = torch.empty(T, padded_heads, rank + rope, dtype=q.dtype, device=q.device)
    rows = AbsorbArguments(
        q, q.stride(0), _stored(weight), cos_sin, cos_sin.shape[0], positions,
        out, out.stride(0), out.stride(1), T, heads, padded_heads,
    )  # fmt: skip
    tiles = (plan.rotation or plan.product).config
    shape = AbsorbShape(nope, rope, rank, _strides(weight), tiles, plan.tokens, plan.product.native_fp8)
    grid = padded_heads * cdiv(rank, tiles.rank), cdiv(T, plan.tokens)
    return SharedLaunch(plan, rows, shape, out, grid)


def project_values(latents: Tensor, weight: LatentWeight, pow2_scales: bool | None = None) -> ProjectedValues:
    """See `kernels.latent.project_values`."""
    check_latents(latents, weight)
    T, (heads, dim, rank) = len(latents), weight.rows.shape
    plan = plan_values(_problem(latents, weight, pow2_scales is not None), gpu(latents.device))
    out = torch.empty(T, heads * dim, dtype=latents.dtype, device=latents.device)
    buffers = empty_quantized_rows(T, heads * dim, out.device, pow2_scales is True) if plan.quantized else None
    if not out.numel():
        return ProjectedValues(out, buffers)
    if plan.product.kernel == "cuBLAS":
        plain = dequantize_weight(weight, latents.dtype, plan).transpose(1, 2)
        _multiply_heads(latents[:, :heads], plain, out.unflatten(1, (heads, dim)), plan)
        return ProjectedValues(out, None)
    tiles = plan.product.config
    rows = ValueArguments(
        latents, latents.stride(0), latents.stride(1), _stored(weight), out, out.stride(0), T, fp8_rows(buffers)
    )
    shape = ValueShape(dim, rank, _strides(weight), tiles, plan.tokens, pow2_scales is True, plan.product.native_fp8)
    project_values_kernel[(heads * cdiv(dim, tiles.values), cdiv(T, plan.tokens))](
        rows, SHAPE=shape, num_stages=tiles.stages, **plan.product.options
    )
    return ProjectedValues(out, buffers)


def _problem(x: Tensor, weight: LatentWeight, quantize: bool = False) -> LatentProblem:
    nope, fp8 = weight.rows.shape[1], weight.scale is not None
    return LatentProblem(len(x), nope, batch_invariant(), dtype=x.dtype, fp8_weight=fp8, quantize=quantize)


def dequantize_weight(weight: LatentWeight, dtype: torch.dtype, plan: LatentPlan) -> Tensor:
    """`reference.dequantize_weight` in Triton; a plain weight is returned as it is."""
    if plan.dequantize is None:
        return weight.rows
    heads, height, rank = weight.rows.shape
    out = torch.empty(weight.rows.shape, dtype=dtype, device=weight.rows.device)
    options = {"NATIVE_FP8": plan.product.native_fp8, **launch_options(plan.dequantize.config.warps)}
    latent_dequantize_kernel[(heads, height // WEIGHT_BLOCK, rank // WEIGHT_BLOCK)](
        _stored(weight), out, HEIGHT=height, RANK=rank, WEIGHT=_strides(weight), **options
    )
    return out


def _multiply_heads(x: Tensor, weight: Tensor, out: Tensor, plan: LatentPlan) -> None:
    """``out[t, h] = x[t, h] weight[h]`` by cuBLAS, of ``x [T, heads, K]`` and a plain ``weight [heads, K, N]``."""
    if plan.row_tiles:
        out.copy_(in_row_tiles(lambda rows: torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1), x))
    else:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def _stored(weight: LatentWeight) -> LatentWeightRows:
    return LatentWeightRows(weight.rows if weight.scale is None else fp8_view(weight.rows), weight.scale)


def _strides(weight: LatentWeight) -> WeightStrides:
    return WeightStrides(*weight.rows.stride(), *((0, 0, 0) if weight.scale is None else weight.scale.stride()))
