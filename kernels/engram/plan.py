"""Plans of the Engram ops: programs of looked-up rows, and of gated streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Row, Table, kernel_planner, next_power_of_2


@dataclass(frozen=True)
class EngramProblem:
    """Rows of a table with ``channels`` FP8 values, or residual streams with as many channels."""

    rows: int
    channels: int


class EngramTiles(NamedTuple):
    """Launch configuration of an Engram kernel: rows of a program, the tile of their channels, and warps."""

    rows: int
    block: int
    warps: int


def _table_rows(p: EngramProblem, gpu: GPU) -> EngramTiles:
    return EngramTiles(4, next_power_of_2(p.channels), 2)


def _stream(p: EngramProblem, gpu: GPU) -> EngramTiles:
    """A program holds a stream of a token."""
    return EngramTiles(1, next_power_of_2(p.channels), 8 if p.channels > 1024 else 4)


ROWS = Table(
    "engram.dequantize_rows", {"engram_dequantize_kernel": ANY}, [Row(ANY, "engram_dequantize_kernel", _table_rows)]
)
GATES = Table("engram.gate_streams", {"engram_gate_kernel": ANY}, [Row(ANY, "engram_gate_kernel", _stream)])
plan_rows = kernel_planner(ROWS)
plan_gate = kernel_planner(GATES)
