"""Gluon device functions of `linear_hopper` and `linear_decode_hopper`: which tile of which weight a job computes.

A constant ``TILES`` is a `WeightTiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepseek_attn.kernels.common.gluon import load_tile, reinterpret

PLAIN_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def pick(values, firsts: gl.constexpr, tile):
    """The value of the weight that holds ``tile``: weight i starts at tile ``firsts[i]``."""
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
def rows_of(tile, TILES: gl.constexpr, ROWS: gl.constexpr):
    """(first row of a tile, last row of its weight or group, the group)."""
    SIZES: gl.constexpr = TILES.SIZES
    FIRSTS: gl.constexpr = TILES.FIRSTS
    GROUP_ROWS: gl.constexpr = TILES.GROUP_ROWS
    if GROUP_ROWS > 0:
        GROUP_TILES: gl.constexpr = (GROUP_ROWS + ROWS - 1) // ROWS
        group = tile // GROUP_TILES  # tiles do not cross the blocks of a grouped weight
        return group * GROUP_ROWS + tile % GROUP_TILES * ROWS, (group + 1) * GROUP_ROWS - 1, group
    else:
        start = (tile - pick_constant(FIRSTS, FIRSTS, tile)) * ROWS
        return start, pick_constant(SIZES, FIRSTS, tile) - 1, tile * 0  # a tensor, as with groups


@gluon.jit
def load_weight(descs, tile, row, block, full, buffer, TILES: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr):
    """Starts to load a block of the weight that holds ``tile``; the barrier ``full`` counts its bytes."""
    FIRSTS: gl.constexpr = TILES.FIRSTS
    channel = block * (128 if FP8 else 64)
    if not FP8:
        buffer = reinterpret(buffer, DTYPE, [buffer.shape[0], 64], PLAIN_LAYOUT)
    # one predicated load per weight, and only this tile's is executed: a descriptor cannot be selected at run time
    for i in gl.static_range(len(FIRSTS)):
        has_tile = tile >= FIRSTS[i]
        if i + 1 < len(FIRSTS):
            has_tile = has_tile & (tile < FIRSTS[i + 1])
        load_tile(descs[i], [row, channel], full, buffer, pred=has_tile)
