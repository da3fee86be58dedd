"""The grouped output projection of attention: inverse rotary embedding, then a block-diagonal product."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.reference.linear import dequantize_weight, quantized_input
from deepseek_attn.kernels.reference.norm_rope import apply_rope, turns_at


def grouped_linear(
    o: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    groups: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    fp8_input: bool = False,
    pow2: bool = True,
) -> Tensor:
    """``z[t, g] = W[g] o[t, g]`` where heads are cut into ``groups`` and ``W = weight.view(groups, N, K)``.

    Args:
        o: ``[M, H, d]`` attention outputs, H a multiple of ``groups``; ``K = H / groups * d``.
        weight, scale: ``[groups * N, K]``, as in `Segment`.
        positions: ``[M]`` positions at which the last channels of each head are rotated back; None leaves them.
        cos_sin: float32 ``[positions, rope_dim]``, cosines then sines of the pairs ``(2i, 2i + 1)``.
        fp8_input: round the rotated heads to FP8 per token and 128 channels; for a quantised weight only.
        pow2: FP8 scales are powers of two.

    Returns:
        ``[M, groups * N]`` in the dtype of ``o``. The rotated heads are rounded to that dtype as well.
    """
    if positions is not None:
        o = apply_rope(o, turns_at(cos_sin, positions), inverse=True)
    x = o.reshape(len(o), groups, -1)
    quantized = scale is not None
    x32 = quantized_input(x, fp8_input, pow2) if quantized else x
    matrix = dequantize_weight(weight, scale) if quantized else weight
    z = torch.bmm(x32.transpose(0, 1), matrix.view(groups, -1, x.shape[2]).transpose(1, 2))
    return z.transpose(0, 1).to(o.dtype).flatten(1)
