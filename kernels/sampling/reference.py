"""Greedy tokens in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

INVALID_TOKEN = -1  # in place of a token where a row of logits is broken


def greedy_tokens(logits: Tensor) -> Tensor:
    """See `deepseek_attn.kernels.sampling.greedy_tokens`."""
    peak, token = logits.max(dim=-1)  # NaN if any is NaN
    return torch.where(peak.isfinite(), token, INVALID_TOKEN)
