"""Gluon device code of `linear_hopper_kernel`: products of one input with several weights on Hopper's tensor cores.

A job is a tile of ``ROWS`` rows of a weight by ``TOKENS`` tokens, over all channels or over a split-K part. One warp
loads blocks of 128 bytes of channels of weight and input, up to ``STAGES`` ahead. It loads the first blocks of the
weight before the previous kernel has ended. One or two warpgroups multiply from shared memory. The weight is the left
factor: tensor cores read 64 of its rows at once. FP8 products have a fresh accumulator for each block, which is scaled
and added to the sum.

Tried on an H200, 128 tokens: keeping the input in shared memory in programs that iterate over tiles of 64 rows of
``wq_b``, 21.3 us instead of 20.0; without loading the input at all 19.5; without adding the products 16.6.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.gluon import load_tile, reinterpret
from deepseek_attn.kernels.linear.linear_hopper_products import (
    LinearBuffers,
    QuantizedOutput,
    TilePart,
    finish,
    sum_of_groups,
    sum_plain,
    sum_scaled,
)
from deepseek_attn.kernels.linear.linear_hopper_weights import (
    PLAIN_LAYOUT,
    load_weight,
    num_jobs,
    pick,
    pick_constant,
    rows_of,
)


class InputTiles(NamedTuple):
    """Tensor descriptors of the input: quantised, its scales, plain."""

    q: Any
    scale: Any
    x: Any


@gluon.jit
def _split_of(job, m_tiles, BLOCKS: gl.constexpr, SPLITS: gl.constexpr):
    """(tile, split, first block of the split, end of the split) of a job, by its number within its kind."""
    SPLIT: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    tile = job // m_tiles // SPLITS
    split = job // m_tiles % SPLITS
    return tile, split, split * SPLIT, gl.minimum(split * SPLIT + SPLIT, BLOCKS)


@gluon.jit
def _load(
    job, jobs, first_job, n, prefetched, m_tiles, inputs, descs, group_stride, buffers,
    TILING: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Loads the blocks of this program's jobs of one kind; returns (job, n, prefetched) for the next kind."""
    DTYPE: gl.constexpr = TILING.DTYPE
    ROWS: gl.constexpr = TILING.CONFIG.rows
    TOKENS: gl.constexpr = TILING.CONFIG.tokens
    STAGES: gl.constexpr = TILING.CONFIG.stages
    SPLITS: gl.constexpr = TILES.SPLITS
    GROUPS: gl.constexpr = TILING.GROUPS
    BLOCKS: gl.constexpr = TILING.K // 128 if FP8 else (TILING.K + 63) // 64
    BYTES: gl.constexpr = (ROWS + TOKENS) * 128 + (4 * TILING.SCALES * GROUPS if FP8 else 0)
    for _i in range(num_jobs(job, jobs)):
        token = job % m_tiles * TOKENS
        tile, _split, first, end = _split_of(job - first_job, m_tiles, BLOCKS, SPLITS)
        row, _last, group = rows_of(tile, TILES, ROWS)
        # of the first job, weights alone fill the ring before the previous kernel has ended: all stages are empty
        prefetched = gl.minimum(prefetched, end - first)
        for i in range(prefetched):
            full = buffers.full.index(i)
            mbarrier.expect(full, BYTES)
            load_weight(descs, tile, row, first + i, full, buffers.weight.index(i), TILES, FP8, DTYPE)
        if prefetched > 0:
            gdc_wait()  # until the previous kernel has written the input
        for block in range(first, end):
            stage = n % STAGES
            full = buffers.full.index(stage)
            if block >= first + prefetched:
                # until all warpgroups have multiplied the block that was in this stage
                mbarrier.wait(buffers.empty.index(stage), (n // STAGES & 1) ^ 1)
                mbarrier.expect(full, BYTES)
                load_weight(descs, tile, row, block, full, buffers.weight.index(stage), TILES, FP8, DTYPE)
            # the bytes of weight, input and scales together complete the phase of the stage's barrier
            if FP8:
                load_tile(inputs.q, [group * group_stride + token, block * 128], full, buffers.x.index(stage))
                for part in gl.static_range(GROUPS):
                    scales = buffers.scales.index(stage * GROUPS + part)
                    load_tile(inputs.scale, [(group * BLOCKS + block) * GROUPS + part, token], full, scales)
            else:
                buffer = reinterpret(buffers.x.index(stage), DTYPE, [TOKENS, 64], PLAIN_LAYOUT)
                load_tile(inputs.x, [token, block * 64], full, buffer)
            n += 1
        prefetched = 0
        job += gl.num_programs(0)
    return job, n, prefetched


@gluon.jit
def _load_all(jobs, M, inputs, fp8_descs, plain_descs, group_stride, buffers, TILING: gl.constexpr):
    """Loads the blocks of all jobs of this program in order; runs on one warp."""
    FP8: gl.constexpr = TILING.FP8
    PLAIN: gl.constexpr = TILING.PLAIN
    m_tiles = (M + TILING.CONFIG.tokens - 1) // TILING.CONFIG.tokens
    fp8_jobs = m_tiles * FP8.TILES * FP8.SPLITS
    job = gl.program_id(0)
    n = job * 0
    prefetched = n + TILING.CONFIG.stages  # blocks of weights that are loaded before the previous kernel has ended
    if FP8.TILES > 0:
        job, n, prefetched = _load(
            job, fp8_jobs, 0, n, prefetched, m_tiles, inputs, fp8_descs, group_stride, buffers, TILING, FP8, True
        )
    if PLAIN.TILES > 0:
        _load(
            job,
            jobs,
            fp8_jobs,
            n,
            prefetched,
            m_tiles,
            inputs,
            plain_descs,
            group_stride,
            buffers,
            TILING,
            PLAIN,
            False,
        )


@gluon.jit
def _multiply_all(
    jobs, M, scales, outs, plain_outs, quantized_output, memory, buffers,
    WARPGROUP: gl.constexpr, TILING: gl.constexpr,
):  # fmt: skip
    """The part of each tile of this program that belongs to ``WARPGROUP``: some of its rows, or some of its tokens."""
    K: gl.constexpr = TILING.K
    ROWS: gl.constexpr = TILING.CONFIG.rows
    TOKENS: gl.constexpr = TILING.CONFIG.tokens
    WARPGROUPS: gl.constexpr = TILING.CONFIG.warpgroups
    POW2: gl.constexpr = TILING.POW2
    ROW: gl.constexpr = WARPGROUP * TILING.ROW_STEP
    TOKEN: gl.constexpr = WARPGROUP * TILING.TOKEN_STEP
    FP8: gl.constexpr = TILING.FP8
    SIZES: gl.constexpr = FP8.SIZES
    FIRSTS: gl.constexpr = FP8.FIRSTS
    TILES: gl.constexpr = FP8.TILES
    SPLITS: gl.constexpr = FP8.SPLITS
    PLAIN: gl.constexpr = TILING.PLAIN
    PLAIN_SIZES: gl.constexpr = PLAIN.SIZES
    PLAIN_FIRSTS: gl.constexpr = PLAIN.FIRSTS
    PLAIN_SPLITS: gl.constexpr = PLAIN.SPLITS
    m_tiles = (M + TOKENS - 1) // TOKENS
    fp8_jobs = m_tiles * TILES * SPLITS
    job = gl.program_id(0)
    n = job * 0
    gdc_wait()  # outputs and partials may be read by the previous kernel, and counters used
    if TILES > 0:
        for _i in range(num_jobs(job, fp8_jobs)):
            tile, split, first, end = _split_of(job, m_tiles, K // 128, SPLITS)
            start, last_row, _group = rows_of(tile, FP8, ROWS)
            scale_ptr = pick(scales, FIRSTS, tile)
            if TILING.GROUPS > 1:
                acc = sum_of_groups(buffers, n, first, end, scale_ptr, start + ROW, WARPGROUP, TILING)
            else:
                scale_row = scale_ptr + (start + ROW) // 128 * (K // 128)
                acc = sum_scaled(buffers, n, first, end, scale_row, WARPGROUP, TILING)
            number = (tile * m_tiles + job % m_tiles) * WARPGROUPS + WARPGROUP
            counter = memory.counters + number
            part = TilePart(start + ROW, last_row, job % m_tiles * TOKENS + TOKEN, M, number, split)
            out = pick(outs, FIRSTS, tile)
            stride = pick_constant(SIZES, FIRSTS, tile)
            finish(acc, out, stride, quantized_output, memory.partials, counter, part, SPLITS, POW2)
            n += end - first  # the stages go on from one job to the next
            job += gl.num_programs(0)
    if PLAIN.TILES > 0:
        for _i in range(num_jobs(job, jobs)):
            tile, split, first, end = _split_of(job - fp8_jobs, m_tiles, (K + 63) // 64, PLAIN_SPLITS)
            start, last_row, _group = rows_of(tile, PLAIN, ROWS)
            acc = sum_plain(buffers, n, first, end, WARPGROUP, TILING)
            number = (tile * m_tiles + job % m_tiles) * WARPGROUPS + WARPGROUP
            counter = memory.counters + m_tiles * TILES * WARPGROUPS + number  # behind the counters of FP8 tiles
            part = TilePart(start + ROW, last_row, job % m_tiles * TOKENS + TOKEN, M, number, split)
            out = pick(plain_outs, PLAIN_FIRSTS, tile)
            stride = pick_constant(PLAIN_SIZES, PLAIN_FIRSTS, tile)
            finish(
                acc,
                out,
                stride,
                QuantizedOutput(None, None, 0),
                memory.plain_partials,
                counter,
                part,
                PLAIN_SPLITS,
                POW2,
            )
            n += end - first
            job += gl.num_programs(0)


@gluon.jit(do_not_specialize=["M", "jobs", "group_stride", "quantized_scale_stride"])
def linear_hopper_kernel(
    q_desc,
    scale_desc,
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
    p0_desc,
    p1_desc,
    p2_desc,
    p3_desc,
    p4_desc,
    scales,
    outs,
    plain_outs,
    memory,
    M,
    jobs,
    group_stride,
    quantized_scale_stride,
    TILING: gl.constexpr,
):
    """Persistent kernel: ``jobs`` tiles and splits of FP8 weights, then of plain ones.

    Triton 3.6 takes descriptors and unspecialised numbers as parameters of their own alone.

    Args:
        q_desc, scale_desc: quantised input ``[M, K]`` and its scales ``[K / 128, M]``; x_desc: the plain one.
        w0_desc, ..., p0_desc, ...: FP8 weights and plain ones.
        scales, outs: tuples by FP8 weight; plain_outs: by plain one.
        memory: `HopperMemory`.
        group_stride: rows from the input of one group to the next; quantized_scale_stride: from a row of scales.
        TILING: `LinearHopperTiling`.
    """
    gdc_launch_dependents()  # the next kernel may start to read its weights
    STAGES: gl.constexpr = TILING.CONFIG.stages
    WARPGROUPS: gl.constexpr = TILING.CONFIG.warpgroups
    ROWS: gl.constexpr = TILING.CONFIG.rows
    TOKENS: gl.constexpr = TILING.CONFIG.tokens
    SCALES: gl.constexpr = TILING.SCALES
    GROUPS: gl.constexpr = TILING.GROUPS
    REGISTERS: gl.constexpr = TILING.REGISTERS
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_buffer = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], BYTES)
    x_buffer = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, 128], BYTES)
    scale_buffer = gl.allocate_shared_memory(gl.float32, [STAGES * GROUPS, 1, SCALES], gl.NVMMASharedLayout(0, 32, 2))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)  # the loading warp's; then it counts bytes
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()  # TMA sees the barriers
    inputs = InputTiles(q_desc, scale_desc, x_desc)
    fp8_descs = (w0_desc, w1_desc, w2_desc)
    plain_descs = (p0_desc, p1_desc, p2_desc, p3_desc, p4_desc)
    buffers = LinearBuffers(w_buffer, x_buffer, scale_buffer, full, empty)
    quantized_output = QuantizedOutput(memory.quantized, memory.quantized_scale, quantized_scale_stride)
    # fmt: off
    # one warp loads blocks into the ring of stages, one or two warpgroups multiply them; each walks over all jobs
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply_all, (jobs, M, scales, outs, plain_outs, quantized_output, memory, buffers, 0, TILING)),
                (_load_all, (jobs, M, inputs, fp8_descs, plain_descs, group_stride, buffers, TILING)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_all, (jobs, M, scales, outs, plain_outs, quantized_output, memory, buffers, 0, TILING)),
                (_multiply_all, (jobs, M, scales, outs, plain_outs, quantized_output, memory, buffers, 1, TILING)),
                (_load_all, (jobs, M, inputs, fp8_descs, plain_descs, group_stride, buffers, TILING)),
            ],
            [4, 1],
            [REGISTERS, 40],
        )
    # fmt: on
