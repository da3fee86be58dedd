"""Rotary position embedding of DeepSeek-V4: interleaved pairs on the last dims, one table per layer kind.

Layers without compression use ``rope_theta`` and no YaRN; layers with a compressor use ``compress_rope_theta`` with
YaRN for everything they rotate (queries, window keys, compressed entries, indexer). YaRN is always on, whatever the
length, and scales neither cos nor sin (there is no mscale in V4).
"""

from __future__ import annotations

import math

import torch

from deepseek_attn.config import RopeSpec


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Angle per position of each pair: float32 ``[dim / 2]``, with YaRN's interpolation if the spec has a factor."""
    freqs = 1.0 / (spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim))
    if not spec.yarn:
        return freqs

    def correction(rotations: float) -> float:
        turns = spec.original_max_position_embeddings / (rotations * 2 * math.pi)
        return spec.dim * math.log(turns) / (2 * math.log(spec.theta))

    low = max(math.floor(correction(spec.beta_fast)), 0)
    high = min(math.ceil(correction(spec.beta_slow)), spec.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return freqs / spec.factor * ramp + freqs * (1 - ramp)


class RotaryTable:
    """Cosines and sines of every position up to ``max_positions``.

    Attributes:
        cos_sin: float32 ``[max_positions, dim]``, the first half cosines, the second half sines.
    """

    def __init__(self, spec: RopeSpec, max_positions: int, device: torch.device | str = "cpu"):
        self.spec = spec
        # Computed on the CPU whatever the device: the table is then the same bits everywhere.
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(spec))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Rotates the last ``dim`` channels of ``x [T, ..., d]`` at ``positions [T]``; the others pass through.

        Float32 arithmetic, one rounding to ``x.dtype``. ``inverse`` rotates by the negative angle.
        """
        dim = self.spec.dim
        cos, sin = self.cos_sin[positions].chunk(2, dim=-1)
        shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (dim // 2,)
        return apply_rope(x, cos.view(shape), -sin.view(shape) if inverse else sin.view(shape))


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs ``(2i, 2i + 1)`` of the last ``2 * cos.shape[-1]`` channels: (a, b) -> (ac - bs, as + bc)."""
    dim = 2 * cos.shape[-1]
    tail = x[..., x.shape[-1] - dim :].float().unflatten(-1, (-1, 2))
    a, b = tail[..., 0], tail[..., 1]
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
    return torch.cat([x[..., : x.shape[-1] - dim], rotated], dim=-1)
