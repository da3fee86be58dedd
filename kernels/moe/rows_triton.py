"""Triton device code of `launch_hopper`: rows of pairs in order of expert, and their inputs quantised to FP8.

A pair is a (token, expert) of the routing, numbered ``token * k + i``; with expert -1, it gets no row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8 import quantize_groups


@triton.jit(do_not_specialize=["pairs"])
def count_chunks_kernel(experts_ptr, counts_ptr, pairs, E: tl.constexpr, E_PADDED: tl.constexpr, CHUNK: tl.constexpr):
    """Pairs of each expert in each chunk of ``CHUNK`` pairs: ``counts [chunks, E]``."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    gdc_wait()
    gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    counts = tl.histogram(tl.where(expert < 0, E_PADDED, expert), 2 * E_PADDED)
    bin = tl.arange(0, 2 * E_PADDED)
    tl.store(counts_ptr + tl.program_id(0) * E + bin, counts, mask=bin < E)


@triton.jit(do_not_specialize=["pairs", "capacity", "chunks"])
def place_rows_kernel(
    experts_ptr,
    weights_ptr,
    counts_ptr,
    pair_ptr,
    row_ptr,
    row_weight_ptr,
    tiles_ptr,
    num_tiles_ptr,
    pairs,
    capacity,
    chunks,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
):
    """Gives ``BLOCK`` pairs rows; an expert's rows follow one another in order of pairs, from a multiple of 16 on.

    ``pair_ptr``: the pair of each row; ``row_ptr``: the row of each pair; ``row_weight_ptr``: the weight of each row's
    pair. ``tiles_ptr [3, capacity]``: expert, first row and rows of tiles of at most ``TILE`` rows: those of an expert
    are alike, and multiples of ``GRANULE`` but for the last.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(0) * BLOCK // CHUNK
    expert = tl.arange(0, E_PADDED)
    gdc_wait()
    gdc_launch_dependents()
    mine = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    weight = tl.load(weights_ptr + pair, mask=pair < pairs, other=0)
    count = tl.zeros((E_PADDED,), tl.int32)
    earlier = tl.zeros((E_PADDED,), tl.int32)
    # num_stages: both loops load ahead what later rounds read
    for begin in tl.range(0, chunks, 8, num_stages=4):
        other = begin + tl.arange(0, 8)[:, None]
        inside = (other < chunks) & (expert < E)[None, :]
        counts = tl.load(counts_ptr + other * E + expert[None, :], mask=inside, other=0)
        count += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(other < chunk, counts, 0), 0)
    rank = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.range(chunk * CHUNK, tl.program_id(0) * BLOCK + BLOCK, 32, num_stages=6):
        other = begin + tl.arange(0, 32)
        its = tl.load(experts_ptr + other, mask=other < pairs, other=-1).to(tl.int32)
        rank += tl.sum(((its[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    padded = tl.cdiv(count, 16) * 16
    start = tl.cumsum(padded, 0) - padded
    if tl.program_id(0) == 0:
        size = tl.cdiv(tl.cdiv(count, tl.maximum(tl.cdiv(count, TILE), 1)), GRANULE) * GRANULE
        needed = tl.cdiv(count, tl.maximum(size, 1))
        first = tl.cumsum(needed, 0) - needed
        tl.store(num_tiles_ptr, tl.sum(needed, 0))
        for i in tl.range(0, tl.max(needed, 0)):
            has = i < needed
            tl.store(tiles_ptr + first + i, expert, mask=has)
            tl.store(tiles_ptr + capacity + first + i, start + i * size, mask=has)
            tl.store(tiles_ptr + 2 * capacity + first + i, tl.minimum(size, count - i * size), mask=has)
    row = tl.gather(start + earlier, tl.maximum(mine, 0), 0) + rank
    tl.store(pair_ptr + row, pair, mask=mine >= 0)
    tl.store(row_ptr + pair, row, mask=mine >= 0)
    tl.store(row_weight_ptr + row, weight, mask=mine >= 0)


@triton.jit
def _rows_of_few(experts_ptr, pairs, SLOTS: tl.constexpr, TILE: tl.constexpr, GRANULE: tl.constexpr):
    """What `place_rows_kernel` finds, of at most ``SLOTS`` pairs, by comparing each with each; needs no launch before.

    Returns: by pair its expert, its row, the first row of its expert, the expert's pairs and rows of each of its tiles,
    the number of these, the first of them; the number of tiles if the pair is its expert's first, else 0.
    """
    slot = tl.arange(0, SLOTS)
    expert = tl.load(experts_ptr + slot, mask=slot < pairs, other=-1).to(tl.int32)
    same = (expert[:, None] == expert[None, :]) & (expert >= 0)[:, None]
    rank = tl.sum((same & (slot[None, :] < slot[:, None])).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    size = tl.cdiv(tl.cdiv(count, tl.maximum(tl.cdiv(count, TILE), 1)), GRANULE) * GRANULE
    needed = tl.cdiv(count, tl.maximum(size, 1))
    leads = (rank == 0) & (expert >= 0)
    own_rows, own_tiles = tl.where(leads, tl.cdiv(count, 16) * 16, 0), tl.where(leads, needed, 0)
    before = expert[None, :] < expert[:, None]
    start = tl.sum(tl.where(before, own_rows[None, :], 0), 1)
    first = tl.sum(tl.where(before, own_tiles[None, :], 0), 1)
    return expert, start + rank, start, count, size, first, own_tiles


@triton.jit(do_not_specialize=["pairs", "capacity"])
def prepare_few_rows_kernel(
    x_ptr,
    experts_ptr,
    weights_ptr,
    pair_ptr,
    row_ptr,
    row_weight_ptr,
    tiles_ptr,
    num_tiles_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    num_rows,
    pairs,
    capacity,
    K: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    POW2: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
):
    """`count_kernel`, `place_rows_kernel` and `prepare_rows_kernel` in one, for at most ``SLOTS`` pairs.

    Every program finds the rows of its token's pairs by itself; the first writes them for the products.
    """
    source = tl.program_id(0).to(tl.int64)
    gdc_wait()
    gdc_launch_dependents()
    slot = tl.arange(0, SLOTS)
    expert, row, start, count, size, first, own_tiles = _rows_of_few(experts_ptr, pairs, SLOTS, TILE, GRANULE)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        known = expert >= 0
        tl.store(pair_ptr + row, slot, mask=known)
        tl.store(row_ptr + slot, row, mask=known)
        tl.store(row_weight_ptr + row, tl.load(weights_ptr + slot, mask=known, other=0), mask=known)
        tl.store(num_tiles_ptr, tl.sum(own_tiles, 0))
        for i in tl.range(0, tl.max(own_tiles, 0)):
            has = i < own_tiles
            tl.store(tiles_ptr + first + i, expert, mask=has)
            tl.store(tiles_ptr + capacity + first + i, start + i * size, mask=has)
            tl.store(tiles_ptr + 2 * capacity + first + i, tl.minimum(size, count - i * size), mask=has)
    values, scale, channel, group = _quantized_row(x_ptr + source * x_stride, K, BLOCK, POW2)
    for i in tl.static_range(TOPK):
        mine = slot == tl.program_id(0) * TOPK + i
        known = tl.max(tl.where(mine, expert, -1), 0) >= 0
        to = tl.sum(tl.where(mine, row, 0), 0).to(tl.int64)
        tl.store(out_ptr + to * K + channel, values, mask=known)
        tl.store(scale_ptr + group * num_rows.to(tl.int64) + to, scale, mask=known)


@triton.jit
def _quantized_row(x_row, K: tl.constexpr, BLOCK: tl.constexpr, POW2: tl.constexpr):
    """(e4m3 values, their scales, channels, groups) of this program's part of a row, in the order of `experts_hopper`.

    A block of 128 channels, as words of 4 channels, is a 4 x 8 matrix; it is stored transposed.
    """
    GROUPS: tl.constexpr = BLOCK // 128
    start = tl.program_id(1) * BLOCK
    channel = start + tl.arange(0, BLOCK)
    x = tl.load(x_row + channel).to(tl.float32)
    values, scale = quantize_groups(tl.reshape(x, (GROUPS, 128)), POW2, True, tl.float8e4nv)
    values = tl.reshape(tl.permute(tl.reshape(values, (GROUPS, 4, 8, 4)), (0, 2, 1, 3)), (BLOCK,))
    return values, scale, channel, start // 128 + tl.arange(0, GROUPS)


@triton.jit
def prepare_rows_kernel(
    x_ptr,
    experts_ptr,
    row_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    num_rows,
    K: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    POW2: tl.constexpr,
):
    """Quantises rows of x ``[T, K]`` to e4m3 for `experts_hopper`: scales ``[K / 128, num_rows]`` per 128 channels.

    With ``TOPK``, a row of x is written to the rows of its pairs, else to its own.
    """
    source = tl.program_id(0).to(tl.int64)
    gdc_wait()
    gdc_launch_dependents()
    known = ()
    rows = ()
    for i in tl.static_range(TOPK):
        is_local = tl.load(experts_ptr + source * TOPK + i) >= 0
        known += (is_local,)
        rows += (tl.load(row_ptr + source * TOPK + i, mask=is_local, other=0).to(tl.int64),)
    values, scale, channel, group = _quantized_row(x_ptr + source * x_stride, K, BLOCK, POW2)
    scale_ptr += group * num_rows.to(tl.int64)
    if TOPK > 0:
        for i in tl.static_range(TOPK):
            tl.store(out_ptr + rows[i] * K + channel, values, mask=known[i])
            tl.store(scale_ptr + rows[i], scale, mask=known[i])
    else:
        tl.store(out_ptr + source * K + channel, values)
        tl.store(scale_ptr + source, scale)
