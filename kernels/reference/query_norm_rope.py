"""Queries of an attention layer: a norm without weight per head, then the rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.reference.norm_rope import apply_rope, rms_norm, turns_at


def query_norm_rope(
    q: Tensor,
    heads: int,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    padded_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Normalises and rotates each head, and appends heads of zeros.

    Args:
        q: ``[T, heads * d]`` float32, bfloat16 or float16.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: int64 ``[T]``.
        padded_heads: heads of the result, at least ``heads``.
        out: where to write the result.

    Returns:
        ``[T, padded_heads, d]`` in the dtype of ``q``, rounded after the norm and again after the rotation.

    Raises:
        ValueError: ``heads`` does not divide the columns, or exceeds ``padded_heads``.
    """
    if q.dim() != 2 or heads < 1 or q.shape[1] % heads or padded_heads < heads:
        raise ValueError(
            f"need q [T, heads * d] and padded_heads >= heads >= 1, got {tuple(q.shape)}, {heads} heads, "
            f"{padded_heads} padded"
        )
    rows = apply_rope(rms_norm(q.unflatten(-1, (heads, -1)), eps), turns_at(cos_sin, positions))
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padded_heads - heads)) if padded_heads > heads else rows
    return rows if out is None else out.copy_(rows)
