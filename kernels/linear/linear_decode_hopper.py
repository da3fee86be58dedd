"""Gluon device code of `linear_decode_hopper_kernel`: up to 16 tokens and large FP8 weights on Hopper's tensor cores.

Reading the weights takes all of the time, so one warp does nothing else: it streams them through a ring of stages in
shared memory, from one job to the next. It never waits for the previous kernel, because weights do not depend on it.
A warpgroup waits for the previous kernel, puts the whole input of a job into shared memory (an unquantised input is
quantised there) with the scales of each block's products, and multiplies.

A job is a tile of ``ROWS`` weight rows, over all channels or one split of them. Stages hold 16 KiB, not less: each has
two barriers, which take 0.1 us to set up before a program's first load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8_hopper import fp8_scales, to_fp8
from deepseek_attn.kernels.common.gluon import barrier, copy_to_shared, reinterpret
from deepseek_attn.kernels.common.plans import cdiv, next_power_of_2
from deepseek_attn.kernels.linear.linear_hopper_products import QuantizedOutput, TilePart, finish
from deepseek_attn.kernels.linear.linear_hopper_weights import load_weight, num_jobs, pick, pick_constant, rows_of
from deepseek_attn.kernels.linear.problem import LinearDecodeTiles, WeightTiles

_BYTES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_SCALES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@dataclass(frozen=True)
class DecodeTiling:
    """Constants of a launch.

    Attributes:
        K: channels of the input.
        CONFIG: `LinearDecodeTiles`; TILES: tiles of the weights.
        QUANTIZED: the input is FP8 with scales; otherwise each program quantises its own input, of up to 8 tokens.
        POW2: scales of FP8 values are powers of two.
    """

    K: int
    CONFIG: LinearDecodeTiles
    TILES: WeightTiles
    QUANTIZED: bool
    POW2: bool

    @property
    def SPLIT_BLOCKS(self) -> int:
        """Blocks of 128 channels of a job, a multiple of a stage's."""
        return cdiv(self.K // 128, self.TILES.SPLITS)

    @property
    def INPUT_BLOCKS(self) -> int:
        """Blocks that the memory of a job's input holds."""
        return next_power_of_2(self.SPLIT_BLOCKS)


class DecodeInput(NamedTuple):
    """The input's tokens, elements from one to the next and from one group to the next; scales ``[K / 128, M]``."""

    tokens: Any
    stride: Any
    group_stride: Any
    scale: Any
    scale_stride: Any


class DecodeBuffers(NamedTuple):
    """Shared memory: blocks of weight, barriers of full and empty stages; blocks of a job's input, and their scales."""

    weight: Any
    full: Any
    empty: Any
    x: Any
    scales: Any


@gluon.jit
def _load_weights(jobs, descs, buffers, TILING: gl.constexpr):
    """Streams the weights of all jobs of this program; runs on one warp."""
    TILES: gl.constexpr = TILING.TILES
    SPLITS: gl.constexpr = TILES.SPLITS
    STAGES: gl.constexpr = TILING.CONFIG.stages
    COUNT: gl.constexpr = TILING.CONFIG.stage_blocks
    BLOCKS: gl.constexpr = TILING.K // 128
    job = gl.program_id(0)
    n = job * 0
    for _i in range(num_jobs(job, jobs)):
        tile = job // SPLITS
        first = job % SPLITS * TILING.SPLIT_BLOCKS
        row, _last, _group = rows_of(tile, TILES, TILING.CONFIG.rows)
        for block in range(first, gl.minimum(first + TILING.SPLIT_BLOCKS, BLOCKS), COUNT):
            stage = n % STAGES
            full = buffers.full.index(stage)
            # until the warpgroup has multiplied the blocks that were in this stage
            mbarrier.wait(buffers.empty.index(stage), (n // STAGES & 1) ^ 1)
            mbarrier.expect(full, COUNT * TILING.CONFIG.rows * 128)
            for i in gl.static_range(COUNT):
                w = buffers.weight.index(stage * COUNT + i)
                load_weight(descs, tile, row, block + i, full, w, TILES, True, gl.float8e4nv)
            n += 1
        job += gl.num_programs(0)


@gluon.jit
def _copy_input(first, end, group, scale_row, M, x, buffers, TILING: gl.constexpr):
    """Copies the quantised input of blocks ``first`` to ``end`` to shared memory, and the scales of their products."""
    TOKENS: gl.constexpr = TILING.CONFIG.tokens
    BLOCKS: gl.constexpr = TILING.K // 128
    ROWS: gl.constexpr = TILING.INPUT_BLOCKS * TOKENS
    row = gl.arange(0, ROWS, layout=_SCALES)
    block, token_row = first + row // TOKENS, row % TOKENS
    weight_scale = gl.load(scale_row + block, mask=block < end, other=0.0)
    gdc_wait()  # weights and their scales depend on no kernel
    copied = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY))
    token, copied_block = copied % TOKENS, first + copied // TOKENS
    source = x.tokens + group * x.group_stride + (token * x.stride + copied_block * 128)[:, None] + lane[None, :]
    values = reinterpret(buffers.x, gl.float8e4nv, [ROWS, 128], _BYTES)
    copy_to_shared(values, source, mask=((token < M) & (copied_block < end))[:, None])
    async_copy.commit_group()  # the copy runs while the scales are loaded
    inside = (token_row < M) & (block < end)
    scale = gl.load(x.scale + token_row + (group * BLOCKS + block) * x.scale_stride, mask=inside, other=0.0)
    reinterpret(buffers.scales, gl.float32, [ROWS], _FLAT).store(scale * weight_scale)
    async_copy.wait_group(0)  # this thread's part of the input is in shared memory


@gluon.jit
def _quantize_input(first, end, scale_row, M, x, buffers, TILING: gl.constexpr):
    """`_copy_input` of an input that is quantised here: a row is one token's block."""
    POW2: gl.constexpr = TILING.POW2
    TOKENS: gl.constexpr = TILING.CONFIG.tokens
    ROWS: gl.constexpr = TILING.INPUT_BLOCKS * TOKENS
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _ROWS))
    lane = gl.arange(0, 128, layout=gl.SliceLayout(0, _ROWS))
    block, token = first + row // TOKENS, row % TOKENS
    weight_scale = gl.load(scale_row + block, mask=block < end, other=0.0)
    gdc_wait()  # until the previous kernel has written the input
    source = x.tokens + (token * x.stride + block * 128)[:, None] + lane[None, :]
    value = gl.load(source, mask=((token < M) & (block < end))[:, None], other=0.0).to(gl.float32)
    scale, inverse, shown = fp8_scales(gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1), POW2)
    value = to_fp8(value, scale[:, None], inverse[:, None], POW2)
    reinterpret(buffers.x, gl.float8e4nv, [ROWS, 128], _BYTES).store(value)
    reinterpret(buffers.scales, gl.float32, [ROWS], _FLAT).store(shown * weight_scale)


@gluon.jit
def _add_stages(acc, n, i, buffers, TILING: gl.constexpr, AT_ONCE: gl.constexpr):
    """``acc`` and the products of some stages from ``n`` on, the first of which has block ``i`` of a job."""
    STAGES: gl.constexpr = TILING.CONFIG.stages
    COUNT: gl.constexpr = TILING.CONFIG.stage_blocks
    PARTS: gl.constexpr = TILING.CONFIG.rows // 64
    MMA: gl.constexpr = acc[0].type.layout
    TOKENS: gl.constexpr = TILING.CONFIG.tokens
    zeros = gl.zeros([64, TOKENS], gl.float32, layout=MMA)
    # until the weights of these stages are in shared memory
    for j in gl.static_range(AT_ONCE):
        mbarrier.wait(buffers.full.index((n + j) % STAGES), (n + j) // STAGES & 1)
    # all products are under way before the first is waited for; each has a fresh accumulator for its own scales
    products = ()
    for j in gl.static_range(AT_ONCE * COUNT):
        x = buffers.x.index(i + j).permute((1, 0))
        w = buffers.weight.index((n + j // COUNT) % STAGES * COUNT + j % COUNT)
        for part in gl.static_range(PARTS):
            products += (warpgroup_mma(w.slice(64 * part, 64), x, zeros, use_acc=False, is_async=True),)
    if len(products) == 1:
        products = (warpgroup_mma_wait(0, deps=products),)
    else:
        products = warpgroup_mma_wait(0, deps=products)
    barrier()  # all four warps have multiplied
    for j in gl.static_range(AT_ONCE):
        mbarrier.arrive(buffers.empty.index((n + j) % STAGES))
    # the products are in registers, so the loads of the next weights run while they are scaled and added
    for j in gl.static_range(AT_ONCE * COUNT):
        scale = buffers.scales.index(i + j).load(gl.SliceLayout(0, MMA))[None, :]
        sums = ()
        for part in gl.static_range(PARTS):
            sums += (acc[part] + products[j * PARTS + part] * scale,)
        acc = sums
    return acc


@gluon.jit
def _multiply_all(jobs, M, x, scales, outs, quantized_output, memory, buffers, TILING: gl.constexpr):
    """The tiles and splits of this program; runs on a warpgroup."""
    BLOCKS: gl.constexpr = TILING.K // 128
    AT_ONCE: gl.constexpr = TILING.CONFIG.stages_at_once
    PARTS: gl.constexpr = TILING.CONFIG.rows // 64
    TILES: gl.constexpr = TILING.TILES
    FIRSTS: gl.constexpr = TILES.FIRSTS
    SIZES: gl.constexpr = TILES.SIZES
    SPLITS: gl.constexpr = TILES.SPLITS
    TOKENS: gl.constexpr = TILING.CONFIG.tokens
    POW2: gl.constexpr = TILING.POW2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    job = gl.program_id(0)
    n = job * 0
    for _i in range(num_jobs(job, jobs)):
        tile = job // SPLITS
        split = job % SPLITS
        first = split * TILING.SPLIT_BLOCKS
        end = gl.minimum(first + TILING.SPLIT_BLOCKS, BLOCKS)
        start, last_row, group = rows_of(tile, TILES, TILING.CONFIG.rows)
        scale_row = pick(scales, FIRSTS, tile) + start // 128 * BLOCKS
        if TILING.QUANTIZED:
            _copy_input(first, end, group, scale_row, M, x, buffers, TILING)
        else:
            _quantize_input(first, end, scale_row, M, x, buffers, TILING)
        fence_async_shared()  # the threads' writes become visible to the tensor cores
        barrier()  # wait until all warps have written their part of the input
        acc = ()
        for _part in gl.static_range(PARTS):
            acc += (gl.zeros([64, TOKENS], gl.float32, layout=MMA),)
        # batches of AT_ONCE stages, then the stages that are left one by one
        stages = (end - first) // TILING.CONFIG.stage_blocks
        whole = stages // AT_ONCE * AT_ONCE
        for i in range(0, whole, AT_ONCE):
            acc = _add_stages(acc, n + i, i * TILING.CONFIG.stage_blocks, buffers, TILING, AT_ONCE)
        for i in range(whole, stages):
            acc = _add_stages(acc, n + i, i * TILING.CONFIG.stage_blocks, buffers, TILING, 1)
        n += stages
        part = TilePart(start, last_row, 0, M, tile, split)
        out = pick(outs, FIRSTS, tile)
        stride = pick_constant(SIZES, FIRSTS, tile)
        finish(acc, out, stride, quantized_output, memory.partials, memory.counters + tile, part, SPLITS, POW2)
        job += gl.num_programs(0)


@gluon.jit(do_not_specialize=["M", "jobs", "quantized_scale_stride"])
def linear_decode_hopper_kernel(
    x,
    w0_desc,
    w1_desc,
    w2_desc,
    scales,
    outs,
    memory,
    M,
    jobs,
    quantized_scale_stride,
    TILING: gl.constexpr,
):
    """Persistent kernel: ``jobs`` tiles and splits of FP8 weights.

    Args:
        x: `DecodeInput`; w0_desc, ...: descriptors of the weights; scales, outs: tuples by weight.
        memory: `HopperMemory`.
        TILING: `DecodeTiling`.
    """
    gdc_launch_dependents()  # the next kernel may start to read its weights
    STAGES: gl.constexpr = TILING.CONFIG.stages
    ROWS: gl.constexpr = TILING.CONFIG.rows
    TOKENS: gl.constexpr = TILING.CONFIG.tokens
    INPUT_BLOCKS: gl.constexpr = TILING.INPUT_BLOCKS
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_buffer = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * TILING.CONFIG.stage_blocks, ROWS, 128], _BYTES)
    x_buffer = gl.allocate_shared_memory(gl.float8e4nv, [INPUT_BLOCKS, TOKENS, 128], _BYTES)
    scale_buffer = gl.allocate_shared_memory(gl.float32, [INPUT_BLOCKS, TOKENS], _FLAT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()  # TMA sees the barriers
    buffers = DecodeBuffers(w_buffer, full, empty, x_buffer, scale_buffer)
    quantized_output = QuantizedOutput(memory.quantized, memory.quantized_scale, quantized_scale_stride)
    gl.warp_specialize(
        [
            (_multiply_all, (jobs, M, x, scales, outs, quantized_output, memory, buffers, TILING)),
            (_load_weights, (jobs, (w0_desc, w1_desc, w2_desc), buffers, TILING)),
        ],
        [1],
        [40],
    )
