"""Greedy tokens and right drafts in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.sampling.types import AcceptedDrafts

INVALID_TOKEN = -1  # replaces a token if its row of logits is broken


def greedy_tokens(logits: Tensor, invalid_token: int = INVALID_TOKEN) -> Tensor:
    """See `deepseek_attn.kernels.sampling.greedy_tokens`."""
    peak, token = logits.max(dim=-1)  # NaN if any is NaN
    return torch.where(peak.isfinite(), token, invalid_token)


def accept_drafts(token_ids: Tensor, chosen: Tensor, starts: Tensor, ends: Tensor, verify: bool) -> AcceptedDrafts:
    """See `deepseek_attn.kernels.sampling.accept_drafts`."""
    requests = len(starts)
    token_ids, tokens = token_ids.view(requests, -1), chosen.view(requests, -1)
    rows = tokens.shape[1]
    last = (ends - starts - 1).clamp(0, rows - 1)
    if verify:
        draft = torch.arange(rows - 1, device=starts.device)
        right = (token_ids[:, 1:] == tokens[:, :-1]) & (draft < last[:, None])
        last = right.long().cumprod(1).sum(1)
    next_ids = tokens.gather(1, last[:, None])[:, 0].clamp(min=0)  # INVALID_TOKEN has no embedding
    first_rows = torch.arange(0, len(chosen), rows, device=starts.device)
    return AcceptedDrafts(first_rows + last, next_ids, starts + last + 1)
