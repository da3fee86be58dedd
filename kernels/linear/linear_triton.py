"""Triton device code of `linear` and `grouped_linear`: products of one input with several weights, in one launch.

A program computes ``W x^T`` for a tile of weight rows and a tile of tokens, over all channels or one split of them. The
weight is the left factor: Hopper's tensor cores need at least 64 rows there and as few as 8 on the right, where the
tokens of a decode step are. Split-K partials are added in order by the program that arrives last.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8 import decode_e4m3, quantize_groups


class Inputs(NamedTuple):
    """Pointers to the input's tokens: in a float dtype, in FP8, and the scales of FP8 ones."""

    plain: tl.tensor
    quantized: tl.tensor
    scale: tl.tensor


class Strides(NamedTuple):
    """Elements between tokens of each of the `Inputs` (of ``scale``: between blocks of channels), or between groups."""

    plain: tl.tensor
    quantized: tl.tensor
    scale: tl.tensor


@triton.jit
def _pick(values, firsts: tl.constexpr, tile):
    """The value of the segment that holds ``tile``: segment i starts at tile ``firsts[i]``."""
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
def _multiply(w, x, acc, DTYPE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """``acc + w x^T``, x split into a sum of ``PARTS`` values of ``DTYPE``: three bfloat16 hold a float32."""
    rest = x
    for i in tl.static_range(PARTS):
        term = rest.to(DTYPE)
        acc = tl.dot(w, tl.trans(term), acc, input_precision=PRECISION)
        if i + 1 < PARTS:
            rest = rest.to(tl.float32) - term.to(tl.float32)
    return acc


@triton.jit
def _rows(row, channel, K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of rows ``[n, BLOCK_K]``; zeros past the last channel."""
    if WHOLE:
        return tl.load(row[:, None] + channel[None, :])
    else:
        return tl.load(row[:, None] + channel[None, :], mask=(channel < K)[None, :], other=0.0)


@triton.jit
def _add_block(
    acc, w, block, lane, row, token, start, inputs, strides, scale_ptr,
    K: tl.constexpr, BLOCKS: tl.constexpr, GROUP_ROWS: tl.constexpr, FP8: tl.constexpr, INPUT: tl.constexpr,
    POW2: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``acc`` and the product of one block of channels."""
    channel = block * lane.shape[0] + lane
    if INPUT == "quantized":
        x = tl.load(inputs.quantized + token[:, None] * strides.quantized + channel[None, :])
        x_scale = tl.load(inputs.scale + token + block * strides.scale)
        if not NATIVE_FP8:
            x = decode_e4m3(x, NATIVE_FP8, DTYPE)
    else:
        x = _rows(inputs.plain + token * strides.plain, channel, K, K % lane.shape[0] == 0)
        if INPUT == "quantize":
            x, x_scale = quantize_groups(x.to(tl.float32), POW2, NATIVE_FP8, DTYPE)
    if FP8:
        GROUP: tl.constexpr = lane.shape[0]  # channels of a scale are as many as rows
        if GROUP == 128 and GROUP_ROWS % 128 == 0:
            w_scale = tl.load(scale_ptr + start // 128 * BLOCKS + block)
        else:
            w_scale = tl.load(scale_ptr + row // GROUP * BLOCKS + block)[:, None]
        product = tl.zeros(acc.shape, tl.float32)
        product = _multiply(decode_e4m3(w, NATIVE_FP8, DTYPE), x, product, DTYPE, PARTS, PRECISION)
        if INPUT == "plain":
            acc += product * w_scale
        else:
            acc += product * (w_scale * x_scale[None, :])
    else:
        acc = _multiply(w.to(DTYPE), x, acc, DTYPE, PARTS, PRECISION)
    return acc


@triton.jit
def _finish(
    acc,
    out_ptr,
    partials_ptr,
    counter_ptr,
    start,
    last_row,
    m_tile,
    M,
    tile,
    split,
    out_stride,
    SPLITS: tl.constexpr,
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
            total = tl.load(partial, cache_modifier=".cg")
            for i in tl.static_range(1, SPLITS):
                total += tl.load(partial + i * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(counter_ptr + tile, 0)


@triton.jit
def _program(
    job, m_tile, m_tiles, M, inputs, strides, group_strides, weights, scales, outs, partials_ptr, counter_ptr,
    K: tl.constexpr, SIZES: tl.constexpr, FIRSTS: tl.constexpr, SPLITS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    FP8: tl.constexpr, INPUT: tl.constexpr, POW2: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Split ``job % SPLITS`` of tile ``job // SPLITS`` of the weights of one kind."""
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
        GROUP_TILES: tl.constexpr = (GROUP_ROWS + BLOCK_N - 1) // BLOCK_N
        group = tile // GROUP_TILES
        start = group * GROUP_ROWS + tile % GROUP_TILES * BLOCK_N
        last_row = (group + 1) * GROUP_ROWS - 1
        inputs = Inputs(
            inputs.plain + group.to(tl.int64) * group_strides.plain,
            inputs.quantized + group.to(tl.int64) * group_strides.quantized,
            inputs.scale + group.to(tl.int64) * group_strides.scale,
        )
    # rows and tokens past the end repeat the last one, and are not stored
    row = tl.minimum(start + tl.arange(0, BLOCK_N), last_row)
    weight_row = weight_ptr + row.to(tl.int64) * K
    lane = tl.arange(0, BLOCK_K)
    first = split * SPLIT_BLOCKS
    prefetched = ()
    PREFETCHED: tl.constexpr = EARLY if EARLY < SPLIT_BLOCKS else SPLIT_BLOCKS
    if PDL:
        # weights depend on no kernel: the first are loaded while the kernel before this one still runs
        for i in tl.static_range(PREFETCHED):
            prefetched += (
                _rows(weight_row, (first + i) * BLOCK_K + lane, K, K % BLOCK_K == 0 and BLOCKS % SPLIT_BLOCKS == 0),
            )
        gdc_wait()
    token = tl.minimum(m_tile * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if PDL:
        for i in tl.static_range(PREFETCHED):
            if first + i < BLOCKS:
                acc = _add_block(
                    acc, prefetched[i], first + i, lane, row, token, start, inputs, strides, scale_ptr,
                    K, BLOCKS, GROUP_ROWS, FP8, INPUT, POW2, NATIVE_FP8, DTYPE, PARTS, PRECISION,
                )  # fmt: skip
        first += PREFETCHED
    for block in tl.range(first, tl.minimum(split * SPLIT_BLOCKS + SPLIT_BLOCKS, BLOCKS), num_stages=STAGES):
        w = _rows(weight_row, block * BLOCK_K + lane, K, K % BLOCK_K == 0)
        acc = _add_block(
            acc, w, block, lane, row, token, start, inputs, strides, scale_ptr,
            K, BLOCKS, GROUP_ROWS, FP8, INPUT, POW2, NATIVE_FP8, DTYPE, PARTS, PRECISION,
        )  # fmt: skip
    _finish(
        acc,
        out_ptr,
        partials_ptr,
        counter_ptr,
        start,
        last_row,
        m_tile,
        M,
        tile * m_tiles + m_tile,
        split,
        size,
        SPLITS,
    )


@triton.jit(do_not_specialize=["M"])
def multi_linear_kernel(
    x_ptr,
    q_ptr,
    q_scale_ptr,
    weights,
    scales,
    outs,
    plain_weights,
    plain_outs,
    partials_ptr,
    plain_partials_ptr,
    counter_ptr,
    M,
    x_stride,
    q_stride,
    q_scale_stride,
    x_group_stride,
    q_group_stride,
    q_scale_group_stride,
    K: tl.constexpr,
    SIZES: tl.constexpr,
    FIRSTS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    PLAIN_SIZES: tl.constexpr,
    PLAIN_FIRSTS: tl.constexpr,
    PLAIN_TILES: tl.constexpr,
    PLAIN_SPLITS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    INPUT: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PLAIN_DTYPE: tl.constexpr,
    PLAIN_PARTS: tl.constexpr,
    PLAIN_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8_GROUP: tl.constexpr,
    PLAIN_BLOCK_N: tl.constexpr,
    PLAIN_BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Products with FP8 weights ``SIZES[i] x K``, then with plain ones ``PLAIN_SIZES[i] x K``.

    Weight i of a kind starts at tile ``FIRSTS[i]`` of the kind's ``TILES``. With ``GROUP_ROWS`` the only weight is
    block-diagonal: each group of that many rows has a separate input, ``x_group_stride`` elements after the last.
    ``FP8_GROUP`` channels of an FP8 input, and rows and channels of an FP8 weight, share a scale.
    """
    if PDL:
        gdc_launch_dependents()
    m_tiles = tl.cdiv(M, BLOCK_M)
    m_tile = tl.program_id(0) % m_tiles
    job = tl.program_id(0) // m_tiles
    inputs, strides = Inputs(x_ptr, q_ptr, q_scale_ptr), Strides(x_stride, q_stride, q_scale_stride)
    group_strides = Strides(x_group_stride, q_group_stride, q_scale_group_stride)
    if PLAIN_TILES == 0 or (TILES > 0 and job < TILES * SPLITS):
        _program(
            job, m_tile, m_tiles, M, inputs, strides, group_strides, weights, scales, outs, partials_ptr, counter_ptr,
            K, SIZES, FIRSTS, SPLITS, GROUP_ROWS, True, INPUT, POW2, NATIVE_FP8, DTYPE, PARTS, PRECISION,
            BLOCK_M, BLOCK_N, FP8_GROUP, STAGES, EARLY, PDL,
        )  # fmt: skip
    else:
        _program(
            job - TILES * SPLITS, m_tile, m_tiles, M, inputs, strides, group_strides, plain_weights, plain_outs,
            plain_outs, plain_partials_ptr, counter_ptr + TILES * m_tiles,
            K, PLAIN_SIZES, PLAIN_FIRSTS, PLAIN_SPLITS, 0, False, "plain", POW2, NATIVE_FP8, PLAIN_DTYPE, PLAIN_PARTS,
            PLAIN_PRECISION, BLOCK_M, PLAIN_BLOCK_N, PLAIN_BLOCK_K, STAGES, EARLY, PDL,
        )  # fmt: skip
