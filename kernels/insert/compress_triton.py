"""Triton device code of `compress_and_insert` and `insert_tokens`: closed windows are pooled, open ones kept.

Programs that pool take work items of the windows that close. Short windows are pooled by one program, in float32 and
channel by channel. For long windows every program pools a few channels, and the last program to arrive stores the
entry: the norm needs all of its channels. Other programs store a token's row in the ring of its request. In steps of
more than ``rows - coff * ratio + 1`` tokens of a request such a row may still hold a token that is pooled; then the
program that pools it stores the new row afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.row_ops_triton import (
    EntryFormat,
    hadamard_rows,
    normed_rows,
    pdl_begin,
    rotated_rows,
    round_to,
    row_block,
    row_cos_sin,
    row_weight,
    store_rows,
)
from deepseek_attn.kernels.common.triton_types import LOG2E
from deepseek_attn.kernels.insert.norm_rope_triton import insert_key, norm_query_latent
from deepseek_attn.kernels.insert.plan import PoolTiles


class PartArguments(NamedTuple):
    """Runtime arguments of one compressor.

    Attributes:
        kv, score: float32 ``[T, width]`` with their row strides, ``width`` of one or two halves of ``D`` channels.
        ape: float32 ``[ratio, width]``; state: float32 ``[pages, rows, 2 * width]``, ``ring_stride`` between pages.
        norm_weight: float32 ``[D]``; cos_sin: float32 ``[max_positions, rope]``.
        pool: uint8 ``[pages, page bytes]``; eps: of the entry's norm.
    """

    kv: Tensor
    score: Tensor
    ape: Tensor
    state: Tensor
    kv_stride: int
    score_stride: int
    ring_stride: int
    norm_weight: Tensor
    cos_sin: Tensor
    max_positions: int
    pool: Tensor
    page_stride: int
    eps: float


class BatchArguments(NamedTuple):
    """Runtime arguments of a step: tensors of `CompressBatch`, documented there, and the stride of ``ring_pages``."""

    positions: Tensor
    token_to_req: Tensor
    query_start_loc: Tensor
    prefix_lens: Tensor
    ring_pages: Tensor
    slots: Tensor
    valid: Tensor
    ring_pages_stride: int


class Scratch(NamedTuple):
    """Memory of the programs that share a window.

    Attributes:
        pooled: float32, a row of ``width`` channels for each window and compressor.
        arrived: int32, a counter for each; 0 between launches.
    """

    pooled: Tensor
    arrived: Tensor
    width: int


class WindowRows(NamedTuple):
    """Where the rows of windows ``[N]`` are, by place in the window.

    Attributes:
        first_existing: the first place that has a token; first_new: the first place whose token is of this step.
        ring_row: ring row of place 0; ring: pointer to the ring.
        kv, score: pointers to the rows of place 0 among this step's tokens.
    """

    first_existing: Any
    first_new: Any
    ring_row: Any
    ring: Any
    kv: Any
    score: Any


@dataclass(frozen=True)
class PartShape:
    """Constants of one compressor.

    Attributes:
        ENTRY: of the pool; DTYPE: to which an entry is rounded.
        ITEMS: work items of a group of windows, or of the channels of one window.
    """

    ENTRY: EntryFormat
    DTYPE: Any
    ITEMS: int


@dataclass(frozen=True)
class PoolingConfig:
    """Constants of pooling that all compressors of a layer share.

    Attributes:
        RATIO: tokens per window; POOLED: tokens that an entry pools; ROWS: of a ring.
        TILES: the plan's; a work item pools at most ``TILES.chunks`` blocks of ``TILES.channels``.
        GROUP: consecutive windows of a request that form one group; ITEMS: of a group, over all compressors.
        REUSES_RING: a token of the step may overwrite the ring row of a token that a window of the step pools.
        REQUESTS: a power of two, at least the number of requests.
        NATIVE_FP8: the GPU converts FP8.
    """

    RATIO: int
    POOLED: int
    ROWS: int
    TILES: PoolTiles
    GROUP: int
    ITEMS: int
    REUSES_RING: bool
    REQUESTS: int
    NATIVE_FP8: bool


@triton.jit
def _store_ring_row(t, compressor, parts, batch, PARTS: tl.constexpr, CONFIG: tl.constexpr):
    """Copies the projections of token ``t`` for one ``compressor`` to their row of the ring.

    A row, or a half of it, that a window of this step reads is left to the program that reads it, see
    `_overwrite_ring_rows`.
    """
    valid = tl.load(batch.valid + t) != 0
    pos = tl.load(batch.positions + t).to(tl.int32)
    req = tl.load(batch.token_to_req + t)
    for p in tl.static_range(len(PARTS)):
        if compressor == p:
            part = parts[p]
            W: tl.constexpr = CONFIG.POOLED // CONFIG.RATIO * PARTS[p].ENTRY.D
            BLOCK: tl.constexpr = row_block(PARTS[p].ENTRY.D)
            for first in tl.static_range(0, W, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < W
                value = tl.load(part.kv + t * part.kv_stride + column, mask=inside)
                score = tl.load(part.score + t * part.score_stride + column, mask=inside)
                # a ring holds scores with the position's bias: windows add it once, when the token is stored
                score += tl.load(part.ape + (pos % CONFIG.RATIO) * W + column, mask=inside)
                start = tl.load(batch.query_start_loc + req)
                end = tl.load(batch.query_start_loc + req + 1)
                ring = tl.load(batch.ring_pages + req * batch.ring_pages_stride).to(tl.int64)
                # of tokens that share a ring row, the last one stays
                inside &= valid & (t >= end - CONFIG.ROWS)
                if CONFIG.REUSES_RING:
                    prefix = tl.load(batch.prefix_lens + req)
                    length = prefix + end - start
                    # the position that the row still holds
                    old_pos = pos - tl.cdiv(pos - prefix + 1, CONFIG.ROWS) * CONFIG.ROWS
                    older = column < W - PARTS[p].ENTRY.D
                    closing = (tl.maximum(old_pos, 0) // CONFIG.RATIO + tl.where(older, 2, 1)) * CONFIG.RATIO
                    # stored here unless a window that closes in this step still reads the old token
                    inside &= (old_pos < 0) | (closing <= prefix) | (closing > length)
                row = part.state + ring * part.ring_stride + (pos % CONFIG.ROWS) * (2 * W)
                tl.store(row + column, value, mask=inside)
                tl.store(row + W + column, score, mask=inside)


@triton.jit
def _window_rows(closes, pos, t, prefix, ring, part, CONFIG: tl.constexpr):
    """`WindowRows` of windows ``[N]`` that close at position ``pos``, row ``t``, if ``closes``."""
    first = pos - (CONFIG.POOLED - 1)  # negative without an older window
    token = (t - (CONFIG.POOLED - 1)).to(tl.int64)
    ring_ptr = part.state + ring * part.ring_stride
    return WindowRows(
        tl.where(closes, -first, CONFIG.POOLED),
        prefix - first,
        (first + CONFIG.ROWS) % CONFIG.ROWS,
        ring_ptr,
        part.kv + token * part.kv_stride,
        part.score + token * part.score_stride,
    )


@triton.jit
def _weighted_sums(rows, lane, part, channel, D: tl.constexpr, CONFIG: tl.constexpr):
    """Sums ``[N, C]`` over every ``LANES``-th token of a window, from the ``lane [N]``-th on.

    Returns:
        The largest score, the sum of the weights relative to it, and the weighted sum of the values.
    """
    READS: tl.constexpr = CONFIG.TILES.reads
    LANES: tl.constexpr = CONFIG.TILES.lanes
    W: tl.constexpr = CONFIG.POOLED // CONFIG.RATIO * D
    N: tl.constexpr = lane.shape[0]
    C: tl.constexpr = channel.shape[0]
    # [N, READS, C]: Triton deals threads to channels, then to windows, so that a thread has all READS of its channels
    column = channel[None, None, :]
    peak = tl.full((N, 1, C), float("-inf"), tl.float32)
    total = tl.zeros((N, 1, C), tl.float32)
    acc = tl.zeros((N, 1, C), tl.float32)
    for first in range(0, CONFIG.POOLED, READS * LANES):
        # READS tokens of each lane, LANES apart; all loads are issued before the first result is needed
        offset = first + tl.arange(0, READS)[None, :] * LANES + lane[:, None]
        new = offset >= rows.first_new[:, None]
        mask = ((offset >= rows.first_existing[:, None]) & (offset < CONFIG.POOLED))[:, :, None] & (column < D)
        older = offset < CONFIG.POOLED - CONFIG.RATIO
        # with two windows, the older window is pooled from the first half of the channels
        half = tl.where(older, 0, W - D)
        # tokens of this step: from the projections; earlier tokens: from the ring, which wraps at most once
        row = rows.ring_row[:, None] + offset
        row = tl.where(row >= CONFIG.ROWS, row - CONFIG.ROWS, row) * (2 * W)
        value_row = tl.where(new, rows.kv[:, None], rows.ring) + (tl.where(new, offset * part.kv_stride, row) + half)
        score_row = tl.where(new, rows.score[:, None], rows.ring + W) + (
            tl.where(new, offset * part.score_stride, row) + half
        )
        ape_row = part.ape + (tl.where(older, offset, offset - (CONFIG.POOLED - CONFIG.RATIO)) * W + half)
        # places before the first token weigh exp2(-inf) = 0; scores in the ring have the bias already
        values = tl.load(value_row[:, :, None] + column, mask=mask, other=0)
        scores = tl.load(score_row[:, :, None] + column, mask=mask, other=float("-inf"))
        scores += tl.load(ape_row[:, :, None] + column, mask=mask & new[:, :, None], other=0)
        # online softmax: earlier sums are rescaled to the new largest score
        new_peak = tl.maximum(peak, tl.max(scores, 1, keep_dims=True))
        # a channel of -inf scores alone must not give inf - inf
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2E
        decay = tl.exp2(peak * LOG2E - shift)
        weights = tl.exp2(scores * LOG2E - shift)
        total = total * decay + tl.sum(weights, 1, keep_dims=True)
        acc = acc * decay + tl.sum(weights * values, 1, keep_dims=True)
        peak = new_peak
    return tl.max(peak, 1), tl.sum(total, 1), tl.sum(acc, 1)


@triton.jit
def _overwrite_ring_rows(rows, t, following, lane, part, batch, channel, D: tl.constexpr, CONFIG: tl.constexpr):
    """Overwrites ring rows that `_weighted_sums` has read with the tokens of this step that have the same row.

    ``t [N]`` is the row of the first token of a window, ``following [N]`` the tokens of the request after that one.
    """
    W: tl.constexpr = CONFIG.POOLED // CONFIG.RATIO * D
    column = channel[None, :]
    tl.debug_barrier()  # wait until all threads of the program have read the rows
    for first in range(0, CONFIG.POOLED, CONFIG.TILES.lanes):
        offset = first + lane
        later = (following - offset) // CONFIG.ROWS * CONFIG.ROWS  # the last token to have the same row of the ring
        reused = (offset >= rows.first_existing) & (offset < rows.first_new) & (offset < CONFIG.POOLED) & (later > 0)
        reused &= tl.load(batch.valid + t + offset + later, mask=reused, other=0) != 0
        mask = reused[:, None] & (column < D)
        half = tl.where(offset < CONFIG.POOLED - CONFIG.RATIO, 0, W - D)
        new = offset + later
        value_row = rows.kv + new.to(tl.int64) * part.kv_stride + half
        score_row = rows.score + new.to(tl.int64) * part.score_stride + half
        value = tl.load(value_row[:, None] + column, mask=mask)
        score = tl.load(score_row[:, None] + column, mask=mask)
        ape_row = part.ape + new % CONFIG.RATIO * W + half
        # the ring holds scores with the position's bias
        score += tl.load(ape_row[:, None] + column, mask=mask)
        row = rows.ring_row + offset
        row = rows.ring + (tl.where(row >= CONFIG.ROWS, row - CONFIG.ROWS, row) * (2 * W) + half)
        tl.store(row[:, None] + column, value, mask=mask)
        tl.store((row + W)[:, None] + column, score, mask=mask)


@triton.jit
def _store_entry(pooled, slot, weight, freqs_cis, part, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm, rotation at the window's first position, Hadamard transform if there is one, and the write to the pool."""
    DTYPE: tl.constexpr = SHAPE.DTYPE
    ENTRY: tl.constexpr = SHAPE.ENTRY
    D: tl.constexpr = ENTRY.D
    y = normed_rows(round_to(pooled, DTYPE), weight, part.eps, D, DTYPE)
    y = rotated_rows(y, freqs_cis, D, ENTRY.ROPE, DTYPE)
    if ENTRY.HADAMARD:
        y = hadamard_rows(y, y.shape[1], DTYPE)
    store_rows(y, slot, part.pool, part.page_stride, ENTRY, NATIVE_FP8)


@triton.jit
def _group_of(e, first_groups, groups, rings, REQUESTS: tl.constexpr):
    """Request of window group ``e``, number of the group within the request, and the request's ring.

    ``first_groups [REQUESTS]`` is the number of each request's first group.
    """
    mine = (first_groups <= e) & (e < first_groups + groups)
    request = tl.max(tl.where(mine, tl.arange(0, REQUESTS), 0), 0)
    return request, tl.sum(tl.where(mine, e - first_groups, 0), 0), tl.sum(tl.where(mine, rings, 0), 0).to(tl.int64)


@triton.jit
def _pool(e, item, chunks, group, parts, batch, scratch, P: tl.constexpr, PARTS: tl.constexpr, CONFIG: tl.constexpr):
    """Work item ``item`` of window group ``e`` for compressor ``P``: whole windows, or ``chunks`` of one's channels.

    The last program to pool chunks of a window stores its entry.
    """
    part = parts[P]
    SHAPE: tl.constexpr = PARTS[P]  # Triton 3.6 does not pass an element of a constexpr tuple as a constexpr
    D: tl.constexpr = SHAPE.ENTRY.D
    BLOCK: tl.constexpr = D if SHAPE.ENTRY.HADAMARD else row_block(D)  # a Hadamard matrix has D columns
    RATIO: tl.constexpr = CONFIG.RATIO
    N: tl.constexpr = CONFIG.GROUP // SHAPE.ITEMS if CONFIG.TILES.lanes == 1 else 1
    request, nth, ring = group
    prefix = tl.load(batch.prefix_lens + request)
    start = tl.load(batch.query_start_loc + request)
    end = tl.load(batch.query_start_loc + request + 1)
    # the windows of this item, counted from the request's first one to close; pos and t: their last tokens
    nth = nth * CONFIG.GROUP + tl.arange(0, N)
    if CONFIG.TILES.lanes == 1:
        nth += item * N
    pos = (prefix // RATIO + nth + 1) * RATIO - 1
    t = start + pos - prefix
    slot = tl.load(batch.slots + t, mask=t < end, other=-1).to(tl.int64)
    # issued before the rows are loaded, these loads add no time
    weight = row_weight(part.norm_weight, D, BLOCK)
    freqs_cis = row_cos_sin(pos // RATIO * RATIO, part.cos_sin, part.max_positions, D, SHAPE.ENTRY.ROPE, BLOCK)
    rows = _window_rows(t < end, pos, t, prefix, ring, part, CONFIG)
    whole = tl.arange(0, BLOCK)
    first = t - (CONFIG.POOLED - 1)
    length = prefix + end - start
    if CONFIG.TILES.lanes == 1:
        # one program has all channels of its windows: it finishes their entries itself
        lane = tl.zeros((N,), tl.int32)
        _, total, acc = _weighted_sums(rows, lane, part, whole, D, CONFIG)
        if CONFIG.REUSES_RING and tl.max(rows.first_new, 0) > 0:
            _overwrite_ring_rows(rows, first, length - 1 - pos + (CONFIG.POOLED - 1), lane, part, batch, whole, D,
                                 CONFIG)  # fmt: skip
        inside = (t < end)[:, None] & (whole < D)[None, :]
        pooled = tl.where(inside, acc / tl.where(inside, total, 1.0), 0.0)
        _store_entry(pooled, slot, weight, freqs_cis, part, SHAPE, CONFIG.NATIVE_FP8)
    else:
        # programs share the window: each pools some channels into scratch memory
        lane = tl.arange(0, CONFIG.TILES.lanes)
        at = e * len(PARTS) + P
        row = scratch.pooled + at.to(tl.int64) * scratch.width
        chunk = item * chunks
        while chunk < tl.minimum(item * chunks + chunks, SHAPE.ITEMS):
            channel = chunk * CONFIG.TILES.channels + tl.arange(0, CONFIG.TILES.channels)
            peak, total, acc = _weighted_sums(rows, lane, part, channel, D, CONFIG)
            if CONFIG.REUSES_RING and tl.max(rows.first_new, 0) > 0:
                _overwrite_ring_rows(rows, first, length - 1 - pos + (CONFIG.POOLED - 1), lane, part, batch, channel, D,
                                     CONFIG)  # fmt: skip
            # lanes are combined in a fixed order, relative to the largest of their scores
            top = tl.max(peak, 0)
            decay = tl.exp2((peak - tl.where(top == float("-inf"), 0.0, top)[None, :]) * LOG2E)
            tl.store(row + channel, tl.sum(acc * decay, 0) / tl.sum(total * decay, 0), mask=channel < D)
            chunk += 1
        tl.debug_barrier()  # wait until all threads have written their channels, before the arrival is counted
        # released here and acquired by the last program to arrive, which sees all channels
        if tl.atomic_add(scratch.arrived + at, 1, sem="acq_rel") == tl.cdiv(SHAPE.ITEMS, chunks) - 1:
            tl.store(scratch.arrived + at, 0)  # for the next launch
            # from L2: other multiprocessors have written it
            pooled = tl.load(row + whole, mask=whole < D, other=0, cache_modifier=".cg")
            _store_entry(pooled[None, :], slot, weight, freqs_cis, part, SHAPE, CONFIG.NATIVE_FP8)


@triton.jit
def _pool_windows(program, pool_programs, requests, parts, batch, scratch, PARTS: tl.constexpr, CONFIG: tl.constexpr):
    """Pools the work items of one ``program`` of ``pool_programs``, if any window closes."""
    # every program counts the groups of windows that close, from the lengths of all requests
    r = tl.arange(0, CONFIG.REQUESTS)
    inside = r < requests
    prefix = tl.load(batch.prefix_lens + r, mask=inside, other=0)
    start = tl.load(batch.query_start_loc + r, mask=inside, other=0)
    end = tl.load(batch.query_start_loc + r + 1, mask=inside, other=0)
    rings = tl.load(batch.ring_pages + r * batch.ring_pages_stride, mask=inside, other=0)
    groups = tl.cdiv((prefix + end - start) // CONFIG.RATIO - prefix // CONFIG.RATIO, CONFIG.GROUP)
    total = tl.sum(groups, 0)
    if total > 0:  # in most decode steps no window closes
        chunks = 1
        if CONFIG.TILES.lanes > 1:  # with many windows, a work item pools several chunks of one
            chunks = tl.minimum(tl.maximum(total * CONFIG.ITEMS // pool_programs, 1), CONFIG.TILES.chunks)
        items_per_group = 0
        for p in tl.static_range(len(PARTS)):
            items_per_group += tl.cdiv(PARTS[p].ITEMS, chunks)
        first_groups = tl.cumsum(groups, 0) - groups
        # items are dealt to the programs in turn; within a group they are ordered by compressor
        work_item = program
        while work_item < total * items_per_group:
            e = work_item // items_per_group
            item = work_item % items_per_group
            group = _group_of(e, first_groups, groups, rings, CONFIG.REQUESTS)
            for p in tl.static_range(len(PARTS)):
                items = tl.cdiv(PARTS[p].ITEMS, chunks)
                if item >= 0 and item < items:
                    _pool(e, item, chunks, group, parts, batch, scratch, p, PARTS, CONFIG)
                item -= items
            work_item += pool_programs


@triton.jit(do_not_specialize=["pool_programs", "requests"])
def compress_kernel(
    parts, batch, scratch, pool_programs, requests, PARTS: tl.constexpr, CONFIG: tl.constexpr, PDL: tl.constexpr
):
    """The first programs store a token's ring row for one compressor each; the last ``pool_programs`` pool."""
    pdl_begin(PDL)  # wait until the previous kernel has written the projections
    COUNT: tl.constexpr = len(PARTS)
    program = tl.program_id(0)
    store_programs = tl.num_programs(0) - pool_programs
    if program >= store_programs:
        _pool_windows(program - store_programs, pool_programs, requests, parts, batch, scratch, PARTS, CONFIG)
    elif CONFIG.REUSES_RING:
        # only the last ROWS tokens of a request stay in the ring: earlier tokens get no programs
        r = program // COUNT // CONFIG.ROWS
        t = tl.load(batch.query_start_loc + r + 1).to(tl.int64) - 1 - program // COUNT % CONFIG.ROWS
        if t >= tl.load(batch.query_start_loc + r):
            _store_ring_row(t, program % COUNT, parts, batch, PARTS, CONFIG)
    else:
        _store_ring_row((program // COUNT).to(tl.int64), program % COUNT, parts, batch, PARTS, CONFIG)


@triton.jit(do_not_specialize=["pool_programs", "requests"])
def insert_tokens_kernel(
    key, query, parts, batch, scratch, pool_programs, requests,
    SHAPE: tl.constexpr, QUERY_SHAPE: tl.constexpr, PARTS: tl.constexpr, CONFIG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first ``pool_programs`` pool windows, the longest work; then per token: key, latent, a ring row per part."""
    pdl_begin(PDL)  # wait until the previous kernel has written the projections
    program = tl.program_id(0)
    if program < pool_programs:
        _pool_windows(program, pool_programs, requests, parts, batch, scratch, PARTS, CONFIG)
    else:
        KINDS: tl.constexpr = 2 + len(PARTS)
        t = ((program - pool_programs) // KINDS).to(tl.int64)
        kind = (program - pool_programs) % KINDS
        if kind == 0:
            insert_key(t, key, SHAPE, CONFIG.NATIVE_FP8)
        elif kind == 1:
            norm_query_latent(t, query, QUERY_SHAPE, CONFIG.NATIVE_FP8)
        else:
            _store_ring_row(t, kind - 2, parts, batch, PARTS, CONFIG)
