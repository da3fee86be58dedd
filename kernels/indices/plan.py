"""Plans of index builders: which part of the index rows a program writes."""

from __future__ import annotations

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import KernelRows, LaunchBlock, given_kernels, next_power_of_2

MAX_COLUMNS = 1024  # of a program


def row_tile(problem: KernelRows, gpu: GPU) -> LaunchBlock:
    """A power of two of a token's columns, at most those of the widest row."""
    return LaunchBlock(min(MAX_COLUMNS, next_power_of_2(problem.channels)))


# a row of the result depends on its own token alone
INDICES = given_kernels(
    "indices.index",
    ("decode_rows_kernel", LaunchBlock(128)),  # a value for each token
    ("entry_counts_kernel", LaunchBlock(128)),
    ("step_indices_kernel", row_tile),
    ("entry_slots_kernel", row_tile),
    ("workspace_indices_kernel", row_tile),
)
