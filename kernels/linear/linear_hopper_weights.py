"""Gluon device functions of `linear_hopper` and `linear_few_hopper`: which tile of which weight a job computes."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepseek_attn.kernels.common.gluon import load_tile, reinterpret

PLAIN_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@dataclass(frozen=True)
class Weights:
    """Constants of the weights of one kind.

    Attributes:
        SIZES, FIRSTS: rows of each weight, and its first tile; TILES: of all of them.
        SPLITS: split-K partials of a tile.
        GROUP_ROWS: rows of a diagonal block of the only weight; 0 for dense weights.
    """

    SIZES: tuple[int, ...]
    FIRSTS: tuple[int, ...]
    TILES: int
    SPLITS: int
    GROUP_ROWS: int


@gluon.jit
def pick(values, firsts: gl.constexpr, tile):
    """The value of the segment that holds ``tile``: segment i starts at tile ``firsts[i]``."""
    value = values[0]
    for i in gl.static_range(1, len(firsts)):
        value = gl.where(tile >= firsts[i], values[i], value)
    return value


@gluon.jit
def pick_constant(values: gl.constexpr, firsts: gl.constexpr, tile):
    """`pick` of constants."""
    FIRST: gl.constexpr = values[0]
    value = gl.to_tensor(FIRST)
    for i in gl.static_range(1, len(firsts)):
        value = gl.where(tile >= firsts[i], values[i], value)
    return value


@gluon.jit
def num_jobs(job, end):
    """Jobs of this program from ``job`` to ``end``."""
    programs = gl.num_programs(0)
    return gl.maximum(end - job + programs - 1, 0) // programs


@gluon.jit
def rows_of(tile, WEIGHTS: gl.constexpr, ROWS: gl.constexpr):
    """(first row of a tile, last row of its weight or group, the group)."""
    SIZES: gl.constexpr = WEIGHTS.SIZES
    FIRSTS: gl.constexpr = WEIGHTS.FIRSTS
    GROUP_ROWS: gl.constexpr = WEIGHTS.GROUP_ROWS
    if GROUP_ROWS > 0:
        GROUP_TILES: gl.constexpr = (GROUP_ROWS + ROWS - 1) // ROWS
        group = tile // GROUP_TILES
        return group * GROUP_ROWS + tile % GROUP_TILES * ROWS, (group + 1) * GROUP_ROWS - 1, group
    else:
        start = (tile - pick_constant(FIRSTS, FIRSTS, tile)) * ROWS
        return start, pick_constant(SIZES, FIRSTS, tile) - 1, tile * 0


@gluon.jit
def load_weight(descs, tile, row, block, full, buffer, WEIGHTS: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr):
    """Starts to load a block of the weight that holds ``tile``."""
    FIRSTS: gl.constexpr = WEIGHTS.FIRSTS
    channel = block * (128 if FP8 else 64)
    if not FP8:
        buffer = reinterpret(buffer, DTYPE, [buffer.shape[0], 64], PLAIN_LAYOUT)
    for i in gl.static_range(len(FIRSTS)):
        has_tile = tile >= FIRSTS[i]
        if i + 1 < len(FIRSTS):
            has_tile = has_tile & (tile < FIRSTS[i + 1])
        load_tile(descs[i], [row, channel], full, buffer, pred=has_tile)
