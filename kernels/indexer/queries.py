"""Triton kernel of `reference.queries`: queries of the layer and of its indexer in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import supports_pdl
from deepseek_attn.kernels.common.row_ops import begin
from deepseek_attn.kernels.indexer.index_query import WARPS, index_heads, index_launch
from deepseek_attn.kernels.insert.query_norm_rope import HEADS, head_launch, norm_heads

assert HEADS == WARPS  # of a program, whichever heads it has


@triton.jit
def _queries_kernel(rows, index_rows, blocks, SHAPE: tl.constexpr, INDEX_SHAPE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < blocks:
        norm_heads(t, block, rows, SHAPE)
    else:
        index_heads(t, block - blocks, index_rows, INDEX_SHAPE)


def queries(heads: tuple, index: tuple) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Same as `reference.queries`, for what `query_norm_rope` and `index_query` take."""
    rows, shape, out, blocks = head_launch(*heads)
    index_rows, index_shape, index_outs, index_blocks = index_launch(*index)
    tokens, early = len(out), supports_pdl(out.device)
    if len(index_outs[0]) != tokens:
        raise ValueError(f"queries of {tokens} tokens, and of {len(index_outs[0])} for the indexer: must be the same")
    if tokens:
        _queries_kernel[(tokens, blocks + index_blocks)](
            rows, index_rows, blocks, SHAPE=shape, INDEX_SHAPE=index_shape, PDL=early, num_warps=WARPS, launch_pdl=early
        )
    return out, index_outs
