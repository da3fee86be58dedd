"""Launches of greedy tokens, and of drafts that are equal to them, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import check, contiguous_rows
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.plans import RowsProblem, cdiv, launch_options, next_power_of_2
from deepseek_attn.kernels.sampling.plan import GREEDY
from deepseek_attn.kernels.sampling.reference import INVALID_TOKEN
from deepseek_attn.kernels.sampling.sampling_triton import accept_drafts_kernel, greedy_block_kernel, greedy_row_kernel
from deepseek_attn.kernels.sampling.types import AcceptedDrafts


def greedy_tokens(logits: Tensor, invalid_token: int = INVALID_TOKEN) -> Tensor:
    """See `deepseek_attn.kernels.sampling.greedy_tokens`."""
    check("logits", logits, ("T", "vocab"), torch.float32)
    if not logits.shape[1]:
        raise ValueError(f"logits must have a vocabulary, got {list(logits.shape)}")
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    (rows, vocab), device, logits = logits.shape, logits.device, contiguous_rows(logits)
    if not rows:
        return tokens
    block, warps = GREEDY.plan(RowsProblem(rows, vocab), gpu(device)).config
    blocks = cdiv(vocab, block)
    peaks = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    columns = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    greedy_block_kernel[(blocks, rows)](
        logits, peaks, columns, logits.stride(0), vocab, BLOCK=block, **launch_options(warps)
    )
    width = next_power_of_2(blocks)
    greedy_row_kernel[(rows,)](peaks, columns, tokens, blocks, NONE=invalid_token, WIDTH=width, **launch_options(4))
    return tokens


def accept_drafts(token_ids: Tensor, chosen: Tensor, starts: Tensor, ends: Tensor, verify: bool) -> AcceptedDrafts:
    """See `deepseek_attn.kernels.sampling.accept_drafts`."""
    requests = len(starts)
    out = AcceptedDrafts(*(torch.empty_like(starts) for _ in range(3)))
    if requests:
        arguments, rows = (token_ids, chosen, starts, ends, out), len(chosen) // requests
        accept_drafts_kernel[(requests,)](*arguments, ROWS=rows, VERIFY=verify, **launch_options(1))
    return out
