"""Launch of `kernels.insert.query_norm_rope` in Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.device import supports_pdl
from deepseek_attn.kernels.common.heads import QueryHeads, check_projected
from deepseek_attn.kernels.common.row_ops import row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.insert.norm_rope_triton import HeadArguments, HeadShape, query_norm_rope_kernel

HEADS = 4  # heads of a program, one per warp: the sum over a head is the same in every batch


class HeadLaunch(NamedTuple):
    """Arguments and constants of `norm_heads`, the output it writes, and blocks of heads per token."""

    rows: HeadArguments
    shape: HeadShape
    out: Tensor
    blocks: int


def query_norm_rope(heads: QueryHeads) -> Tensor:
    """See `kernels.insert.query_norm_rope`."""
    launch, num_tokens = head_launch(heads), len(heads.q)
    if num_tokens:
        early = supports_pdl(heads.q.device)
        query_norm_rope_kernel[(num_tokens, launch.blocks)](
            launch.rows, SHAPE=launch.shape, PDL=early, enable_fp_fusion=True, num_warps=HEADS, launch_pdl=early
        )
    return launch.out


def head_launch(heads: QueryHeads) -> HeadLaunch:
    """Checks the tensors and allocates the output if it is not given.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
    check_projected(heads)
    q, cos_sin, positions = heads.q, heads.cos_sin, heads.positions
    T, dim = q.shape[0], q.shape[1] // heads.num_heads
    block = row_block(dim, cos_sin)
    shape = (T, heads.padded_heads, dim)
    out = torch.empty(shape, dtype=q.dtype, device=q.device) if heads.out is None else heads.out
    if out.shape != shape or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(f"out must be {shape} {q.dtype} with contiguous channels, got {tuple(out.shape)} {out.dtype}")
    rows = HeadArguments(
        q, cos_sin, positions, out, heads.eps, cos_sin.shape[0], heads.num_heads, heads.padded_heads,
        q.stride(0), out.stride(0), out.stride(1),
    )  # fmt: skip
    constants = HeadShape(dim, cos_sin.shape[1], block, HEADS, TRITON_DTYPES[q.dtype], heads.norm)
    return HeadLaunch(rows, constants, out, triton.cdiv(heads.padded_heads, HEADS))
