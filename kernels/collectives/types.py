"""Memory that ranks share to exchange messages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SLOTS = 2  # a rank may be one exchange ahead of another, not two: it waits for a word of every rank
WORD_BYTES = 8  # 32 bits of the message, and the number of the exchange


class PeerBuffers(NamedTuple):
    """Receive buffers of all ranks, as mapped by one rank.

    Attributes:
        rank: number of this rank; world: of ranks, a power of two.
        capacity: words of 32 bits that a message has at most.
        addresses: int64 ``[world + 1]``, the address of each rank's buffer in this process (`buffer_bytes`, zero at
            first), and the address of ``missing``.
        state: int64 ``[1]``, number of the next exchange in the upper half; see `initial_state`.
        missing: pinned int32 ``[1]`` on the host, 0.
        timeout_ms: time limit of a rank for one exchange.
    """

    rank: int
    world: int
    capacity: int
    addresses: Tensor
    state: Tensor
    missing: Tensor
    timeout_ms: int

    def holds(self, size: int) -> bool:
        """Whether a message of ``size`` bytes to each rank can be exchanged."""
        return size % 4 == 0 and size // 4 <= self.capacity


def buffer_bytes(world: int, capacity: int) -> int:
    """Bytes of the receive buffer of one rank: messages of ``capacity`` words from each rank."""
    return SLOTS * world * capacity * WORD_BYTES


def initial_state(device: torch.device) -> Tensor:
    """State before the first exchange, whose number is 1."""
    return torch.tensor([1 << 32], device=device, dtype=torch.int64)
