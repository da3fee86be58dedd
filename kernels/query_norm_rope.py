"""Triton kernel of `reference.query_norm_rope`: one program normalises and rotates a few heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.row_ops import FLOATS, TRITON_DTYPES, normed_rows, rotated_rows, row_block

HEADS = 4  # heads of a program, one per warp: a head is summed alike in every batch


@triton.jit(do_not_specialize=["max_positions", "heads", "padded_heads"])
def _query_norm_rope_kernel(
    q_ptr,
    cos_sin_ptr,
    positions_ptr,
    out_ptr,
    eps,
    max_positions,
    heads,
    padded_heads,
    q_stride,
    out_stride_t,
    out_stride_h,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK)
    column = (channel < D)[None, :]
    position = tl.load(positions_ptr + t) + tl.zeros_like(head)
    row = q_ptr + t * q_stride + head * D
    x = tl.load(row[:, None] + channel[None, :], mask=column & (head < heads)[:, None], other=0).to(tl.float32)
    y = normed_rows(x, None, eps, D, BLOCK, DTYPE)
    y = rotated_rows(y, position, cos_sin_ptr, max_positions, D, ROPE, BLOCK, DTYPE)
    out = out_ptr + t * out_stride_t + head * out_stride_h
    tl.store(out[:, None] + channel[None, :], y.to(DTYPE), mask=column & (head < padded_heads)[:, None])


def query_norm_rope(
    q: Tensor,
    heads: int,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    padded_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Same as `reference.query_norm_rope`, for rows whose channels are contiguous and heads of an even width."""
    if q.dim() != 2 or heads < 1 or q.shape[1] % heads or padded_heads < heads:
        raise ValueError(
            f"need q [T, heads * d] and padded_heads >= heads >= 1, got {tuple(q.shape)}, {heads} heads, "
            f"{padded_heads} padded"
        )
    T, dim = q.shape[0], q.shape[1] // heads
    if q.dtype not in FLOATS or q.stride(1) != 1 or positions.shape != (T,):
        raise ValueError(
            f"q must be float32, bfloat16 or float16 with contiguous rows, and positions [{T}]: got {q.dtype}, strides "
            f"{q.stride()}, positions {tuple(positions.shape)}"
        )
    block = row_block(dim, cos_sin)
    shape = (T, padded_heads, dim)
    out = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
    if out.shape != shape or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(f"out must be {shape} {q.dtype} with contiguous channels, got {tuple(out.shape)} {out.dtype}")
    if T == 0:
        return out
    _query_norm_rope_kernel[(T, triton.cdiv(padded_heads, HEADS))](
        q,
        cos_sin,
        positions,
        out,
        eps,
        cos_sin.shape[0],
        heads,
        padded_heads,
        q.stride(0),
        out.stride(0),
        out.stride(1),
        D=dim,
        ROPE=cos_sin.shape[1],
        BLOCK=block,
        HEADS=HEADS,
        DTYPE=TRITON_DTYPES[q.dtype],
        num_warps=HEADS,
    )
    return out
