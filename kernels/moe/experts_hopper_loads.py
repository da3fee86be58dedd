"""Gluon device code of `experts_hopper`: the warps that load blocks of weights and of routed rows, and their buffers.

``TILING`` is the `HopperExpertTiling` of `plan`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from deepseek_attn.kernels.common.gluon import load_tile
from deepseek_attn.kernels.moe.plan import QUAD

_QUAD = gl.constexpr(QUAD)


class ExpertRowTiles(NamedTuple):
    """Tiles of routed rows.

    Attributes:
        entries: int32 ``[3, capacity]``: of each tile the row of the stacks, the first routed row and the number of
            rows.
        count: int32 ``[1]``, number of tiles.
    """

    entries: Any
    capacity: Any
    count: Any


class RowTile(NamedTuple):
    """A tile of routed rows, int32: the row of the stacks with its expert, its first row, its number of rows."""

    expert: Any
    start: Any
    rows: Any


class ExpertBuffers(NamedTuple):
    """Shared memory by stage.

    Attributes:
        weight: uint8 or e4m3, tiles of weight rows.
        weight_scales: e8m0 scales of FP4 weights, of `QUAD` blocks, twice; None with FP8. Where rows do not end with a
            quad, ``[6 * warpgroups, 32, 16]``: of each warpgroup the 32 even rows, then the odd ones twice, from half a
            quad before their blocks and from half a quad behind that.
        x, scales: routed rows by block, e4m3, and their float32 scales.
        full, empty: barriers: the loads of a stage have arrived, or its last use has ended.
    """

    weight: Any
    weight_scales: Any
    x: Any
    scales: Any
    full: Any
    empty: Any


@gluon.jit
def tile_of(tiles, job, TILING: gl.constexpr):
    """The `RowTile` of a job."""
    entry = tiles.entries + job // TILING.ROW_BLOCKS
    return RowTile(gl.load(entry), gl.load(entry + tiles.capacity), gl.load(entry + 2 * tiles.capacity))


@gluon.jit
def load_weights(a_desc, b_desc, a_scale_desc, b_scale_desc, tiles, buffers, TILING: gl.constexpr):
    """Loads the weight blocks of all jobs of this program in order; the previous launch may still write rows of x.

    With ``WAIT``, first waits for earlier launches, which write the tiles or the weights (`copy_experts_kernel`).
    """
    STAGES: gl.constexpr = TILING.STAGES
    BLOCKS: gl.constexpr = TILING.TILES.channels // 128
    STEP: gl.constexpr = TILING.TILES.channels // 2 if TILING.FP4 else 128
    SCALE_BYTES: gl.constexpr = 6 * _QUAD if TILING.HALF_QUAD else 4 * _QUAD  # of a row
    GROUPS: gl.constexpr = TILING.TILES.warpgroups
    BOXES: gl.constexpr = GROUPS if BLOCKS == 1 else 1
    HEIGHT: gl.constexpr = GROUPS * 64
    ROWS: gl.constexpr = HEIGHT // BOXES // (2 if TILING.GATED else 1)
    if TILING.WAIT:
        gdc_wait()  # wait until earlier launches have written tiles and weights
    jobs = gl.load(tiles.count) * TILING.ROW_BLOCKS
    n = jobs * 0
    slot = n + 1
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        expert = gl.load(tiles.entries + job // TILING.ROW_BLOCKS)
        weight_row = expert * TILING.N + job % TILING.ROW_BLOCKS * (BOXES * ROWS)
        for step in range(TILING.K // TILING.TILES.channels):
            stage = n % STAGES
            full = buffers.full.index(stage)
            # wait until all warpgroups have used the stage; the first round finds it empty
            mbarrier.wait(buffers.empty.index(stage), (n // STAGES & 1) ^ 1)
            if TILING.FP4:
                # the first stage of a quad of blocks brings the scales of all four
                with_scales = step % (_QUAD // BLOCKS) == 0
                mbarrier.expect(full, HEIGHT * STEP, pred=step % (_QUAD // BLOCKS) != 0)
                mbarrier.expect(full, HEIGHT * (STEP + SCALE_BYTES), pred=with_scales)
                slot = (slot + with_scales.to(gl.int32)) % 2
                if TILING.HALF_QUAD:
                    # TMA reads pairs of rows from multiples of 16 bytes. Odd rows begin 8 bytes behind one
                    for i in gl.static_range(3 * GROUPS):
                        column = TILING.K // 32 - 8 + 16 * (i % 3 - 1) if i % 3 > 0 else 0
                        at = [weight_row // 2 + i // 3 * 32, step * (4 * BLOCKS) + column]
                        to = buffers.weight_scales.index(3 * GROUPS * slot + i)
                        load_tile(a_scale_desc, at, full, to, pred=with_scales)
                else:
                    for i in gl.static_range(BOXES):
                        at = [weight_row + ROWS * i, step * (4 * BLOCKS)]
                        to = slot * BOXES + i
                        if TILING.GATED:
                            load_tile(a_scale_desc, at, full, buffers.weight_scales.index(2 * to), pred=with_scales)
                            load_tile(b_scale_desc, at, full, buffers.weight_scales.index(2 * to + 1), pred=with_scales)
                        else:
                            load_tile(a_scale_desc, at, full, buffers.weight_scales.index(to), pred=with_scales)
            else:
                mbarrier.expect(full, HEIGHT * STEP)  # full once TMA has written as many bytes
            for i in gl.static_range(BOXES):
                at = [weight_row + ROWS * i, step * STEP]
                to = stage * BOXES + i
                if TILING.GATED:
                    load_tile(a_desc, at, full, buffers.weight.index(2 * to))
                    load_tile(b_desc, at, full, buffers.weight.index(2 * to + 1))
                else:
                    load_tile(a_desc, at, full, buffers.weight.index(to))
            n += 1


@gluon.jit
def load_rows(x_desc, x_scale_desc, tiles, buffers, TILING: gl.constexpr):
    """Loads the blocks of routed rows of all jobs of this program in order."""
    PART: gl.constexpr = TILING.TILES.part
    PARTS: gl.constexpr = TILING.PARTS
    STAGES: gl.constexpr = TILING.STAGES
    BOX: gl.constexpr = TILING.BOX
    BOXES: gl.constexpr = PART * PARTS // BOX
    CHANNELS: gl.constexpr = TILING.TILES.channels
    BLOCKS: gl.constexpr = CHANNELS // 128
    SCALE_BYTES: gl.constexpr = 4 * TILING.SCALES * BLOCKS
    gdc_wait()  # until the previous launch has written the rows
    jobs = gl.load(tiles.count) * TILING.ROW_BLOCKS
    n = jobs * 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        tile = tile_of(tiles, job, TILING)
        start = tile.start
        rows = tile.rows
        for step in range(TILING.K // CHANNELS):
            stage = n % STAGES
            full = buffers.full.index(stage)
            # wait until all warpgroups have used the stage
            mbarrier.wait(buffers.empty.index(stage), (n // STAGES & 1) ^ 1)
            # one call, at the last box, makes the barrier expect the bytes of all boxes with rows of the tile
            for i in gl.static_range(BOXES):
                is_last = (rows > i * BOX) & ((rows <= (i + 1) * BOX) | (i == BOXES - 1))
                mbarrier.expect(full, (i + 1) * CHANNELS * BOX + (i * BOX // PART + 1) * SCALE_BYTES, pred=is_last)
            # rows behind the tile are not loaded: stale rows of the buffer are multiplied, but not stored
            for i in gl.static_range(BOXES):
                has_box = rows > BOX * i
                for j in gl.static_range(BLOCKS):
                    to = buffers.x.index((stage * BLOCKS + j) * BOXES + i)
                    load_tile(x_desc, [start + BOX * i, step * CHANNELS + j * 128], full, to, pred=has_box)
            for i in gl.static_range(PARTS):
                has_part = rows > PART * i
                to = buffers.scales.index(stage * PARTS + i)
                load_tile(x_scale_desc, [step * BLOCKS, start + PART * i], full, to, pred=has_part)
            n += 1
