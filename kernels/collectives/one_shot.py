"""Launches of the collectives."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.collectives.one_shot_triton import exchange_kernel
from deepseek_attn.kernels.collectives.types import PeerBuffers
from deepseek_attn.kernels.common.device import FLOATS, supports_pdl
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES

BLOCK = 128  # words to each rank of a program: `PeerBuffers.capacity` is a multiple. Larger ones are slower


def all_reduce(x: Tensor, peers: PeerBuffers) -> Tensor:
    """See `deepseek_attn.kernels.collectives.all_reduce`."""
    _check_floats(x)
    out = torch.empty_like(x)
    _exchange(x, out, peers, x.nbytes)
    return out


def reduce_scatter(x: Tensor, peers: PeerBuffers) -> Tensor:
    """See `deepseek_attn.kernels.collectives.reduce_scatter`."""
    _check_floats(x)
    if len(x) % peers.world:
        raise ValueError(f"{len(x)} rows cannot be shared out among {peers.world} ranks")
    out = x.new_empty(len(x) // peers.world, *x.shape[1:])
    _exchange(x, out, peers, out.nbytes, scatter=True)
    return out


def all_gather(x: Tensor, peers: PeerBuffers) -> Tensor:
    """See `deepseek_attn.kernels.collectives.all_gather`."""
    out = x.new_empty(peers.world * len(x), *x.shape[1:])
    _exchange(x, out, peers, x.nbytes, gather=True)
    return out


def _check_floats(x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"sums are of float32, bfloat16 or float16, got {x.dtype}")


def _exchange(
    x: Tensor, out: Tensor, peers: PeerBuffers, size: int, scatter: bool = False, gather: bool = False
) -> None:
    """Sends ``size`` bytes to each rank."""
    if not x.is_contiguous() or not peers.holds(size):
        raise ValueError(
            f"a message must be contiguous and up to {peers.capacity} whole words of 32 bits, got {x.dtype} "
            f"{list(x.shape)}: use torch.distributed for others"
        )
    words, early = size // 4, supports_pdl(x.device)
    if not words:
        return
    exchange_kernel[(triton.cdiv(words, BLOCK),)](
        x.view(-1).view(torch.int32),
        out.view(-1).view(torch.int32),
        peers.addresses,
        peers.state,
        words,
        peers.rank,
        peers.timeout_ms,
        WORLD=peers.world,
        CAPACITY=peers.capacity,
        SCATTER=scatter,
        DTYPE=None if gather else TRITON_DTYPES[x.dtype],
        BLOCK=BLOCK,
        PDL=early,
        enable_fp_fusion=True,
        num_warps=4,
        launch_pdl=early,
    )
