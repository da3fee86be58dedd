"""Triton device code of FP8 weights with block scales: values as the plain weight of a `LatentWeight` holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.fp8_triton import decode_e4m3
from deepseek_attn.kernels.common.row_ops_triton import round_to

# the interpreter multiplies float32: its bfloat16 products differ from a GPU's
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class LatentWeightRows(NamedTuple):
    """A `LatentWeight` as kernels read it.

    Attributes:
        rows: ``[heads, rows, rank]`` of a float dtype; FP8, or its bytes where the GPU has no FP8.
        scale: float32 ``[heads, rows / 128, rank / 128]`` of FP8 rows; None of plain ones.
    """

    rows: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class WeightStrides:
    """Strides of `LatentWeightRows` between heads, rows and latent channels; the scale's are 0 without a scale."""

    HEAD: int
    ROW: int
    RANK: int
    SCALE_HEAD: int
    SCALE_ROW: int
    SCALE_RANK: int


@triton.jit
def block_scale(weight, head, row, channel, inside, WEIGHT: tl.constexpr):
    """Scale of the block of a head that holds ``(row, channel)``; 0 where not ``inside``."""
    # a padding head has no scale: its weights are 0, too
    offset = head * WEIGHT.SCALE_HEAD + row // 128 * WEIGHT.SCALE_ROW
    return tl.load(weight.scale + offset + channel // 128 * WEIGHT.SCALE_RANK, mask=inside, other=0)


@triton.jit
def factor_of(x, DTYPE: tl.constexpr):
    """``x``, exact in ``DTYPE``, as a factor of a product: as ``DTYPE``, or as float32 in the interpreter."""
    if _INTERPRETED:
        return x.to(tl.float32)
    else:
        return x.to(DTYPE)


@triton.jit
def dequantized(w, scale, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Float32 products rounded to ``DTYPE``, as `factor_of` has them."""
    product = decode_e4m3(w, NATIVE_FP8, tl.float32) * scale
    if _INTERPRETED:
        return round_to(product, DTYPE)
    else:
        return product.to(DTYPE)


@triton.jit
def latent_dequantize_kernel(
    weight, out, HEIGHT: tl.constexpr, RANK: tl.constexpr, WEIGHT: tl.constexpr, NATIVE_FP8: tl.constexpr
):  # fmt: skip
    """Grid ``(heads, blocks of rows, blocks of channels)``: a block with one scale, into a contiguous ``out``."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * 128 + tl.arange(0, 128)
    channel = tl.program_id(2) * 128 + tl.arange(0, 128)
    start = weight.rows + head * WEIGHT.HEAD + row * WEIGHT.ROW
    # no masks: rows and channels of an FP8 weight are multiples of 128
    w = tl.load(start[:, None] + channel[None, :] * WEIGHT.RANK)
    factor = block_scale(weight, head, tl.program_id(1) * 128, tl.program_id(2) * 128, head >= 0, WEIGHT)
    target = out + head * (HEIGHT * RANK) + row * RANK
    # one rounding, as launches that convert in registers round: cuBLAS multiplies the same values
    plain = round_to(decode_e4m3(w, NATIVE_FP8, tl.float32) * factor, DTYPE)
    tl.store(target[:, None] + channel[None, :], plain.to(DTYPE))
