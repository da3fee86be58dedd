"""Launches the Hopper kernel of attention over rows: when it takes the arguments of `sparse_attention`, and how."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.attention.attend_rows_hopper import attend_rows_hopper_kernel
from deepseek_attn.kernels.common.device import LOG2E

MIN_HEADS = 17
"""A program computes 64 heads, however few there are."""


def fits_hopper(q: Tensor, kv: Tensor, indices: Tensor, d_v: int, capability: tuple[int, int], processors: int) -> bool:
    """Whether the kernel takes these arguments of `sparse_attention` and is the faster one.

    It needs Hopper's instructions, 16-bit rows of the queries' dtype that the compiler knows to be aligned, and as many
    queries as fill the GPU: it does not share a query's keys among programs.
    """
    T, H, dim = q.shape
    items = T * -(-H // 64)
    return (
        capability == (9, 0)
        and H >= MIN_HEADS
        and items >= processors // 2
        and q.dtype == kv.dtype
        and q.element_size() == 2
        and d_v == dim
        and dim in (128, 256, 512)
        and kv.numel() > 0
        and indices.shape[1] > 0
        and _aligned(q, q.stride(0), q.stride(1))
        and q.stride(2) == 1
        and _aligned(kv, kv.stride(0))
    )


def attend_rows_hopper(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    sink: Tensor | None,
    lens: Tensor | None,
    out: Tensor,
    processors: int,
) -> Tensor:
    """`sparse_attention` into ``out``, for arguments that `fits_hopper`; returns the log-sum-exp."""
    T, H, dim = q.shape
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    items = T * -(-H // 64)
    attend_rows_hopper_kernel[(min(items, processors),)](
        q,
        kv,
        indices,
        indices if lens is None else lens,
        lse if sink is None else sink,
        out,
        lse,
        H,
        items,
        scale * LOG2E,
        indices.shape[1],
        kv.shape[0],
        kv.stride(0),
        indices.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        DIM=dim,
        HAS_LENS=lens is not None,
        HAS_SINK=sink is not None,
        num_warps=8,
    )
    return lse


def _aligned(rows: Tensor, *strides: int) -> bool:
    """Whether the compiler sees that rows can be copied 16 bytes at a time."""
    return rows.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides)
