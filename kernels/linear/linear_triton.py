"""Triton device code of `linear` and `grouped_linear`: products of one input with several weights, in one launch.

A program computes ``W x^T`` for a tile of weight rows and a tile of tokens, over all channels or one split of them. The
weight is the left factor: Hopper's tensor cores need at least 64 rows on the left, and only 8 on the right, which holds
the tokens of a decode step. The program that arrives last adds the split-K partial sums in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8_triton import decode_e4m3, quantize_groups
from deepseek_attn.kernels.linear.problem import LinearTiles, WeightTiles


class LinearInputs(NamedTuple):
    """The tokens that programs read, in a float dtype and in FP8.

    Attributes:
        plain: ``[M, groups * K]`` of a float dtype.
        quantized: FP8 ``[M, K]`` or ``[groups, M, K]``; scale: float32, consecutive tokens of a block of channels.
        plain_stride, quantized_stride: elements from a token to the next; scale_stride: from a block of channels.
        plain_group_stride, quantized_group_stride, scale_group_stride: elements from a group to the next.
    """

    plain: Any
    quantized: Any
    scale: Any
    plain_stride: Any
    quantized_stride: Any
    scale_stride: Any
    plain_group_stride: Any
    quantized_group_stride: Any
    scale_group_stride: Any


class SplitScratch(NamedTuple):
    """Float32 split-K partial sums of FP8 and of plain tiles, or None; counters of partial sums that have arrived."""

    fp8: Any
    plain: Any
    counters: Any


@dataclass(frozen=True)
class WeightFormat:
    """Constants of the weights of one kind in a launch.

    Attributes:
        TILES: tiles of the weights; CHANNELS: that a program reads at once, of a tile's rows.
        FP8: weights are FP8; ``CHANNELS`` rows and channels share a scale.
        INPUT: "plain"; "quantized": FP8 from an earlier launch; "quantize": programs quantise as they read.
        DTYPE, PARTS, PRECISION: as in `DotFormat`, ``DTYPE`` as Triton names it.
    """

    TILES: WeightTiles
    CHANNELS: int
    FP8: bool
    INPUT: str
    DTYPE: tl.dtype
    PARTS: int
    PRECISION: str | None


@dataclass(frozen=True)
class LinearConstants:
    """Constants of a launch.

    Attributes:
        K: channels of the input, of a group; CONFIG: `LinearTiles`.
        POW2: scales of inputs that programs quantise are powers of two.
        NATIVE_FP8, PDL: as in `GPU`.
    """

    K: int
    CONFIG: LinearTiles
    POW2: bool
    NATIVE_FP8: bool
    PDL: bool


@triton.jit
def _pick(values, firsts: tl.constexpr, tile):
    """The value of the weight that holds ``tile``: weight i starts at tile ``firsts[i]``."""
    value = values[0]
    for i in tl.static_range(1, len(firsts)):
        value = tl.where(tile >= firsts[i], values[i], value)
    return value


@triton.jit
def _pick_constant(values: tl.constexpr, firsts: tl.constexpr, tile):
    value = tl.full((), values[0], tl.int32)
    for i in tl.static_range(1, len(firsts)):
        value = tl.where(tile >= firsts[i], values[i], value)
    return value


@triton.jit
def _multiply(w, x, acc, FORMAT: tl.constexpr):
    """``acc + w x^T``, x split into a sum of ``PARTS`` values of ``DTYPE``: three bfloat16 hold a float32."""
    PARTS: tl.constexpr = FORMAT.PARTS
    DTYPE: tl.constexpr = FORMAT.DTYPE
    rest = x
    for i in tl.static_range(PARTS):
        term = rest.to(DTYPE)
        acc = tl.dot(w, tl.trans(term), acc, input_precision=FORMAT.PRECISION)
        if i + 1 < PARTS:
            rest = rest.to(tl.float32) - term.to(tl.float32)  # remainder behind the parts so far
    return acc


@triton.jit
def _rows(row, channel, K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of rows ``[n, channels]``; zeros past the last channel."""
    if WHOLE:
        return tl.load(row[:, None] + channel[None, :])
    else:
        return tl.load(row[:, None] + channel[None, :], mask=(channel < K)[None, :], other=0.0)


@triton.jit
def _add_block(
    acc, w, block, lane, row, token, start, inputs, scale_ptr, CONSTANTS: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """``acc`` and the product of one block of channels of the weight, ``w``, and of the input, which is read here."""
    K: tl.constexpr = CONSTANTS.K
    POW2: tl.constexpr = CONSTANTS.POW2
    NATIVE_FP8: tl.constexpr = CONSTANTS.NATIVE_FP8
    DTYPE: tl.constexpr = FORMAT.DTYPE
    INPUT: tl.constexpr = FORMAT.INPUT
    GROUP: tl.constexpr = FORMAT.CHANNELS
    BLOCKS: tl.constexpr = (K + GROUP - 1) // GROUP
    channel = block * GROUP + lane
    if INPUT == "quantized":
        x = tl.load(inputs.quantized + token[:, None] * inputs.quantized_stride + channel[None, :])
        x_scale = tl.load(inputs.scale + token + block * inputs.scale_stride)
        if not NATIVE_FP8:
            x = decode_e4m3(x, NATIVE_FP8, DTYPE)
    else:
        x = _rows(inputs.plain + token * inputs.plain_stride, channel, K, K % GROUP == 0)
        if INPUT == "quantize":
            # a block is one group of channels, so each token of it has one scale
            x, x_scale = quantize_groups(x.to(tl.float32), POW2, NATIVE_FP8, DTYPE)
    if FORMAT.FP8:
        if GROUP == 128 and FORMAT.TILES.GROUP_ROWS % 128 == 0:
            # the rows of a tile share a scale
            w_scale = tl.load(scale_ptr + start // 128 * BLOCKS + block)
        else:
            w_scale = tl.load(scale_ptr + row // GROUP * BLOCKS + block)[:, None]
        # a block's sum is scaled once, before it is added to the sum of earlier blocks
        product = tl.zeros(acc.shape, tl.float32)
        product = _multiply(decode_e4m3(w, NATIVE_FP8, DTYPE), x, product, FORMAT)
        if INPUT == "plain":
            acc += product * w_scale
        else:
            acc += product * (w_scale * x_scale[None, :])
    else:
        acc = _multiply(w.to(DTYPE), x, acc, FORMAT)
    return acc


@triton.jit
def _finish(
    acc, out_ptr, partials_ptr, counter_ptr, start, last_row, m_tile, M, tile, split, out_stride, SPLITS: tl.constexpr
):
    """Stores a tile. Of several split-K partials, the last to arrive adds them in order and resets the counter."""
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    row = start + tl.arange(0, BLOCK_N)
    token = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    out = out_ptr + token[None, :].to(tl.int64) * out_stride + row[:, None]
    inside = (row <= last_row)[:, None] & (token < M)[None, :]
    if SPLITS == 1:
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        entry = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        partial = partials_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M) + entry
        tl.store(partial + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # the whole program's partial is written before its arrival is counted
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            # all partials are in memory; the L1 may hold older values of these addresses, so the L2 is read
            total = tl.load(partial, cache_modifier=".cg")
            for i in tl.static_range(1, SPLITS):
                total += tl.load(partial + i * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(counter_ptr + tile, 0)  # for the next launch


@triton.jit
def _program(
    job, m_tile, m_tiles, M, inputs, weights, scales, outs, partials_ptr, counter_ptr,
    CONSTANTS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Split ``job % SPLITS`` of tile ``job // SPLITS`` of the weights of one kind."""
    K: tl.constexpr = CONSTANTS.K
    BLOCK_M: tl.constexpr = CONSTANTS.CONFIG.tokens
    BLOCK_N: tl.constexpr = CONSTANTS.CONFIG.rows
    BLOCK_K: tl.constexpr = FORMAT.CHANNELS
    TILES: tl.constexpr = FORMAT.TILES
    SIZES: tl.constexpr = TILES.SIZES
    FIRSTS: tl.constexpr = TILES.FIRSTS
    SPLITS: tl.constexpr = TILES.SPLITS
    GROUP_ROWS: tl.constexpr = TILES.GROUP_ROWS
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SPLIT_BLOCKS: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    tile = job // SPLITS
    split = job % SPLITS
    weight_ptr = tl.multiple_of(_pick(weights, FIRSTS, tile), 16)
    scale_ptr = _pick(scales, FIRSTS, tile)
    out_ptr = tl.multiple_of(_pick(outs, FIRSTS, tile), 16)
    size = _pick_constant(SIZES, FIRSTS, tile)
    start = (tile - _pick_constant(FIRSTS, FIRSTS, tile)) * BLOCK_N
    last_row = size - 1
    if GROUP_ROWS > 0:
        # a tile's rows lie in one diagonal block, which has an input of its own
        GROUP_TILES: tl.constexpr = (GROUP_ROWS + BLOCK_N - 1) // BLOCK_N
        group = tile // GROUP_TILES
        start = group * GROUP_ROWS + tile % GROUP_TILES * BLOCK_N
        last_row = (group + 1) * GROUP_ROWS - 1
        inputs = LinearInputs(
            inputs.plain + group.to(tl.int64) * inputs.plain_group_stride,
            inputs.quantized + group.to(tl.int64) * inputs.quantized_group_stride,
            inputs.scale + group.to(tl.int64) * inputs.scale_group_stride,
            inputs.plain_stride,
            inputs.quantized_stride,
            inputs.scale_stride,
            inputs.plain_group_stride,
            inputs.quantized_group_stride,
            inputs.scale_group_stride,
        )
    # rows and tokens past the end repeat the last one, and are not stored
    row = tl.minimum(start + tl.arange(0, BLOCK_N), last_row)
    weight_row = weight_ptr + row.to(tl.int64) * K
    lane = tl.arange(0, BLOCK_K)
    first = split * SPLIT_BLOCKS
    prefetched = ()
    EARLY: tl.constexpr = CONSTANTS.CONFIG.prefetched_blocks
    PREFETCHED: tl.constexpr = EARLY if EARLY < SPLIT_BLOCKS else SPLIT_BLOCKS
    if CONSTANTS.PDL:
        # weights depend on no kernel: the first are loaded while the kernel before this one still runs
        for i in tl.static_range(PREFETCHED):
            prefetched += (
                _rows(weight_row, (first + i) * BLOCK_K + lane, K, K % BLOCK_K == 0 and BLOCKS % SPLIT_BLOCKS == 0),
            )
        gdc_wait()  # until the previous kernel has written the input
    token = tl.minimum(m_tile * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if CONSTANTS.PDL:
        for i in tl.static_range(PREFETCHED):
            if first + i < BLOCKS:
                acc = _add_block(
                    acc, prefetched[i], first + i, lane, row, token, start, inputs, scale_ptr, CONSTANTS, FORMAT
                )
        first += PREFETCHED
    # the later blocks, STAGES of them in flight
    for block in tl.range(
        first, tl.minimum(split * SPLIT_BLOCKS + SPLIT_BLOCKS, BLOCKS), num_stages=CONSTANTS.CONFIG.stages
    ):
        w = _rows(weight_row, block * BLOCK_K + lane, K, K % BLOCK_K == 0)
        acc = _add_block(acc, w, block, lane, row, token, start, inputs, scale_ptr, CONSTANTS, FORMAT)
    tile_number = tile * m_tiles + m_tile
    _finish(acc, out_ptr, partials_ptr, counter_ptr, start, last_row, m_tile, M, tile_number, split, size, SPLITS)


@triton.jit(do_not_specialize=["M"])
def multi_linear_kernel(
    inputs,
    weights,
    scales,
    outs,
    plain_weights,
    plain_outs,
    scratch,
    M,
    CONSTANTS: tl.constexpr,
    FP8: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Products of ``M`` tokens with FP8 weights, then with plain ones; a program computes a split of a tile.

    Args:
        inputs: `LinearInputs`.
        weights, scales, outs: tuples by FP8 weight: ``[N, K]``, its scales and output ``[M, N]``.
        plain_weights, plain_outs: tuples by plain weight.
        scratch: `SplitScratch`.
        CONSTANTS: `LinearConstants`; FP8, PLAIN: `WeightFormat` of either kind.
    """
    if CONSTANTS.PDL:
        gdc_launch_dependents()  # the next kernel may start to read its weights
    m_tiles = tl.cdiv(M, CONSTANTS.CONFIG.tokens)
    m_tile = tl.program_id(0) % m_tiles
    job = tl.program_id(0) // m_tiles
    TILES: tl.constexpr = FP8.TILES.TILES
    JOBS: tl.constexpr = TILES * FP8.TILES.SPLITS
    PLAIN_TILES: tl.constexpr = PLAIN.TILES.TILES
    if PLAIN_TILES == 0 or (TILES > 0 and job < JOBS):
        _program(job, m_tile, m_tiles, M, inputs, weights, scales, outs, scratch.fp8, scratch.counters, CONSTANTS, FP8)
    else:
        # counters of unquantised tiles follow the counters of FP8 tiles
        _program(
            job - JOBS, m_tile, m_tiles, M, inputs, plain_weights, plain_outs, plain_outs, scratch.plain,
            scratch.counters + TILES * m_tiles, CONSTANTS, PLAIN,
        )  # fmt: skip
