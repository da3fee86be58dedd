"""RMS norm and rotary position embedding of rows: float32 inside, one rounding to the input's dtype each."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.invariance import in_row_tiles


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) [* weight]`` over the last dimension, in float32, cast once to ``x.dtype``."""
    x32 = x.float()
    y = x32 * torch.rsqrt(in_row_tiles(_mean_square, x32) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def freqs_cis_at(cos_sin: Tensor, positions: Tensor) -> Tensor:
    """``cos + i sin`` at ``positions [T]``: complex64 ``[T, n]`` of a float32 table ``[max_positions, 2 n]``."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    return torch.complex(cos, sin)


def apply_rope(x: Tensor, freqs_cis: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the pairs ``(2i, 2i + 1)`` of the last channels: (a, b) -> (a cos - b sin, a sin + b cos).

    Args:
        x: ``[T, ..., d]``; the first ``d - 2 n`` channels pass through.
        freqs_cis: complex64 ``[T, n]`` from `freqs_cis_at`.
        inverse: rotate by the negative angle.

    Returns:
        A new tensor of the same shape and dtype: float32 arithmetic, one rounding.
    """
    tokens, pairs = freqs_cis.shape
    freqs_cis = (freqs_cis.conj() if inverse else freqs_cis).view(tokens, *(1,) * (x.dim() - 2), pairs)
    out = x.clone()
    tail = out[..., x.shape[-1] - 2 * pairs :]
    # a copy even of contiguous float32: complex views need an even offset, and an odd nope width gives an odd one
    pairs32 = tail.to(torch.float32, copy=True, memory_format=torch.contiguous_format).unflatten(-1, (-1, 2))
    rotated = torch.view_as_complex(pairs32) * freqs_cis
    tail.copy_(torch.view_as_real(rotated).flatten(-2))
    return out


def apply_rope_half_split(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotates the pairs ``(i, i + n)`` of the *first* ``2 n`` channels, as the indexer of DeepSeek-V3.2 does.

    Arguments and result are those of `apply_rope`; the last ``d - 2 n`` channels pass through.
    """
    tokens, pairs = freqs_cis.shape
    freqs_cis = freqs_cis.view(tokens, *(1,) * (x.dim() - 2), pairs)
    out = x.clone()
    head = out[..., : 2 * pairs]
    rotated = torch.complex(*head.float().chunk(2, dim=-1)) * freqs_cis
    head.copy_(torch.cat([rotated.real, rotated.imag], dim=-1))
    return out
