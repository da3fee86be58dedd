"""Plan of the collectives: one launch of programs that each exchange a block of words with every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepseek_attn.kernels.common.plans import ANY, Row, Table, kernel_planner


@dataclass(frozen=True)
class ExchangeProblem:
    """``words`` of 32 bits that go to each of ``world`` ranks."""

    words: int
    world: int


class ExchangeTiles(NamedTuple):
    """Launch configuration of `exchange_kernel`: words of a program to each rank, and its warps.

    `PeerBuffers.capacity` is a multiple of ``block``.
    """

    block: int
    warps: int


# larger blocks are slower
EXCHANGES = Table(
    "collectives.exchange", {"exchange_kernel": ANY}, [Row(ANY, "exchange_kernel", ExchangeTiles(128, 4))]
)
plan = kernel_planner(EXCHANGES)
