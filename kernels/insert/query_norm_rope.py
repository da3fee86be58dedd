"""Triton kernel of `reference.query_norm_rope`: one program normalises and rotates a few heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, supports_pdl
from deepseek_attn.kernels.common.row_ops import begin, normed_rows, rotated_rows, row_block, row_cos_sin
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES

HEADS = 4  # heads of a program, one per warp: a head is summed alike in every batch


@triton.jit
def norm_heads(t, block, rows, SHAPE: tl.constexpr):
    """Norm and rotation of one block of heads of token ``t``; arguments are those of `head_launch`."""
    D: tl.constexpr = SHAPE[0]
    ROPE: tl.constexpr = SHAPE[1]
    BLOCK: tl.constexpr = SHAPE[2]
    HEADS: tl.constexpr = SHAPE[3]
    DTYPE: tl.constexpr = SHAPE[4]
    head = block * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK)
    column = (channel < D)[None, :]
    position = tl.load(rows[2] + t) + tl.zeros_like(head)
    freqs_cis = row_cos_sin(position, rows[1], rows[5], D, ROPE, BLOCK)
    row = rows[0] + t * rows[8] + head * D
    x = tl.load(row[:, None] + channel[None, :], mask=column & (head < rows[6])[:, None], other=0).to(tl.float32)
    y = rotated_rows(normed_rows(x, None, rows[4], D, DTYPE), freqs_cis, D, ROPE, DTYPE)
    out = rows[3] + t * rows[9] + head * rows[10]
    tl.store(out[:, None] + channel[None, :], y.to(DTYPE), mask=column & (head < rows[7])[:, None])


@triton.jit
def _query_norm_rope_kernel(rows, SHAPE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    norm_heads(tl.program_id(0).to(tl.int64), tl.program_id(1), rows, SHAPE)


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
    rows, shape, out, blocks = head_launch(q, heads, eps, cos_sin, positions, padded_heads, out)
    if len(q):
        early = supports_pdl(q.device)
        _query_norm_rope_kernel[(len(q), blocks)](rows, SHAPE=shape, PDL=early, num_warps=HEADS, launch_pdl=early)
    return out


def head_launch(
    q: Tensor,
    heads: int,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    padded_heads: int,
    out: Tensor | None = None,
) -> tuple[tuple, tuple, Tensor, int]:
    """Arguments ``rows`` and constant ``SHAPE`` of `norm_heads`, the output, and blocks of heads of a token.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
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
    sizes = cos_sin.shape[0], heads, padded_heads
    rows = (q, cos_sin, positions, out, eps, *sizes, q.stride(0), out.stride(0), out.stride(1))
    return rows, (dim, cos_sin.shape[1], block, HEADS, TRITON_DTYPES[q.dtype]), out, triton.cdiv(padded_heads, HEADS)
