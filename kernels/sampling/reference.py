"""The greedy choice: the first of the largest logits of each row."""

from __future__ import annotations

import torch
from torch import Tensor

INVALID_TOKEN = -1  # in place of a token where logits are broken


def greedy_tokens(logits: Tensor) -> Tensor:
    """int64 ``[T]``: the first of the largest of each row of ``logits``, float32 ``[T, vocab]``.

    `INVALID_TOKEN` where a row holds NaN or +inf, or nothing but -inf.
    """
    peak, token = logits.max(dim=-1)  # NaN if any is NaN
    return torch.where(peak.isfinite(), token, INVALID_TOKEN)
