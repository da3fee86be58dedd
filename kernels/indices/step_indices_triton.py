"""Triton device code of `step_indices`: one program per row of indices, or per block of tokens with one slot each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class BlockTable(NamedTuple):
    """Page ids ``[requests, pages]`` and their strides."""

    page_ids: Tensor
    row_stride: int
    column_stride: int
    requests: int
    pages: int


class WindowOutputs(NamedTuple):
    """Outputs of a decode step for the window: slots of tokens, rows of window slots and their lengths."""

    slot_mapping: Tensor
    indices: Tensor
    lens: Tensor


class GroupOutputs(NamedTuple):
    """Outputs of a decode step for one ratio: compressed slots of tokens, rows of entries and their lengths."""

    slots: Tensor
    entries: Tensor
    lens: Tensor


@dataclass(frozen=True)
class GroupShape:
    """Constants of one ratio.

    Attributes:
        RATIO: tokens per entry; N: entries per page; WIDTH: columns of rows of entries, 0 for none.
        FIRST_TASK: first of its programs among those of a token.
    """

    RATIO: int
    N: int
    WIDTH: int
    FIRST_TASK: int


@triton.jit
def _slots(entry, req, table, N: tl.constexpr):
    """int64 slots of int64 entries ``[K]`` of request ``req`` (one, or one per entry); -1 where there is none."""
    block = entry // N
    inside = (entry >= 0) & (block < table.pages) & (req >= 0) & (req < table.requests)
    at = table.page_ids + (req * table.row_stride + block * table.column_stride)
    page = tl.load(at, mask=inside, other=-1).to(tl.int64)
    return tl.where(page >= 0, page * N + entry % N, -1)


@triton.jit
def _is_valid(valid_ptr, t):
    """Whether token ``t`` is no padding; all are valid without ``valid_ptr``."""
    if valid_ptr is None:
        return t >= 0
    else:
        return tl.load(valid_ptr + t) != 0


@triton.jit
def _window_row(
    t, pos, req, valid, table, out_ptr, lens_ptr, WINDOW: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr
):
    """Row ``t`` of the window's slots: positions ``max(pos - WINDOW + 1, 0) .. pos``, then -1."""
    length = tl.where(valid, tl.minimum(tl.maximum(pos + 1, 0), WINDOW), 0)
    first = tl.maximum(pos - (WINDOW - 1), 0)
    column = tl.arange(0, TILE)
    entry = tl.where(column < length, first + column, -1)
    tl.store(out_ptr + t * WINDOW + column, _slots(entry, req, table, N).to(tl.int32), mask=column < WINDOW)
    tl.store(lens_ptr + t, length.to(tl.int32))


@triton.jit
def _entries_row(
    t,
    pos,
    req,
    valid,
    first,
    table,
    out_ptr,
    lens_ptr,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    N: tl.constexpr,
    PAGED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Columns from ``first`` on of row ``t`` of all closed entries: their slots, or themselves if not ``PAGED``."""
    length = tl.where(valid, tl.minimum(tl.maximum((pos + 1) // RATIO, 0), WIDTH), 0)
    column = first + tl.arange(0, TILE)
    entry = tl.where(column < length, column, -1).to(tl.int64)
    if PAGED:
        entry = _slots(entry, req, table, N)
    tl.store(out_ptr + t * WIDTH + column, entry.to(tl.int32), mask=column < WIDTH)
    if first == 0:
        tl.store(lens_ptr + t, length.to(tl.int32))


@triton.jit(do_not_specialize=["T", "max_len", "offset", "starts_ptr", "ends_ptr"])
def decode_rows_kernel(starts_ptr, ends_ptr, out, T, max_len, offset, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = row < T
    request, place = row // ROWS, row % ROWS
    pos = tl.load(starts_ptr + request, mask=inside, other=0) + offset + place
    tl.store(out.is_valid + row, pos < tl.load(ends_ptr + request, mask=inside, other=0), mask=inside)
    pos = tl.minimum(pos, max_len - 1)
    tl.store(out.positions + row, pos, mask=inside)
    tl.store(out.prefix_lens + request, pos.to(tl.int32), mask=inside & (place == 0))
    tl.store(out.seq_lens + request, (pos + 1).to(tl.int32), mask=inside & (place == ROWS - 1))


@triton.jit(do_not_specialize=["T", "topk"])
def counts_kernel(positions_ptr, valid_ptr, out, T, topk, RATIO: tl.constexpr, TOKENS: tl.constexpr):
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = t < T
    visible = (tl.load(positions_ptr + t, mask=inside, other=0) + 1) // RATIO
    visible = tl.where(tl.load(valid_ptr + t, mask=inside, other=0) != 0, visible, 0)
    tl.store(out.visible + t, visible, mask=inside)
    tl.store(out.selected + t, tl.minimum(visible, topk).to(tl.int32), mask=inside)


@triton.jit(
    do_not_specialize=["T", "row_stride", "column_stride", "requests", "pages", "positions_ptr", "valid_ptr", "req_ptr"]
)
def token_slots_kernel(
    positions_ptr,
    token_slots_ptr,
    valid_ptr,
    req_ptr,
    page_ids,
    row_stride,
    column_stride,
    requests,
    pages,
    out_ptr,
    T,
    RATIO: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
):
    table = BlockTable(page_ids, row_stride, column_stride, requests, pages)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = t < T
    pos = tl.load(positions_ptr + t, mask=inside, other=-1).to(tl.int64)
    req = tl.load(req_ptr + t, mask=inside, other=-1).to(tl.int64)
    if token_slots_ptr is not None:
        written = ((pos + 1) % RATIO == 0) & (tl.load(token_slots_ptr + t, mask=inside, other=-1) >= 0)
        pos = tl.where(written & (pos >= 0), pos // RATIO, -1)
    if valid_ptr is not None:
        pos = tl.where(tl.load(valid_ptr + t, mask=inside, other=0) != 0, pos, -1)
    tl.store(out_ptr + t, _slots(pos, req, table, N), mask=inside)


@triton.jit(
    do_not_specialize=["row_stride", "column_stride", "requests", "pages", "positions_ptr", "req_ptr", "valid_ptr"]
)
def window_kernel(
    positions_ptr,
    req_ptr,
    valid_ptr,
    page_ids,
    row_stride,
    column_stride,
    requests,
    pages,
    out_ptr,
    lens_ptr,
    WINDOW: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    table = BlockTable(page_ids, row_stride, column_stride, requests, pages)
    t = tl.program_id(0).to(tl.int64)
    pos = tl.load(positions_ptr + t).to(tl.int64)
    req = tl.load(req_ptr + t).to(tl.int64)
    _window_row(t, pos, req, _is_valid(valid_ptr, t), table, out_ptr, lens_ptr, WINDOW, N, TILE)


@triton.jit(
    do_not_specialize=["row_stride", "column_stride", "requests", "pages", "positions_ptr", "req_ptr", "valid_ptr"]
)
def entries_kernel(
    positions_ptr,
    req_ptr,
    valid_ptr,
    page_ids,
    row_stride,
    column_stride,
    requests,
    pages,
    out_ptr,
    lens_ptr,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    N: tl.constexpr,
    PAGED: tl.constexpr,
    TILE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    pos = tl.load(positions_ptr + t).to(tl.int64)
    req = pos
    if PAGED:
        req = tl.load(req_ptr + t).to(tl.int64)
    first = tl.program_id(1) * TILE
    valid = _is_valid(valid_ptr, t)
    table = BlockTable(page_ids, row_stride, column_stride, requests, pages)
    _entries_row(t, pos, req, valid, first, table, out_ptr, lens_ptr, WIDTH, RATIO, N, PAGED, TILE)


@triton.jit(
    do_not_specialize=["topk_stride", "row_stride", "column_stride", "requests", "pages", "req_ptr", "valid_ptr"]
)
def global_kernel(
    topk_ptr,
    req_ptr,
    valid_ptr,
    page_ids,
    row_stride,
    column_stride,
    requests,
    pages,
    out_ptr,
    lens_ptr,
    topk_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    table = BlockTable(page_ids, row_stride, column_stride, requests, pages)
    t = tl.program_id(0).to(tl.int64)
    req = tl.load(req_ptr + t).to(tl.int64)
    count = tl.zeros((), tl.int32)
    for first in tl.static_range(0, K, TILE):
        column = first + tl.arange(0, TILE)
        entry = tl.load(topk_ptr + t * topk_stride + column, mask=column < K, other=-1).to(tl.int64)
        slot = _slots(entry, req, table, N)
        tl.store(out_ptr + t * K + column, slot.to(tl.int32), mask=column < K)
        count += tl.sum((slot >= 0).to(tl.int32), 0)
    tl.store(lens_ptr + t, tl.where(_is_valid(valid_ptr, t), count, 0))


@triton.jit(
    do_not_specialize=[
        "c",
        "M",
        "window_row",
        "topk_stride",
        "query_start_ptr",
        "seq_lens_ptr",
        "gather_lens_ptr",
        "valid_ptr",
    ]
)
def combine_kernel(
    topk_ptr,
    query_start_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    valid_ptr,
    out_ptr,
    lens_ptr,
    c,
    M,
    window_row,
    topk_stride,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    base = tl.load(query_start_ptr).to(tl.int64)
    r = tl.arange(0, REQUESTS)
    end = tl.load(query_start_ptr + r + 1, mask=r < c, other=0).to(tl.int64) - base
    owner = tl.sum(((r < c) & (end <= t)).to(tl.int32), 0)
    req = tl.minimum(owner, c - 1)
    length = tl.load(seq_lens_ptr + req).to(tl.int64)
    pos = length - (tl.load(query_start_ptr + req + 1).to(tl.int64) - base) + t
    oldest = tl.maximum(pos - (WINDOW - 1), 0)
    entries = tl.zeros((), tl.int64)
    if RATIO > 0:
        entries = tl.minimum(tl.maximum((pos + 1) // RATIO, 0), TOPK)
    total = tl.where(owner < c, entries + pos - oldest + 1, 0)
    if valid_ptr is not None:
        total = tl.where(tl.load(valid_ptr + t) != 0, total, 0)
    row = req.to(tl.int64) * M
    window = row + window_row + oldest - (length - tl.load(gather_lens_ptr + req).to(tl.int64)) - entries
    for first in tl.static_range(0, WIDTH, TILE):
        column = first + tl.arange(0, TILE)
        index = window + column
        if first < TOPK:
            chosen = column < tl.minimum(entries, total)
            entry = tl.load(topk_ptr + t * topk_stride + column, mask=chosen, other=-1).to(tl.int64)
            index = tl.where(column < entries, tl.where(entry >= 0, row + entry, -1), index)
        index = tl.where(column < total, index, -1)
        tl.store(out_ptr + t * WIDTH + column, index.to(tl.int32), mask=column < WIDTH)
    tl.store(lens_ptr + t, total.to(tl.int32))


@triton.jit
def _group_row(
    t, pos, req, valid, token_slot, task, table, outs, G: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr
):
    """Task 0 of a ratio: the slot that token ``t`` writes. Task i: the i-th tile of its row of entries, if any."""
    GROUP: tl.constexpr = GROUPS[G]  # an element of a constexpr tuple is no constexpr argument in Triton 3.6
    if task == 0:
        written = ((pos + 1) % GROUP.RATIO == 0) & (token_slot >= 0)
        tl.store(outs.slots + t, _slots(tl.where(written, pos // GROUP.RATIO, -1), req, table, GROUP.N))
    if task >= 0 and task * TILE < GROUP.WIDTH:
        _entries_row(t, pos, req, valid, task * TILE, table, outs.entries, outs.lens, GROUP.WIDTH, GROUP.RATIO, GROUP.N,
                     True, TILE)  # fmt: skip


@triton.jit
def decode_step_kernel(
    positions_ptr,
    req_ptr,
    valid_ptr,
    window_table,
    window_outs,
    tables,
    outs,
    WINDOW: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    task = tl.program_id(1)
    pos = tl.load(positions_ptr + t).to(tl.int64)
    req = tl.load(req_ptr + t).to(tl.int64)
    valid = _is_valid(valid_ptr, t)
    token_slot = _slots(tl.where(valid, pos, -1), req, window_table, WINDOW_PAGE)
    if task == 0:
        tl.store(window_outs.slot_mapping + t, token_slot)
        _window_row(t, pos, req, valid, window_table, window_outs.indices, window_outs.lens, WINDOW, WINDOW_PAGE,
                    WINDOW_TILE)  # fmt: skip
    for g in tl.static_range(len(GROUPS)):
        _group_row(t, pos, req, valid, token_slot, task - GROUPS[g].FIRST_TASK, tables[g], outs[g], g, GROUPS, TILE)
