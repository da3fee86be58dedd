"""Launches of `kernels.latent.absorb_queries` in Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.invariance import planned_rows
from deepseek_attn.kernels.common.row_ops import row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.latent.absorb_triton import (
    AbsorbArguments,
    AbsorbShape,
    absorb_queries_kernel,
    rotate_queries_kernel,
)
from deepseek_attn.kernels.latent.reference import check_queries
from deepseek_attn.kernels.latent.types import WEIGHT_BLOCK, LatentQueries
from deepseek_attn.kernels.latent.weights import (
    dequantize_weight,
    fits_one_launch,
    multiply_heads,
    scale_constants,
    stored_rows,
)

MAX_NOPE = 256
"""Channels without rotation that a program multiplies at once."""


# the fastest measured on an H200: all weights of a multiprocessor are in flight at once
BLOCK_RANK = WEIGHT_BLOCK  # latent channels of a program: a tile of an FP8 weight has one scale
NUM_WARPS = 4  # eight would be 1 % faster at 32 tokens, but a launch with the indexer's heads needs four


class AbsorbLaunch(NamedTuple):
    """What launches need: arguments and constants of `absorb_triton`, and the result.

    Attributes:
        programs, token_blocks: grid of `absorb_queries_kernel`.
        few: that kernel computes everything; otherwise cuBLAS multiplies.
    """

    rows: AbsorbArguments
    shape: AbsorbShape
    out: Tensor
    programs: int
    token_blocks: int
    few: bool


def absorb_queries(queries: LatentQueries) -> Tensor:
    """See `kernels.latent.absorb_queries`."""
    rows, shape, out, programs, token_blocks, few = absorb_launch(queries)
    if not out.numel():
        return out
    pdl = supports_pdl(out.device)
    if few:
        absorb_queries_kernel[(programs, token_blocks)](
            rows, SHAPE=shape, PDL=pdl, enable_fp_fusion=True, num_warps=NUM_WARPS, launch_pdl=pdl
        )
        return out
    # cuBLAS writes into the rows of the result, and the rotation fills what is left of them
    heads, nope, rank = queries.weight.shape
    by_head = queries.q.unflatten(-1, (heads, -1))[..., :nope]
    multiply_heads(by_head, dequantize_weight(queries.weight, out.dtype), out[:, :heads, :rank])
    rotate_queries_kernel[(len(out), triton.cdiv(out.shape[1], shape.BLOCK_H))](
        rows, SHAPE=shape, PADDED=out.shape[1] > heads, enable_fp_fusion=True, num_warps=NUM_WARPS
    )
    return out


def absorb_launch(queries: LatentQueries) -> AbsorbLaunch:
    """Checks the tensors and allocates the result if it is not given.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
    check_queries(queries)
    q, weight, cos_sin, positions, padded_heads, out = queries
    (heads, nope, rank), T = weight.shape, len(q)
    if q.dtype not in FLOATS:
        raise ValueError(f"queries are float32, bfloat16 or float16, got {q.dtype}")
    rope = cos_sin.shape[1]
    if out is None:
        out = torch.empty(T, padded_heads, rank + rope, dtype=q.dtype, device=q.device)
    few = nope <= MAX_NOPE and fits_one_launch(q, weight)
    tokens = next(n for n in (8, 16, 32, 64) if n >= min(planned_rows(T), 64))
    dtype = TRITON_DTYPES[q.dtype]
    rows = AbsorbArguments(
        q, q.stride(0), stored_rows(weight), cos_sin, cos_sin.shape[0], positions,
        out, out.stride(0), out.stride(1), T, heads, padded_heads, weight.scale,
    )  # fmt: skip
    shape = AbsorbShape(
        NOPE=nope,
        NOPE_BLOCK=max(16, triton.next_power_of_2(nope)) if weight.scale is None else WEIGHT_BLOCK,
        ROPE=rope,
        ROPE_BLOCK=row_block(rope, cos_sin),
        RANK=rank,
        HEAD_STRIDE=weight.rows.stride(0),
        NOPE_STRIDE=weight.rows.stride(1),
        RANK_STRIDE=weight.rows.stride(2),
        BLOCK_RANK=BLOCK_RANK,
        BLOCK_T=tokens,
        BLOCK_H=8,
        DTYPE=dtype,
        DOT=tl.float32 if triton.knobs.runtime.interpret else dtype,
        NATIVE_FP8=has_native_fp8(q.device),
        **scale_constants(weight),
    )
    programs, token_blocks = padded_heads * triton.cdiv(rank, BLOCK_RANK), triton.cdiv(T, tokens)
    return AbsorbLaunch(rows, shape, out, programs, token_blocks, few)
