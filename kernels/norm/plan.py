"""Plans of RMS norms."""

from __future__ import annotations

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, LaunchBlock, RowsProblem, next_power_of_2, one_kernel


def whole_rows(problem: RowsProblem, gpu: GPU) -> LaunchBlock:
    """A program holds its row; a warp holds up to 512 channels of it."""
    block = next_power_of_2(problem.channels)
    return LaunchBlock(block, min(8, max(1, block // 512)))


NORMS = one_kernel("norm.rms_norm", "rms_norm_kernel", (ANY, whole_rows))
