"""Projected queries, which several families of kernels norm and rotate."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at, rms_norm, rotate_


class RawQueries(NamedTuple):
    """Projected queries of a step's tokens.

    Attributes:
        q: ``[T, num_heads * d]`` float32, bfloat16 or float16 with contiguous rows, ``d`` even.
        num_heads: heads in ``q``.
        eps: of the norm.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: int64 ``[T]``.
        padded_heads: heads of the result, at least ``num_heads``.
        norm: norm the heads before they are rotated; V4.1 does not.
    """

    q: Tensor
    num_heads: int
    eps: float
    cos_sin: Tensor
    positions: Tensor
    padded_heads: int
    norm: bool = True


def normed_queries(raw_q: RawQueries) -> Tensor:
    """Heads ``[T, num_heads, d]``, normed and rotated in plain torch, without padding.

    Raises:
        ValueError: as in `check_raw_queries`.
    """
    check_raw_queries(raw_q)
    q = raw_q.q.view(len(raw_q.q), raw_q.num_heads, raw_q.q.shape[1] // raw_q.num_heads)
    freqs_cis = freqs_cis_at(raw_q.cos_sin, raw_q.positions)
    return rotate_(rms_norm(q, raw_q.eps), freqs_cis) if raw_q.norm else apply_rope(q, freqs_cis)


def check_raw_queries(raw_q: RawQueries) -> None:
    """Raises ValueError unless ``q`` has ``num_heads`` heads, at most ``padded_heads``, and a position for each row."""
    q, count, padded = raw_q.q, raw_q.num_heads, raw_q.padded_heads
    check("q", q, ("T", "heads * d"), FLOATS, rows=True)
    check("positions", raw_q.positions, (len(q),))
    if count < 1 or q.shape[1] % count or padded < count:
        shown = f"{tuple(q.shape)}, {count} heads, {padded} padded"
        raise ValueError(f"need q [T, heads * d] and padded_heads >= heads >= 1, got {shown}")
