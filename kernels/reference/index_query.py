"""Queries of the lightning indexer as the scores take them: rotated, rounded, and every scale in the head weights."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.reference.norm_rope import apply_rope, turns_at
from deepseek_attn.kernels.reference.quant import dequantize_fp4, hadamard, quantize_fp4, quantize_fp8

FORMATS = ("plain", "fp8", "fp4")


@torch.no_grad()
def index_query(
    q: Tensor,
    weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    scale: float,
    fmt: str,
    rotate: bool = False,
    half_split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates indexer queries, rounds them as the keys are rounded and moves their scales to the head weights.

    Args:
        q: ``[T, heads * dim]``, the projected queries; weights: float32 ``[T, heads]``, the projected head weights.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: ``[T]``.
        scale: multiplies the weights.
        fmt: format of the keys: ``"plain"`` (queries keep their dtype), ``"fp8"`` (one power-of-two scale per head) or
            ``"fp4"`` (e2m1 values with a scale per 32).
        rotate: apply a Hadamard matrix before rounding.
        half_split: rotary pairs are ``(i, i + rope_dim / 2)`` of the first channels, as DeepSeek-V3.2 has them;
            otherwise ``(2 i, 2 i + 1)`` of the last ones.

    Returns:
        ``(q, weights)``: ``[T, heads, dim]``, float8_e4m3fn unless ``fmt`` is plain, and float32 ``[T, heads]``.

    Notes:
        FP4 values are held in e4m3 too, relative to the largest scale of their head, times 64. That is exact where the
        scales of a head differ by up to ``2**14``. Their even channels come first, then the odd ones, as the bytes of
        FP4 keys hold one of each.
    """
    if fmt not in FORMATS:
        raise ValueError(f"index keys are {', '.join(FORMATS)}, got {fmt!r}")
    T, heads = weights.shape
    turns = turns_at(cos_sin, positions)
    q = q.view(T, heads, -1)
    q = apply_rope_half_split(q, turns) if half_split else apply_rope(q, turns)
    if rotate:
        q = hadamard(q)
    weights = weights.float() * scale
    if fmt == "plain":
        return q, weights
    if fmt == "fp8":
        q, factor = quantize_fp8(q, q.shape[2])
        return q, weights * factor[..., 0]
    return _fp4_in_fp8(q, weights)


def apply_rope_half_split(x: Tensor, turns: Tensor) -> Tensor:
    """Rotates the pairs ``(i, i + n)`` of the first ``2 n`` channels: what the indexer of DeepSeek-V3.2 does.

    Args and result as in `norm_rope.apply_rope`; here the last ``d - 2 n`` channels pass through.
    """
    tokens, pairs = turns.shape
    turns = turns.view(tokens, *(1,) * (x.dim() - 2), pairs)
    out = x.clone()
    head = out[..., : 2 * pairs]
    rotated = torch.complex(*head.float().chunk(2, dim=-1)) * turns
    head.copy_(torch.cat([rotated.real, rotated.imag], dim=-1))
    return out


def _fp4_in_fp8(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale = quantize_fp4(q)
    largest = scale.amax(-1, keepdim=True)
    values = dequantize_fp4(packed, scale / largest * 64)
    return even_odd(values).to(torch.float8_e4m3fn), weights * (largest[..., 0] / 64)


def even_odd(x: Tensor) -> Tensor:
    """The even channels of ``[..., d]``, then the odd ones."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
