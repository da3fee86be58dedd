"""Plans of RMS norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Row, Table, kernel_planner, next_power_of_2


@dataclass(frozen=True)
class NormProblem:
    """Rows of ``channels`` values that are normed, each by itself."""

    rows: int
    channels: int


class NormTiles(NamedTuple):
    """Launch configuration of `rms_norm_kernel`: channels of a program, at least those of a row, and its warps."""

    block: int
    warps: int


def whole_rows(problem: NormProblem, gpu: GPU) -> NormTiles:
    """A program holds its row; a warp holds up to 512 channels of it."""
    block = next_power_of_2(problem.channels)
    return NormTiles(block, min(8, max(1, block // 512)))


NORMS = Table("norm.rms_norm", {"rms_norm_kernel": ANY}, [Row(ANY, "rms_norm_kernel", whole_rows)])
plan = kernel_planner(NORMS)
