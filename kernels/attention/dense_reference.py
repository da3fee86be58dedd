"""Causal attention of one request over all of its keys; keys are also the values."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block


@torch.no_grad()
def causal_attention(q: Tensor, kv: Tensor, scale: float, d_v: int | None = None) -> Tensor:
    """``softmax(scale * q . k) v`` where the queries are the last tokens of the request, in float32.

    Args:
        q: ``[n, H, dk]`` of positions ``N - n .. N - 1``.
        kv: ``[N, dk]`` keys of positions ``0 .. N - 1``; the first ``d_v`` dims are the values.
        scale: factor of the logits.
        d_v: value dims, or None for ``dk``.

    Returns:
        ``[n, H, d_v]`` in ``q.dtype``.

    Notes:
        Scratch stays within ``blocks.SCRATCH_BYTES`` as long as the logits of one query and the float32 keys do.
    """
    n, heads, dim = q.shape
    if kv.dim() != 2 or kv.shape[1] != dim or kv.shape[0] < n:
        raise ValueError(f"kv must be [N >= {n}, {dim}] for q {tuple(q.shape)}, got {tuple(kv.shape)}")
    d_v = dim if d_v is None else d_v
    out = q.new_empty(n, heads, d_v)
    keys, first = kv.float(), len(kv) - n
    column = torch.arange(len(kv), device=q.device)
    for start, end in row_blocks(n, rows_per_block(8 * heads * len(kv))):
        seen = first + end
        logits = (q[start:end].float().flatten(0, 1) @ keys[:seen].t()).mul_(scale).view(end - start, heads, seen)
        hidden = column[:seen] > (first + torch.arange(start, end, device=q.device)).unsqueeze(1)
        weights = logits.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1)
        out[start:end] = (weights.flatten(0, 1) @ keys[:seen, :d_v]).view(end - start, heads, d_v).to(q.dtype)
    return out
