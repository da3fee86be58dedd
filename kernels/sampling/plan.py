"""Plan of greedy tokens: a launch over blocks of the logits, and one over the maxima of the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepseek_attn.kernels.common.plans import ANY, Row, Table, kernel_planner


@dataclass(frozen=True)
class GreedyProblem:
    """Logits ``[rows, vocab]``."""

    rows: int
    vocab: int


class GreedyTiles(NamedTuple):
    """Launch configuration of `greedy_block_kernel`: logits of a program, and its warps."""

    block: int
    warps: int


GREEDY = Table(
    "sampling.greedy_tokens", {"greedy_block_kernel": ANY}, [Row(ANY, "greedy_block_kernel", GreedyTiles(1024, 4))]
)
plan = kernel_planner(GREEDY)
