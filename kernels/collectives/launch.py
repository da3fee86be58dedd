"""Launches of the collectives."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.collectives.one_shot_triton import ExchangeConfig, ExchangeWords, exchange_kernel
from deepseek_attn.kernels.collectives.plan import EXCHANGES
from deepseek_attn.kernels.collectives.types import PeerBuffers
from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.plans import RowsProblem, cdiv
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES


def all_reduce(x: Tensor, peers: PeerBuffers) -> Tensor:
    """See `deepseek_attn.kernels.collectives.all_reduce`."""
    out = torch.empty_like(x)
    _exchange(x, out, peers, x.nbytes)
    return out


def reduce_scatter(x: Tensor, peers: PeerBuffers) -> Tensor:
    """See `deepseek_attn.kernels.collectives.reduce_scatter`."""
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


def _exchange(
    x: Tensor, out: Tensor, peers: PeerBuffers, size: int, scatter: bool = False, gather: bool = False
) -> None:
    """Sends ``size`` bytes to each rank and sums the messages received.

    With ``scatter`` each rank is sent a different part of ``x``. With ``gather`` the messages are not summed but
    concatenated by rank.
    """
    if not gather and x.dtype not in FLOATS:
        raise ValueError(f"sums are of float32, bfloat16 or float16, got {x.dtype}")
    if not x.is_contiguous() or not peers.holds(size):
        raise ValueError(
            f"a message must be contiguous and up to {peers.capacity} whole words of 32 bits, got {x.dtype} "
            f"{list(x.shape)}: use torch.distributed for others"
        )
    words, plan = size // 4, EXCHANGES.plan(RowsProblem(size // 4), gpu(x.device))
    block = plan.config.size
    if not words:
        return
    sent, received = x.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    exchange_kernel[(cdiv(words, block),)](
        ExchangeWords(sent, received, peers.addresses, peers.state, words, peers.timeout_ms),
        peers.rank,
        CONFIG=ExchangeConfig(peers.world, peers.capacity, scatter, block),
        DTYPE=None if gather else TRITON_DTYPES[x.dtype],
        **plan.options,
    )
