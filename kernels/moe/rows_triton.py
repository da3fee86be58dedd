"""Triton device code around `experts_hopper`: rows of pairs in order of expert, and their inputs quantised to FP8.

A pair is a token and one of its routed experts, numbered ``token * k + i``; a pair with expert -1 has no row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8_triton import quantize_groups


class RowRouting(NamedTuple):
    """The routing ``[T, k]``: experts, -1 for experts of other ranks, and float32 weights.

    ``slots``: int32 ``[E]``, the row of the stacks with each expert; None: expert e is in row e.
    """

    experts: Any
    weights: Any
    slots: Any


class PairRows(NamedTuple):
    """Pairs as rows in order of expert; an expert's rows start at a multiple of 16.

    Attributes:
        pair: int32 ``[rows]``, the pair of each row; row: int32 ``[pairs]``, the row of each pair.
        weight: float32 ``[rows]``, the weight of each row's pair.
        tiles: int32 ``[3, capacity]``: the row of the stacks with the tile's expert, first row and rows of each tile.
            All tiles of an expert but the last have the same size, a multiple of the granule. num_tiles: int32 ``[1]``.
    """

    pair: Any
    row: Any
    weight: Any
    tiles: Any
    num_tiles: Any


class QuantizedTokens(NamedTuple):
    """Tokens, and where they are written as inputs of `experts_hopper_kernel`.

    Attributes:
        x: ``[T, K]`` with ``stride`` between rows.
        quantized: e4m3 ``[num_rows, K]``; scale: float32 ``[K / 128, num_rows]``.
    """

    x: Any
    quantized: Any
    scale: Any
    stride: Any
    num_rows: Any


@triton.jit(do_not_specialize=["pairs"])
def count_chunks_kernel(experts_ptr, counts_ptr, pairs, E: tl.constexpr, CHUNK: tl.constexpr):
    """Pairs of each expert in each chunk of ``CHUNK`` pairs: ``counts [chunks, E]``."""
    E_PADDED: tl.constexpr = triton.next_power_of_2(E)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    gdc_wait()  # until the router has written the experts
    gdc_launch_dependents()
    # pairs of other ranks' experts are counted behind all experts, where nothing is stored
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    counts = tl.histogram(tl.where(expert < 0, E_PADDED, expert), 2 * E_PADDED)
    bin = tl.arange(0, 2 * E_PADDED)
    tl.store(counts_ptr + tl.program_id(0) * E + bin, counts, mask=bin < E)


@triton.jit(do_not_specialize=["pairs", "capacity", "chunks"])
def place_rows_kernel(
    routing,
    counts_ptr,
    rows,
    pairs,
    capacity,
    chunks,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GRANULE: tl.constexpr,
):
    """Gives ``BLOCK`` pairs rows; an expert's rows follow one another in order of pairs, from a multiple of 16 on.

    Args:
        routing: `RowRouting`; counts_ptr: int32 ``[chunks, E]`` of `count_chunks_kernel`; rows: `PairRows`, written.
        TILE: rows of a tile, at most; GRANULE: rows of a tile are multiples of it.
    """
    E_PADDED: tl.constexpr = triton.next_power_of_2(E)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(0) * BLOCK // CHUNK
    expert = tl.arange(0, E_PADDED)
    gdc_wait()  # until the pairs of all chunks are counted
    gdc_launch_dependents()
    pair_expert = tl.load(routing.experts + pair, mask=pair < pairs, other=-1).to(tl.int32)
    weight = tl.load(routing.weights + pair, mask=pair < pairs, other=0)
    # number of pairs per expert: in all chunks, and in earlier chunks
    count = tl.zeros((E_PADDED,), tl.int32)
    earlier = tl.zeros((E_PADDED,), tl.int32)
    # num_stages: both loops load the data of later rounds ahead
    for begin in tl.range(0, chunks, 8, num_stages=4):
        other = begin + tl.arange(0, 8)[:, None]
        inside = (other < chunks) & (expert < E)[None, :]
        counts = tl.load(counts_ptr + other * E + expert[None, :], mask=inside, other=0)
        count += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(other < chunk, counts, 0), 0)
    # within its chunk, a pair is behind the earlier pairs of its expert
    rank = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.range(chunk * CHUNK, tl.program_id(0) * BLOCK + BLOCK, 32, num_stages=6):
        other = begin + tl.arange(0, 32)
        other_expert = tl.load(routing.experts + other, mask=other < pairs, other=-1).to(tl.int32)
        is_earlier = (other_expert[None, :] == pair_expert[:, None]) & (other[None, :] < pair[:, None])
        rank += tl.sum(is_earlier.to(tl.int32), 1)
    padded = tl.cdiv(count, 16) * 16
    start = tl.cumsum(padded, 0) - padded
    # every program knows all counts; the first one writes the tiles
    if tl.program_id(0) == 0:
        size = tl.cdiv(tl.cdiv(count, tl.maximum(tl.cdiv(count, TILE), 1)), GRANULE) * GRANULE
        needed = tl.cdiv(count, tl.maximum(size, 1))
        first = tl.cumsum(needed, 0) - needed
        tl.store(rows.num_tiles, tl.sum(needed, 0))
        stack_row = expert
        if routing.slots is not None:
            stack_row = tl.load(routing.slots + expert, mask=expert < E, other=0)
        for i in tl.range(0, tl.max(needed, 0)):
            has = i < needed
            tl.store(rows.tiles + first + i, stack_row, mask=has)
            tl.store(rows.tiles + capacity + first + i, start + i * size, mask=has)
            tl.store(rows.tiles + 2 * capacity + first + i, tl.minimum(size, count - i * size), mask=has)
    row = tl.gather(start + earlier, tl.maximum(pair_expert, 0), 0) + rank
    tl.store(rows.pair + row, pair, mask=pair_expert >= 0)
    tl.store(rows.row + pair, row, mask=pair_expert >= 0)
    tl.store(rows.weight + row, weight, mask=pair_expert >= 0)


@triton.jit
def _small_rows(experts_ptr, pairs, SLOTS: tl.constexpr, TILE: tl.constexpr, GRANULE: tl.constexpr):
    """Rows and tiles of at most ``SLOTS`` pairs, as `place_rows_kernel` computes them, by comparing all pairs.

    Returns: by pair: its expert, its row, the expert's first row, number of pairs, rows per tile and first tile, and
    the number of the expert's tiles if this is its first pair, else 0.
    """
    slot = tl.arange(0, SLOTS)
    expert = tl.load(experts_ptr + slot, mask=slot < pairs, other=-1).to(tl.int32)
    same = (expert[:, None] == expert[None, :]) & (expert >= 0)[:, None]
    rank = tl.sum((same & (slot[None, :] < slot[:, None])).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    size = tl.cdiv(tl.cdiv(count, tl.maximum(tl.cdiv(count, TILE), 1)), GRANULE) * GRANULE
    needed = tl.cdiv(count, tl.maximum(size, 1))
    # the first pair of an expert stands for it: rows and tiles of lower experts come first
    leads = (rank == 0) & (expert >= 0)
    expert_rows, expert_tiles = tl.where(leads, tl.cdiv(count, 16) * 16, 0), tl.where(leads, needed, 0)
    lower = expert[None, :] < expert[:, None]
    start = tl.sum(tl.where(lower, expert_rows[None, :], 0), 1)
    first = tl.sum(tl.where(lower, expert_tiles[None, :], 0), 1)
    return expert, start + rank, start, count, size, first, expert_tiles


@triton.jit(do_not_specialize=["pairs", "capacity"])
def prepare_decode_rows_kernel(
    tokens,
    routing,
    rows,
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
    """`count_chunks_kernel`, `place_rows_kernel` and `prepare_rows_kernel` in one, for at most ``SLOTS`` pairs.

    Every program finds the rows of its token's pairs by itself; the first writes them for the products.

    Args:
        tokens: `QuantizedTokens`; routing: `RowRouting`; rows: `PairRows`, written.
    """
    source = tl.program_id(0).to(tl.int64)
    gdc_wait()  # until the router has written experts and weights
    gdc_launch_dependents()
    slot = tl.arange(0, SLOTS)
    expert, row, start, count, size, first, expert_tiles = _small_rows(routing.experts, pairs, SLOTS, TILE, GRANULE)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        known = expert >= 0
        tl.store(rows.pair + row, slot, mask=known)
        tl.store(rows.row + slot, row, mask=known)
        tl.store(rows.weight + row, tl.load(routing.weights + slot, mask=known, other=0), mask=known)
        tl.store(rows.num_tiles, tl.sum(expert_tiles, 0))
        stack_row = expert
        if routing.slots is not None:
            stack_row = tl.load(routing.slots + expert, mask=known, other=0)
        for i in tl.range(0, tl.max(expert_tiles, 0)):
            has = i < expert_tiles
            tl.store(rows.tiles + first + i, stack_row, mask=has)
            tl.store(rows.tiles + capacity + first + i, start + i * size, mask=has)
            tl.store(rows.tiles + 2 * capacity + first + i, tl.minimum(size, count - i * size), mask=has)
    values, scale, channel, group = _quantized_row(tokens.x + source * tokens.stride, K, BLOCK, POW2)
    # a token's values are the same for all of its experts: quantised once, stored to the row of each pair
    for i in tl.static_range(TOPK):
        is_pair = slot == tl.program_id(0) * TOPK + i
        known = tl.max(tl.where(is_pair, expert, -1), 0) >= 0
        to = tl.sum(tl.where(is_pair, row, 0), 0).to(tl.int64)
        tl.store(tokens.quantized + to * K + channel, values, mask=known)
        tl.store(tokens.scale + group * tokens.num_rows.to(tl.int64) + to, scale, mask=known)


@triton.jit
def _quantized_row(x_row, K: tl.constexpr, BLOCK: tl.constexpr, POW2: tl.constexpr):
    """(e4m3 values, their scales, channels, groups) of this program's part of a row, in the order of `experts_hopper`.

    A block of 128 channels, as words of 4 channels, is a 4 x 8 matrix; it is stored transposed.
    """
    GROUPS: tl.constexpr = BLOCK // 128
    start = tl.program_id(1) * BLOCK
    channel = start + tl.arange(0, BLOCK)
    x = tl.load(x_row + channel).to(tl.float32)
    # transposed: a product thread's words then hold 32 consecutive channels, which share an FP4 scale
    values, scale = quantize_groups(tl.reshape(x, (GROUPS, 128)), POW2, True, tl.float8e4nv)
    values = tl.reshape(tl.permute(tl.reshape(values, (GROUPS, 4, 8, 4)), (0, 2, 1, 3)), (BLOCK,))
    return values, scale, channel, start // 128 + tl.arange(0, GROUPS)


@triton.jit
def prepare_rows_kernel(
    tokens, experts_ptr, row_ptr, K: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, POW2: tl.constexpr
):
    """Quantises tokens to e4m3 under a scale per 128 channels, in the order of `experts_hopper`.

    Args:
        tokens: `QuantizedTokens`.
        experts_ptr: int ``[T, TOPK]``; row_ptr: the row of each pair.
        TOPK: a token is written to the rows of its pairs; with 0, to its own.
    """
    source = tl.program_id(0).to(tl.int64)
    gdc_wait()  # until the rows are known, and the previous product has written x
    gdc_launch_dependents()
    known = ()
    rows = ()
    # all rows are loaded before the values are quantised, which hides the latency of the loads
    for i in tl.static_range(TOPK):
        is_local = tl.load(experts_ptr + source * TOPK + i) >= 0
        known += (is_local,)
        rows += (tl.load(row_ptr + source * TOPK + i, mask=is_local, other=0).to(tl.int64),)
    values, scale, channel, group = _quantized_row(tokens.x + source * tokens.stride, K, BLOCK, POW2)
    scale_ptr = tokens.scale + group * tokens.num_rows.to(tl.int64)
    if TOPK > 0:
        for i in tl.static_range(TOPK):
            tl.store(tokens.quantized + rows[i] * K + channel, values, mask=known[i])
            tl.store(scale_ptr + rows[i], scale, mask=known[i])
    else:
        tl.store(tokens.quantized + source * K + channel, values)
        tl.store(scale_ptr + source, scale)
