"""Scores of the lightning indexer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.reference.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.reference.index_query import even_odd

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


@torch.no_grad()
def paged_index_scores(
    q: Tensor,
    weights: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    block_table: Tensor,
    token_to_req: Tensor,
    visible: Tensor,
    width: int | None = None,
    skip: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`index_scores` of each query and the first entries of its request, read from pages.

    Args:
        q: ``[T, heads, dim]`` as ``index_query`` makes them; weights: float32 ``[T, heads]``, every scale of q in them.
        record, pool, page_entries: the keys: entry format, uint8 ``[pages, bytes]``, entries per page.
        block_table: int32 ``[B, P]``; token_to_req: ``[T]``, a query's row of it.
        visible: ``[T]``, the entries that a query sees.
        width: columns of the result, by default ``P * page_entries``.
        skip: rows that see this many entries or fewer need no scores, as when a selection takes all of them anyway.
        out: like the result, to write to.

    Returns:
        float32 ``[T, width]``. Columns from ``visible[t]`` on, and all of a row without scores, are -inf.
    """
    width = block_table.shape[1] * page_entries if width is None else width
    out = torch.empty(q.shape[0], width, dtype=torch.float32, device=q.device) if out is None else out
    out.fill_(float("-inf"))
    lens = visible.clamp(max=width)
    lens = torch.where(lens > skip, lens, 0).tolist()
    for t, (request, n) in enumerate(zip(token_to_req.tolist(), lens, strict=True)):
        entries = torch.arange(n, device=q.device)
        slots = block_table[request].long()[entries // page_entries] * page_entries + entries % page_entries
        keys = record.gather(pool, page_entries, slots, torch.float32)
        keys = even_odd(keys) if record.name == "index_fp4" else keys
        out[t, :n] = index_scores(q[t : t + 1].float(), keys, weights[t : t + 1])[0]
    return out
