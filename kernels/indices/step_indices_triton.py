"""Triton device code of a step's index builders.

`step_indices_kernel` serves every step: a program per token writes its slots and its window row, and further programs
write tiles of its rows of entries. Decode tokens, which come first, read pages in place, so their rows hold slots; rows
of prefill tokens hold entries local to the request, because their keys are gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl


class BlockTable(NamedTuple):
    """Page ids of requests; sizes ``n`` are passed as ``2 n + 1``.

    Triton compiles a kernel of its own for sizes that are 1 or multiples of 16 where they are in a tuple. As odd
    numbers from 3 on, all of them share one.

    Attributes:
        page_ids: ``[requests, pages]`` integers with contiguous rows; row_stride, requests, pages: sizes of it.
    """

    page_ids: Any
    row_stride: Any
    requests: Any
    pages: Any


class TokenOutputs(NamedTuple):
    """Outputs of a step for the pages that hold every token.

    Attributes:
        slot_mapping: int64 ``[T]``; indices: int32 ``[decode tokens, WINDOW]``; lens: int32 ``[decode tokens]``.
    """

    slot_mapping: Any
    indices: Any
    lens: Any


class GroupOutputs(NamedTuple):
    """Outputs of a step for one ratio.

    Attributes:
        slots: int64 ``[T]``, where tokens write compressed entries; entries: int32 ``[T, WIDTH]``; lens: int32 ``[T]``.
    """

    slots: Any
    entries: Any
    lens: Any


@dataclass(frozen=True)
class TokenShape:
    """Constants of the pages that hold every token.

    Attributes:
        N: tokens per page; WINDOW: tokens that a query sees, 0 without a window; TILE: power of two that holds it.
    """

    N: int
    WINDOW: int
    TILE: int


@dataclass(frozen=True)
class GroupShape:
    """Constants of one ratio.

    Attributes:
        RATIO: tokens per entry; N: entries per page; WIDTH: columns of rows of entries, 0 for none.
        FIRST_TASK: first of the programs of a token that write its row of entries.
    """

    RATIO: int
    N: int
    WIDTH: int
    FIRST_TASK: int


class WorkspaceRows(NamedTuple):
    """Rows of `workspace_indices_kernel`.

    Attributes:
        topk: ``[T, K]`` selected entries; out: int32 ``[T, WIDTH]`` workspace rows; lens: int32 ``[T]``.
    """

    topk: Any
    out: Any
    lens: Any


@dataclass(frozen=True)
class WorkspaceShape:
    """Constants of `workspace_indices_kernel`.

    Attributes:
        WIDTH: columns of the result; WINDOW, RATIO, TOPK: as in `combine_topk_swa_indices`.
        TILE: columns written at once; REQUESTS: power of two that holds the requests.
    """

    WIDTH: int
    WINDOW: int
    RATIO: int
    TOPK: int
    TILE: int
    REQUESTS: int


@triton.jit
def _slots(entry, req, table, N: tl.constexpr):
    """int64 slots of int64 entries ``[K]`` of request ``req`` (one, or one per entry); -1 for missing entries."""
    # entries and requests outside of the table are not loaded
    block = entry // N
    inside = (entry >= 0) & (block < table.pages >> 1) & (req >= 0) & (req < table.requests >> 1)
    page = tl.load(table.page_ids + req * (table.row_stride >> 1) + block, mask=inside, other=-1).to(tl.int64)
    return tl.where(page >= 0, page * N + entry % N, -1)


@triton.jit
def _is_valid(valid_ptr, t):
    """Whether token ``t`` is not padding; all are valid without ``valid_ptr``."""
    if valid_ptr is None:
        return t >= 0
    else:
        return tl.load(valid_ptr + t) != 0


@triton.jit
def _window_row(t, pos, req, valid, table, outs, TOKENS: tl.constexpr):
    """Row ``t`` of the window's slots: positions ``max(pos - WINDOW + 1, 0) .. pos``, then -1."""
    length = tl.where(valid, tl.minimum(tl.maximum(pos + 1, 0), TOKENS.WINDOW), 0)
    # the oldest position of the window comes first
    first = tl.maximum(pos - (TOKENS.WINDOW - 1), 0)
    column = tl.arange(0, TOKENS.TILE)
    slot = _slots(tl.where(column < length, first + column, -1), req, table, TOKENS.N)
    tl.store(outs.indices + t * TOKENS.WINDOW + column, slot.to(tl.int32), mask=column < TOKENS.WINDOW)
    tl.store(outs.lens + t, length.to(tl.int32))


@triton.jit
def _entry_slot(t, pos, req, token_slot, table, outs, G: tl.constexpr, GROUPS: tl.constexpr):
    """Slot of the compressed entry that token ``t`` writes, if it is the last of ``RATIO`` tokens and not padding."""
    GROUP: tl.constexpr = GROUPS[G]  # Triton 3.6 does not pass an element of a constexpr tuple as a constexpr
    written = ((pos + 1) % GROUP.RATIO == 0) & (token_slot >= 0)
    tl.store(outs.slots + t, _slots(tl.where(written, pos // GROUP.RATIO, -1), req, table, GROUP.N))


@triton.jit
def _entries_tile(
    t, pos, req, valid, paged, task, table, outs, G: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr
):
    """A tile of row ``t`` of all closed entries if ``task`` is of this ratio: slots if ``paged``, else local ids."""
    GROUP: tl.constexpr = GROUPS[G]
    first = (task - GROUP.FIRST_TASK) * TILE
    if (first >= 0) & (first < GROUP.WIDTH):
        length = tl.where(valid, tl.minimum(tl.maximum((pos + 1) // GROUP.RATIO, 0), GROUP.WIDTH), 0)
        column = first + tl.arange(0, TILE)
        entry = tl.where(column < length, column, -1).to(tl.int64)
        if paged:  # rows of prefill tokens hold entries, which are gathered before they are read
            entry = _slots(entry, req, table, GROUP.N)
        tl.store(outs.entries + t * GROUP.WIDTH + column, entry.to(tl.int32), mask=column < GROUP.WIDTH)
        if first == 0:  # the first program of a row writes the row's length
            tl.store(outs.lens + t, length.to(tl.int32))


@triton.jit(do_not_specialize=["positions_ptr", "req_ptr", "valid_ptr", "decode_tokens"])
def step_indices_kernel(
    positions_ptr,
    req_ptr,
    valid_ptr,
    decode_tokens,
    token_table,
    token_outs,
    tables,
    outs,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program ``(t, 0)``: slots and window row of token ``t``; ``(t, i)``: tile ``i - 1`` of its rows of entries.

    ``token_table``, ``token_outs`` and ``TOKENS`` are of the pages of all tokens; ``tables``, ``outs`` and ``GROUPS``
    have one element per ratio. The first ``decode_tokens`` tokens read pages in place.
    """
    t = tl.program_id(0).to(tl.int64)
    task = tl.program_id(1)
    pos = tl.load(positions_ptr + t).to(tl.int64)
    req = tl.load(req_ptr + t).to(tl.int64)
    valid = _is_valid(valid_ptr, t)
    paged = t < decode_tokens
    if task == 0:
        token_slot = _slots(tl.where(valid, pos, -1), req, token_table, TOKENS.N)
        tl.store(token_outs.slot_mapping + t, token_slot)
        if TOKENS.WINDOW > 0:  # noqa: SIM102  (a constant: without a window the row is not compiled)
            if paged:  # prefill tokens read the window from the workspace
                _window_row(t, pos, req, valid, token_table, token_outs, TOKENS)
        for g in tl.static_range(len(GROUPS)):
            _entry_slot(t, pos, req, token_slot, tables[g], outs[g], g, GROUPS)
    else:
        # the ratios share the tasks: each takes the tasks that are tiles of its own row
        for g in tl.static_range(len(GROUPS)):
            _entries_tile(t, pos, req, valid, paged, task, tables[g], outs[g], g, GROUPS, TILE)


@triton.jit(do_not_specialize=["T", "max_len", "offset", "starts_ptr", "ends_ptr"])
def decode_rows_kernel(starts_ptr, ends_ptr, out, T, max_len, offset, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """``TOKENS`` rows of `decode_rows`; ``out`` is a `DecodeRows`."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = row < T
    request, row_of_request = row // ROWS, row % ROWS
    pos = tl.load(starts_ptr + request, mask=inside, other=0) + offset + row_of_request
    tl.store(out.is_valid + row, pos < tl.load(ends_ptr + request, mask=inside, other=0), mask=inside)
    pos = tl.minimum(pos, max_len - 1)
    tl.store(out.positions + row, pos, mask=inside)
    # the first row of a request has its length before the step, the last row its length after it
    tl.store(out.prefix_lens + request, pos.to(tl.int32), mask=inside & (row_of_request == 0))
    tl.store(out.seq_lens + request, (pos + 1).to(tl.int32), mask=inside & (row_of_request == ROWS - 1))


@triton.jit(do_not_specialize=["T", "topk"])
def entry_counts_kernel(positions_ptr, valid_ptr, out, T, topk, RATIO: tl.constexpr, TOKENS: tl.constexpr):
    """Counts of ``TOKENS`` tokens; ``out`` is an `EntryCounts`."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = t < T
    # an entry is visible once its last token has been written
    visible = (tl.load(positions_ptr + t, mask=inside, other=0) + 1) // RATIO
    visible = tl.where(tl.load(valid_ptr + t, mask=inside, other=0) != 0, visible, 0)
    tl.store(out.visible + t, visible, mask=inside)
    tl.store(out.selected + t, tl.minimum(visible, topk).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["topk_stride", "req_ptr", "valid_ptr"])
def entry_slots_kernel(
    topk_ptr,
    topk_stride,
    req_ptr,
    valid_ptr,
    table,
    out_ptr,
    lens_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Slots of the selected entries of token ``t``, and how many there are."""
    t = tl.program_id(0).to(tl.int64)
    req = tl.load(req_ptr + t).to(tl.int64)
    count = tl.zeros((), tl.int32)
    # a row is converted tile by tile; entries that are negative or beyond the table are not counted
    for first in tl.static_range(0, K, TILE):
        column = first + tl.arange(0, TILE)
        entry = tl.load(topk_ptr + t * topk_stride + column, mask=column < K, other=-1).to(tl.int64)
        slot = _slots(entry, req, table, N)
        tl.store(out_ptr + t * K + column, slot.to(tl.int32), mask=column < K)
        count += tl.sum((slot >= 0).to(tl.int32), 0)
    tl.store(lens_ptr + t, tl.where(_is_valid(valid_ptr, t), count, 0))  # rows of padding have slots, but no length


@triton.jit(
    do_not_specialize=[
        "topk_stride",
        "query_start_ptr",
        "seq_lens_ptr",
        "gather_lens_ptr",
        "valid_ptr",
        "c",
        "M",
        "window_row",
    ]
)
def workspace_indices_kernel(
    rows,
    topk_stride,
    query_start_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    valid_ptr,
    c,
    M,
    window_row,
    SHAPE: tl.constexpr,
):
    """Workspace rows that query ``t`` reads: its selected entries, then its window. See `combine_topk_swa_indices`."""
    WIDTH: tl.constexpr = SHAPE.WIDTH
    TILE: tl.constexpr = SHAPE.TILE
    t = tl.program_id(0).to(tl.int64)
    # index of the query's request: the number of requests that end at or before the query
    base = tl.load(query_start_ptr).to(tl.int64)
    r = tl.arange(0, SHAPE.REQUESTS)
    end = tl.load(query_start_ptr + r + 1, mask=r < c, other=0).to(tl.int64) - base
    owner = tl.sum(((r < c) & (end <= t)).to(tl.int32), 0)
    req = tl.minimum(owner, c - 1)
    length = tl.load(seq_lens_ptr + req).to(tl.int64)
    pos = length - (tl.load(query_start_ptr + req + 1).to(tl.int64) - base) + t
    oldest = tl.maximum(pos - (SHAPE.WINDOW - 1), 0)
    entries = tl.zeros((), tl.int64)
    if SHAPE.RATIO > 0:
        entries = tl.minimum(tl.maximum((pos + 1) // SHAPE.RATIO, 0), SHAPE.TOPK)
    # rows past the last query, and rows of padding, are empty
    total = tl.where(owner < c, entries + pos - oldest + 1, 0)
    if valid_ptr is not None:
        total = tl.where(tl.load(valid_ptr + t) != 0, total, 0)
    row = req.to(tl.int64) * M
    # the workspace holds the last gather_lens tokens; column `entries` is the oldest of the window
    window = row + window_row + oldest - (length - tl.load(gather_lens_ptr + req).to(tl.int64)) - entries
    for first in tl.static_range(0, WIDTH, TILE):
        column = first + tl.arange(0, TILE)
        index = window + column
        if first < SHAPE.TOPK:  # only these tiles hold entries
            chosen = column < tl.minimum(entries, total)
            entry = tl.load(rows.topk + t * topk_stride + column, mask=chosen, other=-1).to(tl.int64)
            index = tl.where(column < entries, tl.where(entry >= 0, row + entry, -1), index)
        index = tl.where(column < total, index, -1)
        tl.store(rows.out + t * WIDTH + column, index.to(tl.int32), mask=column < WIDTH)
    tl.store(rows.lens + t, total.to(tl.int32))
