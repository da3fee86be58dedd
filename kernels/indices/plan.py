"""Plans of index builders: which part of the index rows a program writes."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, LaunchBlock, Row, Table, equals, next_power_of_2

MAX_COLUMNS = 1024  # of a program


@dataclass(frozen=True)
class IndexProblem:
    """One launch of an index builder.

    Attributes:
        kernel: that writes them; tokens: rows of the result; width: columns of its widest row.
    """

    kernel: str
    tokens: int
    width: int = 1


def row_tile(problem: IndexProblem, gpu: GPU) -> LaunchBlock:
    """A power of two of a token's columns."""
    return LaunchBlock(min(MAX_COLUMNS, next_power_of_2(problem.width)))


OF_VALUES = {"decode_rows_kernel": LaunchBlock(128), "entry_counts_kernel": LaunchBlock(128)}  # one for each token
OF_ROWS = {"step_indices_kernel": row_tile, "entry_slots_kernel": row_tile, "workspace_indices_kernel": row_tile}
KERNELS = OF_VALUES | OF_ROWS
# a row of the result depends on its own token alone
INDICES = Table(
    "indices.index",
    {kernel: equals("kernel", kernel) for kernel in KERNELS},
    [Row(ANY, kernel, config) for kernel, config in KERNELS.items()],
)
