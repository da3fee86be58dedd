"""Collectives of the ranks of one host for small messages, through memory that all of their GPUs map.

Each collective is one launch, which a CUDA graph may capture. Each rank writes its message into the memory of its
peers. Every word of 32 bits travels with the number of the exchange, and a rank waits until all words sent to it have
that number. The data crosses the link once, without a barrier (NCCL's LL protocol does the same).

Inputs are contiguous float32, bfloat16 or float16 on a GPU of compute capability 8.0 or later, and the `PeerBuffers`
of this rank. All ranks make the same calls, each on one stream. A message to one rank has at most
``PeerBuffers.capacity`` words of 32 bits. Larger messages and other dtypes raise ValueError.

A rank that waits longer than ``PeerBuffers.timeout_ms`` writes the number of a missing rank plus 1 to
``PeerBuffers.missing`` and aborts: the CUDA context is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepseek_attn.kernels.collectives.types import PeerBuffers
from deepseek_attn.kernels.common.dispatch import LazyModule

if TYPE_CHECKING:
    from deepseek_attn.kernels.collectives import launch as triton_ops
else:
    triton_ops = LazyModule(__name__, "launch")


def all_reduce(x: Tensor, peers: PeerBuffers) -> Tensor:
    """Sum of ``x`` over all ranks, in float32 and rounded once: the same bits on every rank."""
    return triton_ops.all_reduce(x, peers)


def reduce_scatter(x: Tensor, peers: PeerBuffers) -> Tensor:
    """Rank r's ``[n, ...]`` of the sum of ``x [world * n, ...]`` over all ranks, in float32 and rounded once."""
    return triton_ops.reduce_scatter(x, peers)


def all_gather(x: Tensor, peers: PeerBuffers) -> Tensor:
    """``x [n, ...]`` of all ranks, concatenated: ``[world * n, ...]``. Any dtype."""
    return triton_ops.all_gather(x, peers)
