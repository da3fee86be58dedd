"""Rotary position embedding: one table per layer kind; interleaved pairs on the last dims.

DeepSeek-V4: layers without compression use ``rope_theta`` and no YaRN; layers with a compressor use
``compress_rope_theta`` with YaRN for everything they rotate (queries, window keys, compressed entries, indexer).
DeepSeek-V3.2 has one table, and its indexer alone pairs channels differently: half-split, on the first dims. YaRN is
always on, whatever the length, and scales neither cos nor sin (V3's mscale is part of the softmax scale).
"""

from __future__ import annotations

import math

import torch

from deepseek_attn.config.model import RopeSpec
from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Angle per position of each pair: float32 ``[dim / 2]``, with YaRN's interpolation if the spec has a factor."""
    freqs = 1.0 / (spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32, device="cpu") / spec.dim))
    if not spec.yarn:
        return freqs

    def correction(rotations: float) -> float:
        """Index, not rounded, of the pair that makes ``rotations`` over the original context."""
        inverse_frequency = spec.original_max_position_embeddings / (rotations * 2 * math.pi)
        return spec.dim * math.log(inverse_frequency) / (2 * math.log(spec.theta))

    low = max(math.floor(correction(spec.beta_fast)), 0)
    high = min(math.ceil(correction(spec.beta_slow)), spec.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return freqs / spec.factor * ramp + freqs * (1 - ramp)


class RotaryTable:
    """Cosines and sines of every position up to ``max_positions``.

    Attributes:
        cos_sin: float32 ``[max_positions, dim]``, the first half cosines, the second half sines.
    """

    def __init__(self, spec: RopeSpec, max_positions: int, device: torch.device | str = "cpu"):
        self.spec = spec
        # Computed on the CPU whatever the device: the table is then the same bits everywhere.
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device="cpu"), inverse_frequencies(spec))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """``cos + i sin`` at ``positions [T]``: complex64 ``[T, dim / 2]``."""
        return freqs_cis_at(self.cos_sin, positions)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Rotates ``x [T, ..., d]`` at ``positions [T]``; see `apply_rope`."""
        return apply_rope(x, self.at(positions), inverse)
