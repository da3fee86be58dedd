"""Triton kernels of `reference.compress`: windows that close in a step are pooled and stored, open ones are kept.

One program per token and compressor: if the token completes a window, the program pools it, in float32 and channel by
channel, from rows of this step and of the request's ring, and stores the entry. The same launch keeps the token's own
row in the ring where no program can still be reading what it overwrites: that takes steps of at most
``rows - coff * ratio + 1`` new tokens per request, as decode steps are. Longer ones take two launches: a program per
window, then a program per row that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepseek_attn.kernels.reference.compress import CompressBatch, CompressPart, check_part
from deepseek_attn.kernels.row_ops import (
    TRITON_DTYPES,
    entry_constants,
    hadamard_rows,
    native_fp8,
    normed_rows,
    rotated_rows,
    round_to,
    row_block,
    store_rows,
)


class Tiles(NamedTuple):
    """How a window is pooled: warps of a program, lanes of tokens, and tokens that a lane reads at once."""

    warps: int
    lanes: int
    reads: int


def choose_tiles(pooled_tokens: int) -> Tiles:
    """The fastest on an H200. A window must be summed alike in every step, so that it depends on nothing else."""
    if pooled_tokens <= 16:
        return Tiles(4, triton.next_power_of_2(pooled_tokens), 1)
    return Tiles(8, 8, 2)  # more reads spill registers: 32 us instead of 25 for 128 windows of 128 tokens


@triton.jit
def _keep(t, pos, ring, part, RATIO: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the projections of token ``t`` to its row of the ring."""
    kv_ptr, score_ptr, ape_ptr, state_ptr = part[0], part[1], part[2], part[3]
    channel = tl.arange(0, BLOCK)
    row = state_ptr + ring * part[6] + (pos % ROWS) * (2 * W)
    for first in tl.static_range(0, W, BLOCK):
        column = first + channel
        inside = column < W
        value = tl.load(kv_ptr + t * part[4] + column, mask=inside)
        score = tl.load(score_ptr + t * part[5] + column, mask=inside)
        score += tl.load(ape_ptr + (pos % RATIO) * W + column, mask=inside)
        tl.store(row + column, value, mask=inside)
        tl.store(row + W + column, score, mask=inside)


@triton.jit
def _pooled(
    t,
    pos,
    prefix,
    ring,
    part,
    RATIO: tl.constexpr,
    COFF: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    READS: tl.constexpr,
):
    """Softmax-weighted sum, float32 ``[BLOCK]``, of the window that token ``t`` closes.

    Each of ``LANES`` lanes sums every ``LANES``-th token by itself, ``READS`` tokens at a time; the lanes meet once.
    """
    W: tl.constexpr = COFF * D
    G: tl.constexpr = COFF * RATIO
    kv_ptr, score_ptr, ape_ptr, state_ptr = part[0], part[1], part[2], part[3]
    lane = tl.arange(0, LANES)
    channel = tl.arange(0, BLOCK)[None, :]
    peak = tl.full((LANES, BLOCK), float("-inf"), tl.float32)
    total = tl.zeros((LANES, BLOCK), tl.float32)
    acc = tl.zeros((LANES, BLOCK), tl.float32)
    for first in range(0, G, READS * LANES):
        values = ()
        scores = ()
        new_peak = peak
        for i in tl.static_range(READS):
            place = first + i * LANES + lane
            wanted = pos - (G - 1) + place
            present = (wanted >= 0) & (place < G)
            new = wanted >= prefix
            # of two windows, the older one is pooled from the first half of the channels
            half = tl.where(place < G - RATIO, 0, W - D)
            token = t - (pos - wanted)
            kept = state_ptr + ring * part[6] + (wanted % ROWS) * (2 * W)
            value_row = tl.where(new, kv_ptr + token * part[4], kept) + half
            score_row = tl.where(new, score_ptr + token * part[5], kept + W) + half
            mask = present[:, None] & (channel < D)
            value = tl.load(value_row[:, None] + channel, mask=mask, other=0)
            score = tl.load(score_row[:, None] + channel, mask=mask, other=float("-inf"))
            if pos - (G - 1) + first + (i + 1) * LANES > prefix:
                ape_row = ape_ptr + (wanted % RATIO) * W + half
                score += tl.load(ape_row[:, None] + channel, mask=mask & new[:, None], other=0)
            new_peak = tl.maximum(new_peak, score)
            values += (value,)
            scores += (score,)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp(peak - shift)
        total *= decay
        acc *= decay
        for i in tl.static_range(READS):
            weight = tl.exp(scores[i] - shift)
            total += weight
            acc += weight * values[i]
        peak = new_peak
    top = tl.max(peak, 0)
    decay = tl.exp(peak - tl.where(top == float("-inf"), 0.0, top)[None, :])
    pooled = tl.sum(acc * decay, 0) / tl.sum(total * decay, 0)
    return tl.where(tl.arange(0, BLOCK) < D, pooled, 0.0)


@triton.jit
def _store_entry(
    pooled, pos, slot, part, P: tl.constexpr, RATIO: tl.constexpr, SHAPES: tl.constexpr, NATIVE_FP8: tl.constexpr
):
    """Norm, rotation at the window's first position, Hadamard rotation if there are ``TURNS``, and the pool."""
    D: tl.constexpr = SHAPES[P][0]
    NOPE: tl.constexpr = SHAPES[P][1]
    ROPE: tl.constexpr = SHAPES[P][2]
    BLOCK: tl.constexpr = SHAPES[P][3]
    N: tl.constexpr = SHAPES[P][4]
    RECORD: tl.constexpr = SHAPES[P][5]
    PLAIN: tl.constexpr = SHAPES[P][6]
    DTYPE: tl.constexpr = SHAPES[P][7]
    TURNS: tl.constexpr = SHAPES[P][8]
    y = normed_rows(round_to(pooled, DTYPE)[None, :], part[7], part[12], D, BLOCK, DTYPE)
    start = (pos // RATIO) * RATIO + tl.zeros((1,), tl.int64)
    y = rotated_rows(y, start, part[8], part[9], D, ROPE, BLOCK, DTYPE)
    if TURNS:
        y = hadamard_rows(y, BLOCK, TURNS, DTYPE)
    slot = slot + tl.zeros((1,), tl.int64)
    store_rows(y, slot, part[10], part[11], N, D, NOPE, BLOCK, RECORD, PLAIN, NATIVE_FP8)


@triton.jit
def compress_token(
    t,
    which,
    parts,
    batch,
    SHAPES: tl.constexpr,
    RATIO: tl.constexpr,
    COFF: tl.constexpr,
    ROWS: tl.constexpr,
    POOL: tl.constexpr,
    KEEP: tl.constexpr,
    LANES: tl.constexpr,
    READS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """What token ``t`` means to compressor ``which``: an entry if it closes a window, and a row of the ring.

    Arguments and constants are those of `compress_launch`.
    """
    slot = tl.load(batch[5] + t).to(tl.int64)
    valid = tl.load(batch[6] + t) != 0
    closes = POOL and slot >= 0
    if closes or (KEEP and valid):
        pos = tl.load(batch[0] + t).to(tl.int64)
        req = tl.load(batch[1] + t)
        ring = tl.load(batch[4] + req * batch[7]).to(tl.int64)
        for p in tl.static_range(len(SHAPES)):
            if which == p:
                if closes:
                    prefix = tl.load(batch[3] + req)
                    pooled = _pooled(
                        t, pos, prefix, ring, parts[p], RATIO, COFF, ROWS, SHAPES[p][0], SHAPES[p][3], LANES, READS
                    )
                    _store_entry(pooled, pos, slot, parts[p], p, RATIO, SHAPES, NATIVE_FP8)
                if KEEP:
                    last = tl.load(batch[2] + req + 1)
                    if valid and t >= last - ROWS:
                        _keep(t, pos, ring, parts[p], RATIO, ROWS, COFF * SHAPES[p][0], SHAPES[p][3])


@triton.jit
def _compress_kernel(
    parts,
    batch,
    SHAPES: tl.constexpr,
    RATIO: tl.constexpr,
    COFF: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    READS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    compress_token(t, which, parts, batch, SHAPES, RATIO, COFF, ROWS, True, True, LANES, READS, NATIVE_FP8)


@triton.jit(do_not_specialize=["requests"])
def _windows_kernel(
    parts,
    batch,
    requests,
    SHAPES: tl.constexpr,
    RATIO: tl.constexpr,
    COFF: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    READS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Program e finds the e-th window that closes: counting is cheaper than a program for each of many tokens."""
    e = tl.program_id(0)
    which = tl.program_id(1)
    r = tl.arange(0, REQUESTS)
    prefix = tl.load(batch[3] + r, mask=r < requests, other=0).to(tl.int64)
    start = tl.load(batch[2] + r, mask=r < requests, other=0).to(tl.int64)
    end = tl.load(batch[2] + r + 1, mask=r < requests, other=0).to(tl.int64)
    count = (prefix + end - start) // RATIO - prefix // RATIO
    before = tl.cumsum(count, 0) - count
    mine = (before <= e) & (e < before + count)
    last = (prefix // RATIO + e - before + 1) * RATIO - 1
    t = tl.sum(tl.where(mine, start + last - prefix, 0), 0)
    if tl.sum(mine.to(tl.int32), 0) > 0:
        compress_token(t, which, parts, batch, SHAPES, RATIO, COFF, ROWS, True, False, LANES, READS, NATIVE_FP8)


@triton.jit
def _rings_kernel(
    parts,
    batch,
    SHAPES: tl.constexpr,
    RATIO: tl.constexpr,
    COFF: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    READS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Program i of a request keeps its i-th token from the end."""
    r = tl.program_id(0) // ROWS
    which = tl.program_id(1)
    t = tl.load(batch[2] + r + 1).to(tl.int64) - 1 - tl.program_id(0) % ROWS
    if t >= tl.load(batch[2] + r):
        compress_token(t, which, parts, batch, SHAPES, RATIO, COFF, ROWS, False, True, LANES, READS, NATIVE_FP8)


def compress_and_insert(parts: Sequence[CompressPart], batch: CompressBatch) -> None:
    """Same as `reference.compress.compress_and_insert`, in one launch for all ``parts`` (two for longer steps)."""
    tokens, requests, each = len(batch.positions), len(batch.prefix_lens), len(parts)
    if tokens == 0 or not parts:
        return
    arguments, constants = compress_launch(parts, batch)
    warps = choose_tiles(batch.pooled_tokens).warps
    if fits_one_launch(batch):
        _compress_kernel[(tokens, each)](*arguments, **constants, num_warps=warps)
        return
    grid = (tokens // batch.ratio + requests, each)
    block = triton.next_power_of_2(requests)
    _windows_kernel[grid](*arguments, requests, **constants, REQUESTS=block, num_warps=warps)
    _rings_kernel[(requests * batch.rows, each)](*arguments, **constants, num_warps=4)


def fits_one_launch(batch: CompressBatch) -> bool:
    """Whether no token of the step overwrites a ring row that another one may be pooling."""
    return batch.max_query_len <= batch.rows - batch.pooled_tokens + 1


def compress_launch(parts: Sequence[CompressPart], batch: CompressBatch) -> tuple[tuple, dict[str, Any]]:
    """Arguments ``parts, batch`` of `compress_token`, and the constants of all kernels here.

    Raises:
        ValueError: compressors that do not fit the batch or that the kernel does not support.
    """
    for part in parts:
        check_part(part, batch)
        _check_strides(part)
    tiles = choose_tiles(batch.pooled_tokens)
    step = (batch.positions, batch.token_to_req, batch.query_start_loc, batch.prefix_lens, batch.ring_pages)
    arguments = tuple(map(_part_arguments, parts)), (*step, batch.slots, batch.valid, batch.ring_pages.stride(0))
    return arguments, {
        "SHAPES": tuple(map(_part_shape, parts)),
        "RATIO": batch.ratio,
        "COFF": batch.pooled_tokens // batch.ratio,
        "ROWS": batch.rows,
        "LANES": tiles.lanes,
        "READS": tiles.reads,
        "NATIVE_FP8": native_fp8(batch.positions.device),
    }


def _part_arguments(part: CompressPart) -> tuple:
    return (
        part.kv,
        part.score,
        part.ape,
        part.state,
        part.kv.stride(0),
        part.score.stride(0),
        part.state.stride(0),
        part.norm_weight,
        part.cos_sin,
        part.cos_sin.shape[0],
        part.pool,
        part.pool.stride(0),
        part.eps,
    )


def _part_shape(part: CompressPart) -> tuple:
    entry = entry_constants(part.record, part.pool, part.page_entries)
    return (
        part.dim,
        entry["NOPE"],
        part.cos_sin.shape[1],
        row_block(part.dim, part.cos_sin),
        entry["N"],
        entry["RECORD"],
        entry["PLAIN"],
        TRITON_DTYPES[part.dtype],
        part.dim.bit_length() - 1 if part.hadamard else 0,
    )


def _check_strides(part: CompressPart) -> None:
    rows = {"kv": part.kv.stride(1), "score": part.score.stride(1), "state": part.state.stride(2)}
    if any(stride != 1 for stride in rows.values()) or part.state.stride(1) != part.state.shape[2]:
        raise ValueError(
            f"rows of kv, score and state must be contiguous, and the rows of a ring: got strides {part.kv.stride()}, "
            f"{part.score.stride()} and {part.state.stride()}"
        )
    if not part.ape.is_contiguous() or (part.hadamard and part.dim & (part.dim - 1)):
        raise ValueError(
            f"ape must be contiguous, and a Hadamard rotation needs a power of two of channels: got strides "
            f"{part.ape.stride()} and {part.dim} channels"
        )
