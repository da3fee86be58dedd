"""FP8 weights as launches take them: bytes or FP8, strides of their scales, and plain copies for cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, fp8_view, has_native_fp8
from deepseek_attn.kernels.common.invariance import batch_invariant, in_row_tiles
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.latent.types import WEIGHT_BLOCK, LatentWeight
from deepseek_attn.kernels.latent.weights_triton import dequantize_kernel

HALVES = (torch.bfloat16, torch.float16)
MAX_TOKENS = 64
"""Tokens up to which one launch computes everything."""
MAX_FP8_TOKENS = 128
"""The same of an FP8 weight. On an H200 with 128 heads, blocks of 64 tokens that each read the weight took 17.7 us at
128 tokens and cuBLAS 16.0 us, with a weight of 17 MB in bf16; to write that from FP8 for cuBLAS is 25 MB more."""


@dataclass(frozen=True)
class WeightShape:
    """Strides of a `LatentWeight` and of its scale, constants of `weights_triton`."""

    HEAD_STRIDE: int
    ROW_STRIDE: int
    RANK_STRIDE: int
    SCALE_HEAD_STRIDE: int
    SCALE_ROW_STRIDE: int
    SCALE_RANK_STRIDE: int


def fits_one_launch(x: Tensor, weight: LatentWeight) -> bool:
    """Whether a launch that reads the weight itself is the faster way, or the invariant one, for ``x [T, ...]``."""
    few = len(x) <= (MAX_TOKENS if weight.scale is None else MAX_FP8_TOKENS)
    return (few or batch_invariant()) and x.dtype in HALVES


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out[t, h] = x[t, h] weight[h]`` by cuBLAS, of ``x [T, heads, K]`` and a plain ``weight [heads, K, N]``."""
    if batch_invariant():
        out.copy_(in_row_tiles(lambda rows: torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1), x))
    else:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def stored_rows(weight: LatentWeight) -> Tensor:
    """The rows as kernels read them."""
    return weight.rows if weight.scale is None else fp8_view(weight.rows)


def scale_constants(weight: LatentWeight) -> dict[str, int | bool]:
    """Whether a weight is FP8, and strides of its scale, by the names of shapes of this family."""
    strides = (0, 0, 0) if weight.scale is None else weight.scale.stride()
    names = ("SCALE_HEAD_STRIDE", "SCALE_ROW_STRIDE", "SCALE_RANK_STRIDE")
    return {"FP8_WEIGHT": weight.scale is not None} | dict(zip(names, strides, strict=True))


def dequantize_weight(weight: LatentWeight, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize_weight` in Triton."""
    rows, scale = weight
    if scale is None:
        return rows
    assert dtype in FLOATS
    heads, height, rank = rows.shape
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    if out.numel():
        dequantize_kernel[(heads, height // WEIGHT_BLOCK, rank // WEIGHT_BLOCK)](
            stored_rows(weight),
            scale,
            out,
            HEIGHT=height,
            RANK=rank,
            SHAPE=WeightShape(*rows.stride(), *scale.stride()),
            DTYPE=TRITON_DTYPES[dtype],
            NATIVE_FP8=has_native_fp8(rows.device),
            enable_fp_fusion=True,
            num_warps=8,
        )
    return out
