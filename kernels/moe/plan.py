"""What the products of `moe_experts` compute in, and how they are cut: from formats and shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes:
        pairs, rows, channels: of a program's tiles: pairs of one expert, rows and channels of its weight.
        warps, stages: of a program.
    """

    pairs: int
    rows: int
    channels: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """What the products compute in.

    Attributes:
        format: ``plain``, ``fp8`` or ``fp4`` weights.
        dtype: of the factors.
        quantize: inputs are rounded to FP8; scaled: and stay e4m3 with float32 scales.
    """

    format: str
    dtype: torch.dtype
    quantize: bool
    scaled: bool

    @property
    def prepares(self) -> bool:
        return self.quantize or self.format == "fp4"


def choose_plan(format: str, dtype: torch.dtype, fp8_input: bool, pow2: bool, capability: tuple[int, int]) -> Plan:
    """What the products compute in: bfloat16 or FP8 where that is exact, else float32."""
    if format == "plain":
        return Plan(format, dtype, False, False)
    # sums of FP8 products keep about 14 bits on compute capability 9.0: too few for float32 results
    if format == "fp8" and fp8_input and capability >= (8, 9) and dtype != torch.float32:
        return Plan(format, torch.float8_e4m3fn, True, True)
    # e4m3 times a power of two is exact in bfloat16
    exact = dtype == torch.bfloat16 or (fp8_input and pow2)
    return Plan(format, torch.bfloat16 if exact else torch.float32, fp8_input, False)


def choose_tiles(pairs: int, experts: int, plan: Plan, capability: tuple[int, int]) -> tuple[Tiles, Tiles]:
    """The fastest cuts measured on an H200 for ``pairs`` spread evenly over ``experts``."""
    if plan.dtype == torch.float32:
        tiles = Tiles(16, 64, 64, 4, 2)
        return tiles, tiles
    load, fp4 = pairs / experts, plan.format == "fp4"
    if capability[0] not in (9, 10):  # less shared memory, or narrower tensor cores
        tiles = (
            Tiles(16, 64, 128, 4, 2)
            if load <= 12
            else Tiles(32, 64, 128, 4, 2)
            if load <= 24
            else Tiles(64, 128, 64, 8, 2)
        )
    elif fp4:
        if load <= 6:
            tiles = Tiles(8, 64, 512, 4, 2) if pairs <= 8 else Tiles(8, 64, 256, 4, 4)
        elif load <= 24:
            tiles = Tiles(16, 64, 256, 4, 3)
        else:
            tiles = Tiles(64 if load <= 48 else 128, 64, 128, 4, 3)
    elif load <= 12:
        tiles = Tiles(16, 64, 128, 4, 4)
    elif load <= 24:
        tiles = Tiles(32, 128, 128, 4, 3)
    else:
        tiles = Tiles(64, 128, 128 if plan.scaled else 64, 4, 4)
    return tiles, tiles
