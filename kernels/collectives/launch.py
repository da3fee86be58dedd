"""Launches of the collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.collectives.one_shot_triton import ExchangeConfig, ExchangeWords, exchange_kernel
from deepseek_attn.kernels.collectives.plan import plan
from deepseek_attn.kernels.collectives.types import PeerBuffers
from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.plans import KernelPlan, RowsProblem, cdiv
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES


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
    if words := size // 4:
        dtype = None if gather else TRITON_DTYPES[x.dtype]
        made = plan(RowsProblem(words), gpu(x.device))
        launch(made, x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), peers, words, scatter, dtype)


def launch(plan: KernelPlan, x: Tensor, out: Tensor, peers: PeerBuffers, words: int, scatter: bool, dtype: Any) -> None:
    """Sends ``words`` of ``x`` to each rank, with ``scatter`` different words; sums the received words as ``dtype``.

    Without a ``dtype`` the words of all ranks are stored, concatenated by rank.
    ``x`` and ``out`` are flat and int32.
    """
    block = plan.config.size
    exchange_kernel[(cdiv(words, block),)](
        ExchangeWords(x, out, peers.addresses, peers.state, words, peers.timeout_ms),
        peers.rank,
        CONFIG=ExchangeConfig(peers.world, peers.capacity, scatter, block),
        DTYPE=dtype,
        enable_fp_fusion=True,
        **plan.options,
    )
