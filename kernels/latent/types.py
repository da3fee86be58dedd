"""Arguments and results of this family's ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepseek_attn.kernels.common.quant import QuantizedRows


class LatentQueries(NamedTuple):
    """Projected queries of a step's tokens, and the weight that makes them latent.

    Attributes:
        q: ``[T, heads * (nope + rope_dim)]``, contiguous rows; of each head the last ``rope_dim`` channels are rotated.
        weight: ``W_UK [heads, nope, rank]`` in the dtype of ``q``, any strides; on a GPU fastest with contiguous
            ``rank`` channels, as the checkpoint has them.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: int64 ``[T]``.
        padded_heads: heads of the result, at least ``heads``.
        out: ``[T, padded_heads, rank + rope_dim]`` buffer for the result; None allocates it.
    """

    q: Tensor
    weight: Tensor
    cos_sin: Tensor
    positions: Tensor
    padded_heads: int
    out: Tensor | None = None


class ProjectedValues(NamedTuple):
    """Result of `project_values_quantized`.

    Attributes:
        values: ``[T, heads * v_head_dim]``; quantized: the same quantised to FP8, or None.
    """

    values: Tensor
    quantized: QuantizedRows | None
