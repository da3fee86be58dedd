"""Scores of the lightning indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.reference.blocks import row_blocks, rows_per_block

GEMM_BYTES = 16 << 20
KEYS_PER_BLOCK = 4096


@torch.no_grad()
def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Returns ``sum_h weights[t, h] * relu(q[t, h] . k[n])``, computed in float32.

    Args:
        q: ``[T, heads, dim]`` indexer queries, any float dtype.
        k: ``[N, dim]`` indexer keys, shared by the heads.
        weights: ``[T, heads]`` head weights with every scale already in them.

    Returns:
        float32 ``[T, N]``; no column is masked.

    Notes:
        One matrix product per block of rows and keys; scratch is about ``GEMM_BYTES``, and one row of
        ``KEYS_PER_BLOCK`` keys at least.
    """
    if q.dim() != 3 or k.dim() != 2 or k.shape[1] != q.shape[2] or weights.shape != q.shape[:2]:
        raise ValueError(
            "need q [T, heads, dim], k [N, dim], weights [T, heads]: "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(weights.shape)}"
        )
    T, heads, dim = q.shape
    out = torch.zeros(T, k.shape[0], dtype=torch.float32, device=q.device)
    if heads == 0 or T == 0:
        return out
    for left, right in row_blocks(k.shape[0], KEYS_PER_BLOCK):
        keys = k[left:right].float().t()
        for start, end in row_blocks(T, rows_per_block(4 * heads * (right - left + dim), GEMM_BYTES)):
            products = (q[start:end].float().reshape(-1, dim) @ keys).relu_().view(end - start, heads, right - left)
            out[start:end, left:right] = torch.bmm(weights[start:end, None].float(), products)[:, 0]
    return out
