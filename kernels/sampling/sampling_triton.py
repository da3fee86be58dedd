"""Triton device code of greedy tokens and of drafts that are equal to them."""

from __future__ import annotations

import triton
import triton.language as tl

_NO_COLUMN = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["starts", "ends"])
def accept_drafts_kernel(token_ids, chosen, starts, ends, out, ROWS: tl.constexpr, VERIFY: tl.constexpr):
    """Program ``(request,)``: writes its newest token, and that token's row and position, to `AcceptedDrafts`."""
    request = tl.program_id(0)
    start = tl.load(starts + request)
    # rows at or beyond the end are padding
    count = tl.minimum(tl.maximum(tl.load(ends + request) - start - 1, 0), ROWS - 1)
    WIDTH: tl.constexpr = triton.next_power_of_2(ROWS)
    first, row = request.to(tl.int64) * ROWS, tl.arange(0, WIDTH)
    last = count
    if VERIFY:
        # the first row with a wrong draft or without one: all drafts before it are accepted
        draft = row < count
        same = tl.load(token_ids + first + row + 1, mask=draft, other=0) == tl.load(
            chosen + first + row, mask=draft, other=0
        )
        last = tl.min(tl.where(draft & same, WIDTH, row)).to(tl.int64)
    tl.store(out.last_rows + request, first + last)
    # an invalid token has no embedding: the next step reads token 0
    tl.store(out.next_ids + request, tl.maximum(tl.load(chosen + first + last), 0))
    tl.store(out.next_starts + request, start + last + 1)


@triton.jit
def greedy_block_kernel(logits, peaks, columns, row_stride, vocab, BLOCK: tl.constexpr):
    """Program ``(block, row)``: maximum of a block of a row, and its first column."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + column, mask=column < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))  # NaN breaks a row as infinity does
    peak = tl.max(x)
    # of equal maxima the first one counts
    first = tl.min(tl.where(x == peak, column, vocab))
    at = row * tl.num_programs(0) + block
    tl.store(peaks + at, peak)
    tl.store(columns + at, first)


@triton.jit
def greedy_row_kernel(peaks, columns, tokens, blocks, NONE: tl.constexpr, WIDTH: tl.constexpr):
    """Program ``(row,)``: its token from the maxima of its blocks; ``NONE`` where the maximum is not finite."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    inside = block < blocks
    x = tl.load(peaks + row * blocks + block, mask=inside, other=float("-inf"))
    column = tl.load(columns + row * blocks + block, mask=inside, other=_NO_COLUMN)
    peak = tl.max(x)
    # of equal maxima the first one counts, over blocks too
    token = tl.min(tl.where(x == peak, column, _NO_COLUMN))
    sound = (peak < float("inf")) & (peak > float("-inf"))
    tl.store(tokens + row, tl.where(sound, token, NONE).to(tl.int64))
