"""Plans of index builders: which tile of the index rows a program writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Row, Table, equals, next_power_of_2

TOKENS = 128  # of a program, where each token has one value
MAX_COLUMNS = 1024  # of a program, where each token has a row
MIN_REQUESTS = 8  # lengths of a tile, at least, so that few kernels serve every number of requests


@dataclass(frozen=True)
class IndexProblem:
    """One launch of an index builder.

    Attributes:
        kernel: that writes them; tokens: rows of the result; width: columns of its widest row.
        requests: whose lengths each token is compared with.
    """

    kernel: str
    tokens: int
    width: int = 1
    requests: int = 1


class IndexTiles(NamedTuple):
    """Tile of a program: ``tokens`` with a value each, ``columns`` of a token's row, ``requests`` to compare with."""

    tokens: int
    columns: int
    requests: int


def index_tiles(problem: IndexProblem, gpu: GPU) -> IndexTiles:
    """A power of two of columns and of requests, within the limits above."""
    columns = min(MAX_COLUMNS, next_power_of_2(problem.width))
    return IndexTiles(TOKENS, columns, max(MIN_REQUESTS, next_power_of_2(problem.requests)))


KERNELS = (
    "decode_rows_kernel",
    "entry_counts_kernel",
    "step_indices_kernel",
    "entry_slots_kernel",
    "workspace_indices_kernel",
)
# a row of the result depends on its own token alone
INDICES = Table(
    "indices.index",
    {kernel: equals("kernel", kernel) for kernel in KERNELS},
    [Row(ANY, kernel, index_tiles) for kernel in KERNELS],
)
