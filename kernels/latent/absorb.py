"""Launches of `kernels.latent.absorb_queries` in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, supports_pdl
from deepseek_attn.kernels.common.row_ops import row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.latent.absorb_triton import (
    AbsorbArguments,
    AbsorbShape,
    absorb_queries_kernel,
    rotate_queries_kernel,
)
from deepseek_attn.kernels.latent.reference import check_queries
from deepseek_attn.kernels.latent.types import LatentQueries

MAX_TOKENS = 64
"""Tokens up to which one launch computes everything."""
MAX_NOPE = 256
"""Channels without rotation that a program multiplies at once."""
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AbsorbConfig:
    """Launch configuration of `absorb_queries_kernel`: latent channels and tokens of a program, and its warps."""

    rank: int
    tokens: int
    warps: int


def choose_config(T: int) -> AbsorbConfig:
    """For ``T`` tokens: all weights of a multiprocessor are in flight at once."""
    tokens = next(n for n in (8, 16, 32, 64) if n >= min(T, 64))
    return AbsorbConfig(64, tokens, 4)


def absorb_queries(queries: LatentQueries, config: AbsorbConfig | None = None) -> Tensor:
    """See `kernels.latent.absorb_queries`; ``config`` overrides the choice of launches."""
    check_queries(queries)
    q, weight, cos_sin, positions, padded_heads, out = queries
    (heads, nope, rank), T = weight.shape, len(q)
    if q.dtype not in FLOATS:
        raise ValueError(f"queries are float32, bfloat16 or float16, got {q.dtype}")
    rope = cos_sin.shape[1]
    if out is None:
        out = torch.empty(T, padded_heads, rank + rope, dtype=q.dtype, device=q.device)
    if not T or not padded_heads:
        return out
    few = config is not None or (T <= MAX_TOKENS and nope <= MAX_NOPE and q.dtype in HALVES)
    config = config or choose_config(T)
    dtype = TRITON_DTYPES[q.dtype]
    rows = AbsorbArguments(
        q, q.stride(0), weight, cos_sin, cos_sin.shape[0], positions,
        out, out.stride(0), out.stride(1), T, heads, padded_heads,
    )  # fmt: skip
    shape = AbsorbShape(
        NOPE=nope,
        NOPE_BLOCK=max(16, triton.next_power_of_2(nope)),
        ROPE=rope,
        ROPE_BLOCK=row_block(rope, cos_sin),
        RANK=rank,
        HEAD_STRIDE=weight.stride(0),
        NOPE_STRIDE=weight.stride(1),
        RANK_STRIDE=weight.stride(2),
        BLOCK_RANK=config.rank,
        BLOCK_T=config.tokens,
        BLOCK_H=8,
        DTYPE=dtype,
        DOT=tl.float32 if triton.knobs.runtime.interpret else dtype,
    )
    pdl = supports_pdl(q.device)
    if few:
        grid = (padded_heads * triton.cdiv(rank, config.rank), triton.cdiv(T, config.tokens))
        absorb_queries_kernel[grid](rows, SHAPE=shape, PDL=pdl, num_warps=config.warps, launch_pdl=pdl)
        return out
    # cuBLAS writes into the rows of the result, and the rotation fills what is left of them
    latents = out[:, :heads, :rank].transpose(0, 1)
    torch.bmm(q.unflatten(-1, (heads, -1))[..., :nope].transpose(0, 1), weight, out=latents)
    rotate_queries_kernel[(T, triton.cdiv(padded_heads, shape.BLOCK_H))](
        rows, SHAPE=shape, PADDED=padded_heads > heads, PDL=False, num_warps=4
    )
    return out
