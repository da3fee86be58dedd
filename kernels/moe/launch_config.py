"""Formats and launch configurations of the products of `moe_experts`: from formats and shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_attn.kernels.common.invariance import batch_invariant

INVARIANT_LOAD = 48  # pairs per expert that batch-invariant launches are configured for: tiles of 64 pairs


@dataclass(frozen=True)
class LaunchConfig:
    """Tiling of a grouped product.

    Attributes:
        pairs, rows, channels: of a program's tile: (token, expert) pairs of one expert, weight rows, channels at once.
        warps, stages: of a program.
    """

    pairs: int
    rows: int
    channels: int
    warps: int
    stages: int


@dataclass(frozen=True)
class HopperLaunchConfig:
    """Tiling of a launch of `experts_hopper`.

    Attributes:
        sizes: numbers of routed rows that a tile is rounded up to, multiples of the first in rising order.
        part: routed rows that are multiplied at once, at most.
        stages: in flight, as far as shared memory suffices.
        programs: per multiprocessor, 1 to 3.
        warpgroups: that multiply, 1 to 3; three where there is one program.
        overlap: two parts are multiplied at once, which takes registers.
        channels: of a stage, 128 or 256; 256 with one part only, FP8 weights take 128.
    """

    sizes: tuple[int, ...]
    part: int
    stages: int = 8
    programs: int = 1
    warpgroups: int = 2
    overlap: bool = True
    channels: int = 128


@dataclass(frozen=True)
class Operands:
    """Formats and dtypes of the factors of a grouped product.

    Attributes:
        weights: format of the weights, ``plain``, ``fp8`` or ``fp4``.
        dtype: of both factors.
        quantize: inputs are quantised to FP8; scaled: and stay e4m3 with float32 scales.
    """

    weights: str
    dtype: torch.dtype
    quantize: bool
    scaled: bool

    @property
    def needs_prepared_input(self) -> bool:
        """Inputs are converted by a separate launch."""
        return self.quantize or self.weights == "fp4"


def choose_operands(
    weights: str, dtype: torch.dtype, fp8_input: bool, pow2_scales: bool, capability: tuple[int, int]
) -> Operands:
    """Bfloat16 or FP8 factors where they hold weights and inputs of ``dtype`` exactly, else float32."""
    if weights == "plain":
        return Operands(weights, dtype, False, False)
    # sums of FP8 products keep about 14 bits on compute capability 9.0: too few for float32 results
    if weights == "fp8" and fp8_input and capability >= (8, 9) and dtype != torch.float32:
        return Operands(weights, torch.float8_e4m3fn, True, True)
    # e4m3 times a power of two is exact in bfloat16
    exact = dtype == torch.bfloat16 or (fp8_input and pow2_scales)
    return Operands(weights, torch.bfloat16 if exact else torch.float32, fp8_input, False)


def choose_config(pairs: int, experts: int, operands: Operands, capability: tuple[int, int]) -> LaunchConfig:
    """The fastest configuration measured on an H200 for ``pairs`` spread evenly over ``experts``."""
    if operands.dtype == torch.float32:
        return LaunchConfig(16, 64, 64, 4, 2)
    load = INVARIANT_LOAD if batch_invariant() else pairs / experts
    if capability[0] not in (9, 10):  # less shared memory, or narrower tensor cores
        if load <= 24:
            return LaunchConfig(16 if load <= 12 else 32, 64, 128, 4, 2)
        return LaunchConfig(64, 128, 64, 8, 2)
    if operands.weights == "fp4":
        if load <= 6:
            return LaunchConfig(8, 64, 512, 4, 2) if pairs <= 8 else LaunchConfig(8, 64, 256, 4, 4)
        if load <= 24:
            return LaunchConfig(16, 64, 256, 4, 3)
        return LaunchConfig(64 if load <= 48 else 128, 64, 128, 4, 3)
    if load <= 12:
        return LaunchConfig(16, 64, 128, 4, 4)
    if load <= 24:
        return LaunchConfig(32, 128, 128, 4, 3)
    return LaunchConfig(64, 128, 128 if operands.scaled else 64, 4, 4)


# (mean number of rows of an expert, configuration up to it), from an H200 and an H100. Few rows: several programs per
# multiprocessor hide latency, and weight rows are read 128 bytes at a time. For a few tokens jobs of 64 rows leave
# multiprocessors less unequal shares. More: three warpgroups share the rows that they multiply, and have registers for
# 128 of them. Many: only two have registers for 192. An expert whose rows exceed the largest tile is read twice: a
# configuration ends where that becomes common.
HOPPER_CONFIGS = (
    (0.3, HopperLaunchConfig((8,), 8, 8, 3, 1, channels=256)),
    (2, HopperLaunchConfig((8,), 8, 8, 2, channels=256)),
    (22, HopperLaunchConfig((8, 16, 32), 32, 8, 2, channels=256)),
    (54, HopperLaunchConfig((32, 64), 64, 8, 1, 3)),
    (122, HopperLaunchConfig((32, 64, 96, 128), 64, 8, 1, 3, False)),
    (float("inf"), HopperLaunchConfig((32, 64, 96, 128, 160, 192), 64, 6)),
)


def choose_hopper_config(pairs: int, experts: int, fp4: bool) -> HopperLaunchConfig | None:
    """The fastest configuration for ``pairs`` spread evenly over ``experts``, or None where `choose_config` has one.

    That is with FP8 weights where tiles would be mostly empty, and where ops are batch invariant: tiles follow from the
    routing of all rows. FP8 weights, twice the bytes, always take the largest tiles.
    """
    load = pairs / experts
    if batch_invariant() or (not fp4 and load < 64):
        return None
    return next(config for most, config in HOPPER_CONFIGS if (load if fp4 else float("inf")) <= most)
