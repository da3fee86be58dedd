"""Everything that a step's tokens add to a layer: the token side of attention and its compressors.

The token side of an attention layer: norms of the query latent and of the key, whose rotated row is also cached.

Queries of an attention layer: a norm without weight per head, then the rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at, rms_norm
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.insert.compress_reference import CompressBatch, CompressPart, compress_and_insert
from deepseek_attn.kernels.linear.reference import quantize_input


def insert_tokens(
    rows: tuple,
    parts: Sequence[CompressPart],
    batch: CompressBatch | None,
    qr_fp8: QuantizedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """`norm_rope_insert` and `compress_and_insert` of a layer.

    Args:
        rows: the arguments of `norm_rope_insert`.
        parts, batch: those of `compress_and_insert`; no parts for layers with the window only.
        qr_fp8: that of `norm_rope_insert`.

    Returns:
        What `norm_rope_insert` does.
    """
    outs = norm_rope_insert(*rows, qr_fp8=qr_fp8)
    if parts:
        compress_and_insert(parts, batch)
    return outs


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
    qr_fp8: QuantizedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises ``qr`` and ``kv``, rotates ``kv`` and stores it.

    Args:
        qr: ``[T, q_lora]``; kv: ``[T, d]``; float32, bfloat16 or float16.
        q_weight, kv_weight: float32 norm weights ``[q_lora]`` and ``[d]``; eps: of both norms.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: int64 ``[T]``.
        record, pool, page_entries: byte layout, uint8 ``[pages, page bytes]`` and entries per page of the cache.
        slots: int64 ``[T]`` where a row of ``kv`` is stored; -1 for rows that are padding, which store nothing.
        qr_out, kv_out: where to write the results.
        qr_fp8: also receives the normalised ``qr``, quantised as `kernels.linear.quantize_input` does.

    Returns:
        ``(qr_out, kv_out)``, like ``qr`` and ``kv``. Values are rounded to the dtype after the norm, and the rotated
        ones again after the rotation; what is stored is ``record.encode`` of the rounded row.
    """
    qr_normed = rms_norm(qr, eps, q_weight)
    kv_rotated = apply_rope(rms_norm(kv, eps, kv_weight), freqs_cis_at(cos_sin, positions))
    record.insert(pool, page_entries, slots, kv_rotated)
    qr_out = qr_normed if qr_out is None else qr_out.copy_(qr_normed)
    kv_out = kv_rotated if kv_out is None else kv_out.copy_(kv_rotated)
    if qr_fp8 is not None:
        latent = quantize_input(qr_normed, qr_fp8.pow2_scales)
        qr_fp8.values.copy_(latent.values)
        qr_fp8.scale.copy_(latent.scale)
    return qr_out, kv_out


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
    rows = apply_rope(rms_norm(q.unflatten(-1, (heads, -1)), eps), freqs_cis_at(cos_sin, positions))
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padded_heads - heads)) if padded_heads > heads else rows
    return rows if out is None else out.copy_(rows)
