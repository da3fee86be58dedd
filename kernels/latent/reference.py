"""Plain torch of the ops of this family, and the checks that all implementations share."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at
from deepseek_attn.kernels.latent.types import WEIGHT_BLOCK, LatentQueries, LatentWeight, ProjectedValues


def dequantize_weight(weight: LatentWeight, dtype: torch.dtype) -> Tensor:
    """``[heads, rows, rank]`` of ``dtype``: float32 products of values and their blocks' scales, rounded once."""
    rows, scale = weight
    if scale is None:
        return rows
    scale = scale.repeat_interleave(WEIGHT_BLOCK, 1).repeat_interleave(WEIGHT_BLOCK, 2)
    return rows.float().mul_(scale).to(dtype)


def absorb_queries(queries: LatentQueries) -> Tensor:
    """See `kernels.latent.absorb_queries`."""
    check_queries(queries)
    heads, nope, _ = queries.weight.rows.shape
    q = apply_rope(queries.q.unflatten(-1, (heads, -1)), freqs_cis_at(queries.cos_sin, queries.positions))
    latent = torch.bmm(q[..., :nope].transpose(0, 1), dequantize_weight(queries.weight, q.dtype)).transpose(0, 1)
    rows = torch.cat([latent, q[..., nope:]], dim=-1)
    padding = queries.padded_heads - heads
    return torch.nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows


def project_values(latents: Tensor, weight: LatentWeight, pow2_scales: bool | None = None) -> ProjectedValues:
    """See `kernels.latent.project_values`; without quantised values."""
    check_latents(latents, weight)
    w = dequantize_weight(weight, latents.dtype)
    values = torch.bmm(latents[:, : len(w)].transpose(0, 1), w.transpose(1, 2))
    return ProjectedValues(values.transpose(0, 1).flatten(1), None)


def check_queries(queries: LatentQueries) -> None:
    """Raises ValueError unless queries, weight, table and positions fit together."""
    q, weight, cos_sin, positions, padded_heads = queries
    _check_weight("[heads, nope, rank] in the dtype of q", weight, q)
    (heads, nope, _), rope = weight.rows.shape, cos_sin.shape[1]
    check("q", q, ("T", heads * (nope + rope)), FLOATS, rows=True)
    if padded_heads < heads or rope % 2:
        raise ValueError(
            f"need padded_heads >= {heads} and an even number of rotated channels, got {padded_heads} and {rope}"
        )
    check("positions", positions, (len(q),))
    check("cos_sin", cos_sin, ("positions", rope), torch.float32, contiguous=True)


def check_latents(latents: Tensor, weight: LatentWeight) -> None:
    """Raises ValueError unless latents have the heads and channels of the weight."""
    _check_weight("[heads, v_head_dim, rank] in the dtype of the latents", weight, latents)
    heads, _, rank = weight.rows.shape
    check("latents", latents, ("T", f"at least {heads}", rank), FLOATS, rows=True)
    if latents.shape[1] < heads:
        raise ValueError(f"latents must have at least {heads} heads, got {list(latents.shape)}")


def _check_weight(expected: str, weight: LatentWeight, x: Tensor) -> None:
    rows, scale = weight
    if rows.dim() != 3 or not x.is_floating_point() or (scale is None and rows.dtype != x.dtype):
        raise ValueError(
            f"weight must be {expected}, or FP8 with block scales, got {tuple(rows.shape)} {rows.dtype} for {x.dtype}"
        )
    if scale is None:
        return
    heads, height, rank = rows.shape
    grid = (heads, height // WEIGHT_BLOCK, rank // WEIGHT_BLOCK)
    fits = not height % WEIGHT_BLOCK and not rank % WEIGHT_BLOCK and scale.shape == grid
    if not fits or rows.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        raise ValueError(
            f"an FP8 weight is float8_e4m3fn with rows and rank multiples of {WEIGHT_BLOCK} and a float32 scale per "
            f"{WEIGHT_BLOCK} x {WEIGHT_BLOCK} of a head, got {tuple(rows.shape)} {rows.dtype} and {tuple(scale.shape)} "
            f"{scale.dtype}; dequantise it"
        )
