"""Plans of the Engram ops: programs of looked-up rows, and of gated streams."""

from __future__ import annotations

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, LaunchBlock, RowsProblem, next_power_of_2, one_kernel

TABLE_ROWS = 4  # of a program


def _table_rows(p: RowsProblem, gpu: GPU) -> LaunchBlock:
    return LaunchBlock(next_power_of_2(p.channels), 2)


def _stream(p: RowsProblem, gpu: GPU) -> LaunchBlock:
    """A program holds a stream of a token."""
    return LaunchBlock(next_power_of_2(p.channels), 8 if p.channels > 1024 else 4)


ROWS = one_kernel("engram.dequantize_rows", "engram_dequantize_kernel", (ANY, _table_rows))
GATES = one_kernel("engram.gate_streams", "engram_gate_kernel", (ANY, _stream))
