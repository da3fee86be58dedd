"""Everything that a step's tokens add to a layer: the token side of attention and its compressors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepseek_attn.kernels.reference.compress import CompressBatch, CompressPart, compress_and_insert
from deepseek_attn.kernels.reference.norm_rope_insert import norm_rope_insert


def insert_tokens(
    rows: tuple,
    parts: Sequence[CompressPart],
    batch: CompressBatch | None,
    qr_rounded: tuple[Tensor, Tensor, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """`norm_rope_insert` and `compress_and_insert` of a layer.

    Args:
        rows: the arguments of `norm_rope_insert`.
        parts, batch: those of `compress_and_insert`; no parts for layers with the window only.
        qr_rounded: that of `norm_rope_insert`.

    Returns:
        What `norm_rope_insert` does.
    """
    outs = norm_rope_insert(*rows, qr_rounded=qr_rounded)
    if parts:
        compress_and_insert(parts, batch)
    return outs
