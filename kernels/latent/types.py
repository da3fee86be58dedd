"""Arguments and results of this family's ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepseek_attn.kernels.common.quant import QuantizedRows

WEIGHT_BLOCK = 128
"""Rows of a head, and latent channels, that share a scale of an FP8 weight."""


class LatentWeight(NamedTuple):
    """A half of ``kv_b_proj``, head by head: plain, or FP8 with block scales as in the checkpoint.

    An FP8 weight stands for the plain weight of its values ``e4m3 * scale``, rounded to the dtype of the op's input:
    both give the same results.

    Attributes:
        rows: ``[heads, rows, rank]`` of a float dtype, or float8_e4m3fn with rows and rank multiples of 128; any
            strides; on a GPU fastest with contiguous ``rank`` channels, as the checkpoint has them.
        scale: float32 ``[heads, rows / 128, rank / 128]`` of an FP8 weight, any strides; None for a plain one.
    """

    rows: Tensor
    scale: Tensor | None = None


class LatentQueries(NamedTuple):
    """Projected queries of a step's tokens, and the weight that makes them latent.

    Attributes:
        q: ``[T, heads * (nope + rope_dim)]``, contiguous rows; of each head the last ``rope_dim`` channels are rotated.
        weight: ``W_UK [heads, nope, rank]``, FP8 or in the dtype of ``q``.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: int64 ``[T]``.
        padded_heads: heads of the result, at least ``heads``.
    """

    q: Tensor
    weight: LatentWeight
    cos_sin: Tensor
    positions: Tensor
    padded_heads: int


class ProjectedValues(NamedTuple):
    """Result of `project_values`.

    Attributes:
        values: ``[T, heads * v_head_dim]``; quantized: the same quantised to FP8, or None.
    """

    values: Tensor
    quantized: QuantizedRows | None
