"""Triton device code of `compress` and `insert_tokens`: pooling the windows that close, keeping rows of open ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops import (
    hadamard_rows,
    normed_rows,
    rotated_rows,
    round_to,
    row_cos_sin,
    row_weight,
    store_rows,
)
from deepseek_attn.kernels.common.triton_types import LOG2E


@dataclass(frozen=True)
class PartShape:
    """What device code knows about a compressor.

    Attributes:
        D: channels of an entry; BLOCK: the power of two that a tile of them takes.
        ROPE: rotated channels; STAGES: of the Hadamard rotation, 0 for none; DTYPE: what an entry is rounded to.
        N, NOPE, RECORD, PLAIN: of the pool, see `row_ops.entry_constants`.
        JOBS: that share out a group of windows, or the channels of one.
    """

    D: int
    BLOCK: int
    ROPE: int
    STAGES: int
    DTYPE: Any
    N: int
    NOPE: int
    RECORD: int
    PLAIN: Any
    JOBS: int


@dataclass(frozen=True)
class Pooling:
    """How the windows of a step are pooled: the same for all compressors of a layer.

    Attributes:
        RATIO: tokens of a window; POOLED: tokens that an entry pools; ROWS: of a ring.
        LANES, READS, CHANNELS: see `compress.Tiles`; CHUNKS: so many times as many channels a job takes at most.
        GROUP: windows of a request that are shared out together; JOBS: of a group, of all compressors.
        LONG: a token of the step may take the ring row of one that a window of the step pools.
        REQUESTS: a power of two, no less than there are.
    """

    RATIO: int
    POOLED: int
    ROWS: int
    LANES: int
    READS: int
    CHANNELS: int
    CHUNKS: int
    GROUP: int
    JOBS: int
    LONG: bool
    REQUESTS: int


@triton.jit
def store_state_row(t, which, parts, batch, SHAPES: tl.constexpr, HOW: tl.constexpr):
    """Copies the projections of token ``t`` for compressor ``which`` to their row of the ring.

    A row, or a half of it, that a window of this step reads is left to the program that reads it (`_renew`).
    Arguments and constants are those of `compress.compress_launch`.
    """
    valid = tl.load(batch[6] + t) != 0
    pos = tl.load(batch[0] + t).to(tl.int32)
    req = tl.load(batch[1] + t)
    for p in tl.static_range(len(SHAPES)):
        if which == p:
            part = parts[p]
            W: tl.constexpr = HOW.POOLED // HOW.RATIO * SHAPES[p].D
            BLOCK: tl.constexpr = SHAPES[p].BLOCK
            for first in tl.static_range(0, W, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < W
                value = tl.load(part[0] + t * part[4] + column, mask=inside)
                score = tl.load(part[1] + t * part[5] + column, mask=inside)
                score += tl.load(part[2] + (pos % HOW.RATIO) * W + column, mask=inside)
                start = tl.load(batch[2] + req)
                end = tl.load(batch[2] + req + 1)
                ring = tl.load(batch[4] + req * batch[7]).to(tl.int64)
                inside &= valid & (t >= end - HOW.ROWS)
                if HOW.LONG:
                    prefix = tl.load(batch[3] + req)
                    length = prefix + end - start
                    before = pos - tl.cdiv(pos - prefix + 1, HOW.ROWS) * HOW.ROWS  # whose row this is as yet
                    older = column < W - SHAPES[p].D
                    closing = (tl.maximum(before, 0) // HOW.RATIO + tl.where(older, 2, 1)) * HOW.RATIO
                    inside &= (before < 0) | (closing <= prefix) | (closing > length)
                row = part[3] + ring * part[6] + (pos % HOW.ROWS) * (2 * W)
                tl.store(row + column, value, mask=inside)
                tl.store(row + W + column, score, mask=inside)


@triton.jit
def _rows(window, part, D: tl.constexpr, HOW: tl.constexpr):
    """Where the rows of windows ``[N]`` are, by place in the window; what `_sums` computes addresses from."""
    live, pos, t, prefix, ring = window
    first = pos - (HOW.POOLED - 1)  # before the first token if there is no window ahead
    token = (t - (HOW.POOLED - 1)).to(tl.int64)
    kept = part[3] + ring * part[6]
    return (
        tl.where(live, -first, HOW.POOLED),  # places from here on exist
        prefix - first,  # and from here on they are of this step
        (first + HOW.ROWS) % HOW.ROWS,
        kept,
        part[0] + token * part[4],
        part[1] + token * part[5],
    )


@triton.jit
def _sums(rows, lane, part, channel, D: tl.constexpr, HOW: tl.constexpr):
    """Sums ``[N, C]`` over every ``LANES``-th token of a window, from the ``lane [N]``-th on.

    Returns:
        The largest score, the sum of the weights relative to it, and the weighted sum of the values.
    """
    exists, known, ring_row, kept, kv, score_of = rows
    READS: tl.constexpr = HOW.READS
    W: tl.constexpr = HOW.POOLED // HOW.RATIO * D
    N: tl.constexpr = lane.shape[0]
    C: tl.constexpr = channel.shape[0]
    column = channel[None, :]
    peak = tl.full((N, C), float("-inf"), tl.float32)
    total = tl.zeros((N, C), tl.float32)
    acc = tl.zeros((N, C), tl.float32)
    for first in range(0, HOW.POOLED, READS * HOW.LANES):
        values = ()
        scores = ()
        # all rows are asked for before any is waited for: no branches in between
        for i in tl.static_range(READS):
            place = first + i * HOW.LANES + lane
            new = place >= known
            mask = ((place >= exists) & (place < HOW.POOLED))[:, None] & (column < D)
            older = place < HOW.POOLED - HOW.RATIO
            # of two windows, the older one is pooled from the first half of the channels
            half = tl.where(older, 0, W - D)
            row = ring_row + place
            row = tl.where(row >= HOW.ROWS, row - HOW.ROWS, row) * (2 * W)
            value_row = tl.where(new, kv, kept) + (tl.where(new, place * part[4], row) + half)
            score_row = tl.where(new, score_of, kept + W) + (tl.where(new, place * part[5], row) + half)
            ape_row = part[2] + (tl.where(older, place, place - (HOW.POOLED - HOW.RATIO)) * W + half)
            value = tl.load(value_row[:, None] + column, mask=mask, other=0)
            score = tl.load(score_row[:, None] + column, mask=mask, other=float("-inf"))
            values += (value,)
            scores += (score + tl.load(ape_row[:, None] + column, mask=mask & new[:, None], other=0),)
        new_peak = peak
        for i in tl.static_range(READS):
            new_peak = tl.maximum(new_peak, scores[i])
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2E
        decay = tl.exp2(peak * LOG2E - shift)
        total *= decay
        acc *= decay
        for i in tl.static_range(READS):
            weight = tl.exp2(scores[i] * LOG2E - shift)
            total += weight
            acc += weight * values[i]
        peak = new_peak
    return peak, total, acc


@triton.jit
def _renew(rows, t, ahead, lane, part, batch, channel, D: tl.constexpr, HOW: tl.constexpr):
    """Overwrites what `_sums` has read of the ring with the tokens of this step that take its place, if any do.

    ``t [N]`` is the row of the first token of a window, ``ahead [N]`` how many tokens the request has after that one.
    """
    exists, known, ring_row, kept, kv, score_of = rows
    W: tl.constexpr = HOW.POOLED // HOW.RATIO * D
    column = channel[None, :]
    tl.debug_barrier()  # the whole program has read what is overwritten
    for first in range(0, HOW.POOLED, HOW.LANES):
        place = first + lane
        later = (ahead - place) // HOW.ROWS * HOW.ROWS  # the last token to have the same row of the ring
        renewed = (place >= exists) & (place < known) & (place < HOW.POOLED) & (later > 0)
        renewed &= tl.load(batch[6] + t + place + later, mask=renewed, other=0) != 0
        mask = renewed[:, None] & (column < D)
        half = tl.where(place < HOW.POOLED - HOW.RATIO, 0, W - D)
        new = place + later
        value_row = kv + new.to(tl.int64) * part[4] + half
        score_row = score_of + new.to(tl.int64) * part[5] + half
        value = tl.load(value_row[:, None] + column, mask=mask)
        score = tl.load(score_row[:, None] + column, mask=mask)
        ape_row = part[2] + new % HOW.RATIO * W + half
        score += tl.load(ape_row[:, None] + column, mask=mask)
        row = ring_row + place
        row = kept + (tl.where(row >= HOW.ROWS, row - HOW.ROWS, row) * (2 * W) + half)
        tl.store(row[:, None] + column, value, mask=mask)
        tl.store((row + W)[:, None] + column, score, mask=mask)


@triton.jit
def _finish(pooled, slot, weight, freqs_cis, part, P: tl.constexpr, SHAPES: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm, rotation at the window's first position, Hadamard rotation if there is one, and the pool."""
    D: tl.constexpr = SHAPES[P].D
    BLOCK: tl.constexpr = SHAPES[P].BLOCK
    DTYPE: tl.constexpr = SHAPES[P].DTYPE
    y = normed_rows(round_to(pooled, DTYPE), weight, part[12], D, DTYPE)
    y = rotated_rows(y, freqs_cis, D, SHAPES[P].ROPE, DTYPE)
    if SHAPES[P].STAGES:
        y = hadamard_rows(y, BLOCK, SHAPES[P].STAGES, DTYPE)
    store_rows(y, slot, part[10], part[11], SHAPES[P].N, D, SHAPES[P].NOPE, BLOCK, SHAPES[P].RECORD, SHAPES[P].PLAIN,
               NATIVE_FP8)  # fmt: skip


@triton.jit
def _group_of(e, before, groups, rings, REQUESTS: tl.constexpr):
    """Group ``e`` of all: its request, which of the request's groups it is, and the request's ring."""
    mine = (before <= e) & (e < before + groups)
    request = tl.max(tl.where(mine, tl.arange(0, REQUESTS), 0), 0)
    return request, tl.sum(tl.where(mine, e - before, 0), 0), tl.sum(tl.where(mine, rings, 0), 0).to(tl.int64)


@triton.jit
def _pool(
    e,
    place,
    chunks,
    group,
    part,
    batch,
    room,
    P: tl.constexpr,
    SHAPES: tl.constexpr,
    HOW: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Job ``place`` of the group ``e`` for compressor ``P``: some of its windows, or ``chunks`` of its only one.

    The last program to pool chunks of a window stores its entry.
    """
    D: tl.constexpr = SHAPES[P].D
    BLOCK: tl.constexpr = SHAPES[P].BLOCK
    RATIO: tl.constexpr = HOW.RATIO
    N: tl.constexpr = HOW.GROUP // SHAPES[P].JOBS if HOW.LANES == 1 else 1
    request, nth, ring = group
    prefix = tl.load(batch[3] + request)
    start = tl.load(batch[2] + request)
    end = tl.load(batch[2] + request + 1)
    nth = nth * HOW.GROUP + tl.arange(0, N)
    if HOW.LANES == 1:
        nth += place * N
    pos = (prefix // RATIO + nth + 1) * RATIO - 1
    t = start + pos - prefix
    slot = tl.load(batch[5] + t, mask=t < end, other=-1).to(tl.int64)
    # asked for ahead of the rows, these cost no time of their own
    weight = row_weight(part[7], D, BLOCK)
    freqs_cis = row_cos_sin(pos // RATIO * RATIO, part[8], part[9], D, SHAPES[P].ROPE, BLOCK)
    rows = _rows((t < end, pos, t, prefix, ring), part, D, HOW)
    whole = tl.arange(0, BLOCK)
    first = t - (HOW.POOLED - 1)
    length = prefix + end - start
    if HOW.LANES == 1:
        lane = tl.zeros((N,), tl.int32)
        _, total, acc = _sums(rows, lane, part, whole, D, HOW)
        if HOW.LONG and tl.max(rows[1], 0) > 0:
            _renew(rows, first, length - 1 - pos + (HOW.POOLED - 1), lane, part, batch, whole, D, HOW)
        mine = (t < end)[:, None] & (whole < D)[None, :]
        pooled = tl.where(mine, acc / tl.where(mine, total, 1.0), 0.0)
        _finish(pooled, slot, weight, freqs_cis, part, P, SHAPES, NATIVE_FP8)
    else:
        lane = tl.arange(0, HOW.LANES)
        at = e * len(SHAPES) + P
        row = room[0] + at.to(tl.int64) * room[2]
        chunk = place * chunks
        while chunk < tl.minimum(place * chunks + chunks, SHAPES[P].JOBS):
            channel = chunk * HOW.CHANNELS + tl.arange(0, HOW.CHANNELS)
            peak, total, acc = _sums(rows, lane, part, channel, D, HOW)
            if HOW.LONG and tl.max(rows[1], 0) > 0:
                _renew(rows, first, length - 1 - pos + (HOW.POOLED - 1), lane, part, batch, channel, D, HOW)
            top = tl.max(peak, 0)
            decay = tl.exp2((peak - tl.where(top == float("-inf"), 0.0, top)[None, :]) * LOG2E)
            tl.store(row + channel, tl.sum(acc * decay, 0) / tl.sum(total * decay, 0), mask=channel < D)
            chunk += 1
        tl.debug_barrier()  # the whole program's share is written before its arrival is counted
        if tl.atomic_add(room[1] + at, 1, sem="acq_rel") == tl.cdiv(SHAPES[P].JOBS, chunks) - 1:
            tl.store(room[1] + at, 0)
            pooled = tl.load(row + whole, mask=whole < D, other=0, cache_modifier=".cg")
            _finish(pooled[None, :], slot, weight, freqs_cis, part, P, SHAPES, NATIVE_FP8)


@triton.jit
def pool_windows(
    worker, workers, requests, parts, batch, room, SHAPES: tl.constexpr, HOW: tl.constexpr, NATIVE_FP8: tl.constexpr
):
    """Pools what falls to program ``worker`` of ``workers``, if any window closes.

    Arguments and constants are those of `compress.compress_launch`.
    """
    r = tl.arange(0, HOW.REQUESTS)
    known = r < requests
    prefix = tl.load(batch[3] + r, mask=known, other=0)
    start = tl.load(batch[2] + r, mask=known, other=0)
    end = tl.load(batch[2] + r + 1, mask=known, other=0)
    rings = tl.load(batch[4] + r * batch[7], mask=known, other=0)
    groups = tl.cdiv((prefix + end - start) // HOW.RATIO - prefix // HOW.RATIO, HOW.GROUP)
    total = tl.sum(groups, 0)
    if total > 0:
        chunks = 1
        if HOW.LANES > 1:  # a job takes more of a window where there are enough of them
            chunks = tl.minimum(tl.maximum(total * HOW.JOBS // workers, 1), HOW.CHUNKS)
        each = 0
        for p in tl.static_range(len(SHAPES)):
            each += tl.cdiv(SHAPES[p].JOBS, chunks)
        before = tl.cumsum(groups, 0) - groups
        job = worker
        while job < total * each:
            e = job // each
            place = job % each
            group = _group_of(e, before, groups, rings, HOW.REQUESTS)
            for p in tl.static_range(len(SHAPES)):
                mine = tl.cdiv(SHAPES[p].JOBS, chunks)
                if place >= 0 and place < mine:
                    _pool(e, place, chunks, group, parts[p], batch, room, p, SHAPES, HOW, NATIVE_FP8)
                place -= mine
            job += workers
