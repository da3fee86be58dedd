"""The token side of an attention layer: norms of the query latent and of the key, whose rotated row is also cached."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepseek_attn.kernels.reference.linear import quantize_input
from deepseek_attn.kernels.reference.norm_rope import apply_rope, rms_norm, turns_at


def norm_rope_insert(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    slots: Tensor,
    qr_out: Tensor | None = None,
    kv_out: Tensor | None = None,
    qr_rounded: tuple[Tensor, Tensor, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises ``qr`` and ``kv``, rotates ``kv`` and stores it.

    Args:
        qr: ``[T, q_lora]``; kv: ``[T, d]``; float32, bfloat16 or float16.
        q_weight, kv_weight: float32 norm weights ``[q_lora]`` and ``[d]``; eps: of both norms.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: int64 ``[T]``.
        record, pool, page_entries: byte layout, uint8 ``[pages, page bytes]`` and entries per page of the cache.
        slots: int64 ``[T]`` where a row of ``kv`` is stored; -1 for rows that are padding, which store nothing.
        qr_out, kv_out: where to write the results.
        qr_rounded: where to write the first once more, rounded as `reference.linear.quantize_input` does: FP8
            ``[T, q_lora]`` and scales ``[T, q_lora / 128]`` with stride 1 along the rows; and whether these are powers
            of two.

    Returns:
        ``(qr_out, kv_out)``, like ``qr`` and ``kv``. Values are rounded to the dtype after the norm, and the rotated
        ones again after the rotation; what is stored is ``record.encode`` of the rounded row.
    """
    qr_normed = rms_norm(qr, eps, q_weight)
    kv_rotated = apply_rope(rms_norm(kv, eps, kv_weight), turns_at(cos_sin, positions))
    record.insert(pool, page_entries, slots, kv_rotated)
    qr_out = qr_normed if qr_out is None else qr_out.copy_(qr_normed)
    kv_out = kv_rotated if kv_out is None else kv_out.copy_(kv_rotated)
    if qr_rounded is not None:
        q, scale, pow2 = qr_rounded
        for target, value in zip((q, scale), quantize_input(qr_normed, pow2), strict=True):
            target.copy_(value)
    return qr_out, kv_out
