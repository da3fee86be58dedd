"""Plans of index builders: which part of the index rows a program writes."""

from __future__ import annotations

from deepseek_attn.kernels.common.plans import LaunchBlock, channel_block, given_kernels

COLUMNS = channel_block(1024)  # columns of a token, or of the widest row, that one program computes
# a row of the result depends on its own token alone
INDICES = given_kernels(
    "indices.index",
    ("decode_rows_kernel", LaunchBlock(128)),  # a value for each token
    ("entry_counts_kernel", LaunchBlock(128)),
    ("step_indices_kernel", COLUMNS),
    ("entry_slots_kernel", COLUMNS),
    ("workspace_indices_kernel", COLUMNS),
)
