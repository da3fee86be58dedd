"""Gluon device code: products of routed rows with FP4 or FP8 experts on Hopper's FP8 tensor cores.

A job is a block of 64, 128 or 192 weight rows of an expert by a tile of rows that are routed to it. Two warps load
blocks of 128 channels: the first warp the weight, the second warp the rows. For small tiles a stage has two blocks, so
that 128 bytes of a weight row are read at a time, and a block is converted while the previous block is multiplied. One
to three warpgroups multiply 64 weight rows each. The weight is the left factor and comes from registers: FP4 weights
are converted to FP8 there. Each block of channels has a fresh accumulator, which is scaled and added to the sum.

A thread of a tensor core's left factor holds runs of 4 channels that are 16 apart. Rows are stored with the channels of
a block reordered (`prepare_rows_kernel`), so that these are 32 consecutive channels of the weight, which share a scale.

FP4 weights times a power of two from 2**-5 to 2**6 are exact in e4m3 (`fp4_hopper`). The remaining factor of their
scales is one power of two per weight row, which multiplies the sum (`row_exponents`).

Loads are in `experts_hopper_loads`, weights in registers in `experts_hopper_weights`, and stores in
`experts_hopper_output`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp4_hopper import HIGH, HIGH_STEP, LOW, LOW_STEP
from deepseek_attn.kernels.common.gluon import arrive_alone, barrier, reinterpret
from deepseek_attn.kernels.moe.experts_hopper_loads import (
    ExpertBuffers,
    ExpertRowTiles,
    load_rows,
    load_weights,
    tile_of,
)
from deepseek_attn.kernels.moe.experts_hopper_output import store_part
from deepseek_attn.kernels.moe.experts_hopper_weights import (
    TOP,
    exponents,
    fp4_words,
    fp8_weight,
    left_factor,
    scale_layout,
    stored_pair,
    weight_powers,
)
from deepseek_attn.kernels.moe.plan import QUAD

_QUAD = gl.constexpr(QUAD)
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_WEIGHT = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
_BYTES = gl.constexpr(gl.NVMMASharedLayout(0, 8, 2))


class ExpertScales(NamedTuple):
    """Scales of one or two stacks that threads load; None for other formats and for a missing second stack.

    Attributes:
        a_scale, b_scale: of FP8, float32 ``[E, ceil(N / 128), K / 128]``.
        a_exponent, b_exponent: of FP4, the exponents of its rows, uint8 ``[E, N]``.
    """

    a_scale: Any
    b_scale: Any
    a_exponent: Any
    b_exponent: Any


class ExpertRing(NamedTuple):
    """Position of a warpgroup in the ring of stages, int32; it continues from job to job.

    Attributes:
        block: number of blocks of 128 channels so far, if a stage has one block.
        stage, phase: the next stage of two blocks: its index, its barrier's phase.
        slot: of the scales of the next `QUAD` blocks of an FP4 weight, 0 or 1.
    """

    block: Any
    stage: Any
    phase: Any
    slot: Any


@gluon.jit
def _release(buffers, n, STAGES: gl.constexpr):
    """Lets the stage of block ``n - 1`` be overwritten; called when weights that were loaded later are in use.

    A barrier does not wait for loads from shared memory; only the use of a result waits. Loads of a warp end in order,
    so the scales of block ``n - 1`` have arrived.
    """
    barrier()  # until all threads of the warpgroup have come here
    mbarrier.arrive(buffers.empty.index((n + STAGES - 1) % STAGES), pred=n > 0)


@gluon.jit
def _part_scale(acc, buffers, part, block: gl.constexpr = 0):
    """Scales of the rows of a part of a tile, for a block of its stage."""
    SCALES: gl.constexpr = buffers.scales.shape[2]
    BLOCKS: gl.constexpr = buffers.scales.shape[1]
    scales = reinterpret(buffers.scales.index(part), gl.float32, [BLOCKS * SCALES], _FLAT)
    scales = scales.slice(block * SCALES, acc.shape[1])
    return scales.load(gl.SliceLayout(0, acc.type.layout))[None, :]


@gluon.jit
def _add_part(acc, product, x_scale, factor):
    """``acc`` plus the product of a part of a tile under its scales."""
    if factor is not None:
        x_scale = x_scale * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    return acc + product * x_scale


@gluon.jit
def _bases(exponent):
    """Bytes of ``2 ** (TOP - exponent)`` of each row, for `fp4_to_fp8`: times it, a row's largest scale is 2 ** TOP."""
    shift = TOP - exponent.to(gl.int32)
    return (LOW + shift * LOW_STEP)[:, None], (HIGH + shift * HIGH_STEP)[:, None]


@gluon.jit
def _bytes_of(powers, base):
    """Bytes of the power of two in the lowest byte of `weight_powers`, for `fp4_to_fp8`."""
    low, high = base
    power = powers & 255
    return power * LOW_STEP + low, power * HIGH_STEP + high


@gluon.jit
def _sum_blocks(
    expert, row_block, exponent, ring, scales, buffers, SIZE: gl.constexpr, WARPGROUP: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """Sums over all channels where a stage has one block: (parts ``[64, PART]``, the last part, the ring behind)."""
    N: gl.constexpr = TILING.N
    FP4: gl.constexpr = TILING.FP4
    GATED: gl.constexpr = TILING.GATED
    PART: gl.constexpr = TILING.TILES.part
    PARTS: gl.constexpr = (SIZE + PART - 1) // PART
    REST: gl.constexpr = SIZE - (PARTS - 1) * PART
    STAGES: gl.constexpr = TILING.STAGES
    OVERLAP: gl.constexpr = TILING.TILES.overlap
    BLOCKS: gl.constexpr = TILING.K // 128
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    LAST_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, LAST_MMA)
    channel = (row_block * TILING.TILES.warpgroups + WARPGROUP) * (32 if GATED else 64)
    all_x = reinterpret(buffers.x, gl.float8e4nv, [STAGES * TILING.PARTS, PART, 128], _WEIGHT)
    if FP4:
        base = _bases(exponent)
        powers = gl.zeros([64, 4], gl.int32, layout=scale_layout(GATED))
    else:
        # scales of the next four blocks are in registers: their loads end long before they are used
        half = gl.arange(0, 64, layout=ROW)
        half = half % 16 // 8 if GATED else half * 0
        GRID: gl.constexpr = (N + 127) // 128
        scale_block = (expert.to(gl.int64) * GRID + gl.minimum(channel // 128, GRID - 1)) * BLOCKS
        next_a = ()
        next_b = ()
        for i in gl.static_range(4):
            next_a += (gl.load(scales.a_scale + scale_block + i),)
            next_b += (gl.load((scales.b_scale if GATED else scales.a_scale) + scale_block + i),)
    zeros = gl.zeros([64, PART], gl.float32, layout=MMA)
    last_zeros = gl.zeros([64, REST], gl.float32, layout=LAST_MMA)
    acc = ()
    for _i in gl.static_range(PARTS - 1):
        acc += (zeros,)
    last_acc = last_zeros
    n = ring.block
    slot = ring.slot
    for block in range(BLOCKS):
        stage = n % STAGES
        first = stage * TILING.PARTS
        factor = None
        low = None
        high = None
        # wait until both loading warps have filled the stage
        mbarrier.wait(buffers.full.index(stage), n // STAGES & 1)
        if FP4:
            # a register holds the scales of four blocks, the next block's in the lowest byte
            if block % _QUAD == 0:
                powers = weight_powers(buffers, slot if TILING.HALF_QUAD else n // _QUAD % 2, WARPGROUP, TILING)
                slot ^= 1
            low, high = _bytes_of(powers, base)
            powers = powers >> 8
        else:
            factor = gl.where(half > 0, next_b[0], next_a[0])
            following = scale_block + gl.minimum(block + 4, BLOCKS - 1)
            next_a = (next_a[1], next_a[2], next_a[3], gl.load(scales.a_scale + following))
            next_b = (
                next_b[1], next_b[2], next_b[3], gl.load((scales.b_scale if GATED else scales.a_scale) + following)
            )  # fmt: skip
        left = left_factor(fp8_weight(buffers, stage, low, high, WARPGROUP, TILING), TILING)
        new = ()
        if PARTS > 1:
            part_w = gl.convert_layout(left, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)
            x = all_x.index(first).permute((1, 0))
            product = warpgroup_mma(part_w, x, zeros, use_acc=False, is_async=True)
            for i in gl.static_range(1, PARTS - 1):
                x = all_x.index(first + i).permute((1, 0))
                x_scale = _part_scale(zeros, buffers, first + i - 1)
                if OVERLAP:
                    # start a part's product; meanwhile wait for the previous part's product and add it up
                    following_product = warpgroup_mma(part_w, x, zeros, use_acc=False, is_async=True)
                    product = warpgroup_mma_wait(1, deps=[product])
                    new += (_add_part(acc[i - 1], product, x_scale, factor),)
                    product = following_product
                else:
                    # one product at a time: the registers do not suffice for two
                    product = warpgroup_mma_wait(0, deps=[product])
                    new += (_add_part(acc[i - 1], product, x_scale, factor),)
                    product = warpgroup_mma(part_w, x, zeros, use_acc=False, is_async=True)
            if not OVERLAP:
                x_scale = _part_scale(zeros, buffers, first + PARTS - 2)
                product = warpgroup_mma_wait(0, deps=[product])
                new += (_add_part(acc[PARTS - 2], product, x_scale, factor),)
        last_w = gl.convert_layout(left, gl.DotOperandLayout(0, LAST_MMA, 4), assert_trivial=True)
        x = all_x.index(first + PARTS - 1).slice(0, REST).permute((1, 0))
        last_product = warpgroup_mma(last_w, x, last_zeros, use_acc=False, is_async=True)
        # frees the stage of the block before: the weights of this block, loaded later, are in use
        _release(buffers, n, STAGES)
        if OVERLAP and PARTS > 1:
            x_scale = _part_scale(zeros, buffers, first + PARTS - 2)
            product = warpgroup_mma_wait(1, deps=[product])
            new += (_add_part(acc[PARTS - 2], product, x_scale, factor),)
        x_scale = _part_scale(last_zeros, buffers, first + PARTS - 1)
        last_product = warpgroup_mma_wait(0, deps=[last_product])
        last_acc = _add_part(last_acc, last_product, x_scale, factor)
        acc = new
        n += 1
    return acc, last_acc, ExpertRing(n, ring.stage, ring.phase, slot)


@gluon.jit
def _sum_pairs(exponent, ring, buffers, SIZE: gl.constexpr, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """Sums over all channels where a stage has two blocks of an FP4 weight: (sums ``[64, SIZE]``, the ring after them).

    A block is converted while the previous block is multiplied.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    all_x = reinterpret(buffers.x, gl.float8e4nv, [2 * TILING.STAGES, TILING.TILES.part, 128], _WEIGHT)
    base = _bases(exponent)
    powers = gl.zeros([64, 4], gl.int32, layout=scale_layout(TILING.GATED))
    zeros = gl.zeros([64, SIZE], gl.float32, layout=MMA)
    acc = zeros
    stage = ring.stage
    phase = ring.phase
    slot = ring.slot
    for pair in range(TILING.K // 256):
        # wait until both loading warps have filled the stage
        mbarrier.wait(buffers.full.index(stage), phase)
        if pair % (_QUAD // 2) == 0:
            powers = weight_powers(buffers, slot, WARPGROUP, TILING)
            slot ^= 1
        first, second = stored_pair(buffers, stage, WARPGROUP, TILING)
        low, high = _bytes_of(powers, base)
        left = left_factor(fp4_words(first, low, high, TILING), TILING)
        left = gl.convert_layout(left, LEFT, assert_trivial=True)
        x = all_x.index(2 * stage).slice(0, SIZE).permute((1, 0))
        product = warpgroup_mma(left, x, zeros, use_acc=False, is_async=True)
        # convert the second block under the product of the first
        low, high = _bytes_of(powers >> 8, base)
        powers = powers >> 16
        left = left_factor(fp4_words(second, low, high, TILING), TILING)
        left = gl.convert_layout(left, LEFT, assert_trivial=True)
        x = all_x.index(2 * stage + 1).slice(0, SIZE).permute((1, 0))
        x_scale = _part_scale(zeros, buffers, stage, 0)
        second_scale = _part_scale(zeros, buffers, stage, 1)
        if SIZE <= 16:
            second_product = warpgroup_mma(left, x, zeros, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(1, deps=[product])
            acc = _add_part(acc, product, x_scale, None)
        else:  # the registers do not suffice for two products
            product = warpgroup_mma_wait(0, deps=[product])
            acc = _add_part(acc, product, x_scale, None)
            second_product = warpgroup_mma(left, x, zeros, use_acc=False, is_async=True)
        second_product = warpgroup_mma_wait(0, deps=[second_product])
        acc = _add_part(acc, second_product, second_scale, None)
        # everything of the stage has been used, by this thread: the ring counts all threads
        arrive_alone(buffers.empty.index(stage), increment_count=False)
        wraps = stage == TILING.STAGES - 1
        stage = gl.where(wraps, 0, stage + 1)
        phase = phase ^ wraps.to(gl.int32)
    return acc, ExpertRing(ring.block, stage, phase, slot)


@gluon.jit
def _multiply_tile(
    tile, row_block, next_tile, next_row_block, exponent, ring, scales, output, buffers,
    SIZE: gl.constexpr, WARPGROUP: gl.constexpr, TILING: gl.constexpr,
):  # fmt: skip
    """The product of this warpgroup's 64 weight rows with a tile of at most ``SIZE`` routed rows, and its output.

    Returns: the ring after the job, and the exponents of the next job's rows.
    """
    channel = (row_block * TILING.TILES.warpgroups + WARPGROUP) * (32 if TILING.GATED else 64)
    PARTS: gl.constexpr = (SIZE + TILING.TILES.part - 1) // TILING.TILES.part
    if TILING.TILES.channels == 256:
        parts = ()
        last, ring = _sum_pairs(exponent, ring, buffers, SIZE, WARPGROUP, TILING)
    else:
        parts, last, ring = _sum_blocks(
            tile.expert, row_block, exponent, ring, scales, buffers, SIZE, WARPGROUP, TILING
        )
    # loaded before the stores, which hide the latency
    next_exponent = exponents(next_tile.expert, next_row_block, scales, WARPGROUP, TILING)
    for i in gl.static_range(PARTS - 1):
        store_part(parts[i], tile, i * TILING.TILES.part, channel, exponent, output, TILING)
    store_part(last, tile, (PARTS - 1) * TILING.TILES.part, channel, exponent, output, TILING)
    return ring, next_exponent


@gluon.jit
def _multiply_all(tiles, scales, output, buffers, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """This warpgroup's rows of all jobs of this program."""
    SIZES: gl.constexpr = TILING.TILES.sizes
    BLOCKS: gl.constexpr = TILING.ROW_BLOCKS
    if TILING.WAIT:
        gdc_wait()  # wait until the previous launch has written the tiles
    jobs = gl.load(tiles.count) * BLOCKS
    zero = jobs * 0
    job = gl.program_id(0)
    if job < jobs:
        # the tile and the exponents of a job are loaded during the job before
        next_tile = tile_of(tiles, job, TILING)
        exponent = exponents(next_tile.expert, job % BLOCKS, scales, WARPGROUP, TILING)
        ring = ExpertRing(zero, zero, zero, zero)
        for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
            tile = next_tile
            following = job + gl.num_programs(0)
            following = gl.where(following < jobs, following, job)
            next_tile = tile_of(tiles, following, TILING)
            # one branch is taken: each tile size has its own code
            for i in gl.static_range(len(SIZES)):
                if (tile.rows > (SIZES[i - 1] if i > 0 else 0)) & (tile.rows <= SIZES[i]):
                    ring, exponent = _multiply_tile(
                        tile, job % BLOCKS, next_tile, following % BLOCKS, exponent, ring, scales, output, buffers,
                        SIZES[i], WARPGROUP, TILING,
                    )  # fmt: skip


@gluon.jit(do_not_specialize=["capacity"])
def experts_hopper_kernel(
    x_desc,
    x_scale_desc,
    a_desc,
    b_desc,
    a_scale_desc,
    b_scale_desc,
    scales,
    entries,
    capacity,
    count,
    output,
    TILING: gl.constexpr,
):
    """Persistent kernel: all jobs of a product.

    Args:
        x_desc, x_scale_desc: rows in order of expert, FP8 ``[R, K]``, and their scales ``[K / 128, R]``.
        a_desc, b_desc: weights ``[E * N, K]``, FP4 packed; a_scale_desc, b_scale_desc: e8m0 scales of FP4
            ``[E * N, K / 32]``, else None.
        scales: `ExpertScales`. entries, capacity, count: as `ExpertRowTiles`. output: `ExpertOutput`.
        TILING: `plan.HopperExpertTiling`.
    """
    gdc_launch_dependents()  # the next launch may start: it waits for this one where it reads its results
    STAGES: gl.constexpr = TILING.STAGES
    PART: gl.constexpr = TILING.TILES.part
    PARTS: gl.constexpr = TILING.PARTS
    SCALES: gl.constexpr = TILING.SCALES
    GROUPS: gl.constexpr = TILING.TILES.warpgroups
    REGISTERS: gl.constexpr = TILING.REGISTERS
    LOADERS: gl.constexpr = TILING.LOADERS
    BLOCKS: gl.constexpr = TILING.TILES.channels // 128
    BOXES: gl.constexpr = GROUPS if BLOCKS == 1 else 1
    WEIGHTS: gl.constexpr = BOXES * STAGES * (2 if TILING.GATED else 1)
    ROWS: gl.constexpr = (32 if TILING.GATED else 64) * GROUPS // BOXES
    X_BOXES: gl.constexpr = STAGES * BLOCKS * PARTS * PART // TILING.BOX
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if TILING.FP4:
        HALF: gl.constexpr = TILING.TILES.channels // 2
        w_buffer = gl.allocate_shared_memory(gl.uint8, [WEIGHTS, ROWS, HALF], gl.NVMMASharedLayout(HALF, 8, 2))
    else:
        w_buffer = gl.allocate_shared_memory(gl.float8e4nv, [WEIGHTS, ROWS, 128], _WEIGHT)
    if TILING.HALF_QUAD:
        weight_scales = gl.allocate_shared_memory(gl.uint8, [6 * GROUPS, 32, 4 * _QUAD], _BYTES)
    elif TILING.FP4:
        weight_scales = gl.allocate_shared_memory(gl.uint8, [2 * WEIGHTS // STAGES, ROWS, 4 * _QUAD], _BYTES)
    else:
        weight_scales = None
    x_buffer = gl.allocate_shared_memory(gl.float8e4nv, [X_BOXES, TILING.BOX, 128], _WEIGHT)
    scale_buffer = gl.allocate_shared_memory(
        gl.float32, [STAGES * PARTS, BLOCKS, SCALES], gl.NVMMASharedLayout(0, 32, 2)
    )
    # full: both loading warps expect their bytes; empty: a thread of each warpgroup arrives, or all of its threads
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=GROUPS if BLOCKS == 1 else 128 * GROUPS)
    fence_async_shared()  # the TMA sees the barriers only after this
    buffers = ExpertBuffers(w_buffer, weight_scales, x_buffer, scale_buffer, full, empty)
    tiles = ExpertRowTiles(entries, capacity, count)
    # the default partition is the first warpgroup; two more warps load
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply_all, (tiles, scales, output, buffers, 0, TILING)),
                (load_weights, (a_desc, b_desc, a_scale_desc, b_scale_desc, tiles, buffers, TILING)),
                (load_rows, (x_desc, x_scale_desc, tiles, buffers, TILING)),
            ],
            [1, 1],
            [LOADERS, LOADERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_all, (tiles, scales, output, buffers, 0, TILING)),
                (_multiply_all, (tiles, scales, output, buffers, 1, TILING)),
                (load_weights, (a_desc, b_desc, a_scale_desc, b_scale_desc, tiles, buffers, TILING)),
                (load_rows, (x_desc, x_scale_desc, tiles, buffers, TILING)),
            ],
            [4, 1, 1],
            [REGISTERS, LOADERS, LOADERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_all, (tiles, scales, output, buffers, 0, TILING)),
                (_multiply_all, (tiles, scales, output, buffers, 1, TILING)),
                (_multiply_all, (tiles, scales, output, buffers, 2, TILING)),
                (load_weights, (a_desc, b_desc, a_scale_desc, b_scale_desc, tiles, buffers, TILING)),
                (load_rows, (x_desc, x_scale_desc, tiles, buffers, TILING)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, LOADERS, LOADERS],
        )
