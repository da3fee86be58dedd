"""Index tensors of one step: which rows of a workspace, or which cache slots, each query reads or writes.

All functions are vectorised torch on the device of their inputs and never wait for the device. A *slot* is
``page * entries_per_page + offset``; ``-1`` marks an unused place. Block tables are ``[requests, pages]`` integers;
entries past a request's length are never used. Page ids are multiplied in int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class EntryGroup:
    """Compressed entries of one ratio, as a decode step indexes them.

    Attributes:
        ratio: tokens per entry.
        block_table: ``[B, pages]`` page ids; entries: entries per page.
        width: columns of the rows of every closed entry; 0 where no layer reads every entry.
    """

    ratio: int
    block_table: Tensor
    entries: int
    width: int


@dataclass(frozen=True)
class StepIndices:
    """Index tensors of a decode step.

    Attributes:
        slot_mapping: int64 ``[T]`` slot of each token, -1 for padding.
        swa_indices, swa_lens: as `compute_swa_indices_and_lens`.
        compressed_slots: by ratio, as `get_compressed_slot_mapping`.
        entries: by ratio, as `build_c128a_topk_indices`, for groups with a width.
    """

    slot_mapping: Tensor
    swa_indices: Tensor
    swa_lens: Tensor
    compressed_slots: dict[int, Tensor]
    entries: dict[int, tuple[Tensor, Tensor]]


def decode_step_indices(
    positions: Tensor,
    token_to_req: Tensor,
    is_valid: Tensor,
    window_table: Tensor,
    window_page: int,
    window: int,
    groups: Sequence[EntryGroup],
) -> StepIndices:
    """Everything that a decode step needs to know about where its tokens read and write.

    Args:
        positions: int64 ``[T]``; token_to_req: ``[T]``; is_valid: bool ``[T]``.
        window_table: ``[B, pages]``; window_page: tokens per page; window: tokens a query sees, itself included.
        groups: one per ratio.
    """
    slots = slot_mapping_from_positions(positions, token_to_req, window_table, window_page)
    slots = slots.masked_fill(~is_valid.bool(), -1)
    swa = compute_swa_indices_and_lens(positions, token_to_req, window_table, window_page, window, is_valid)
    compressed, entries = {}, {}
    for g in groups:
        compressed[g.ratio] = get_compressed_slot_mapping(
            positions, slots, token_to_req, g.block_table, g.entries, g.ratio
        )
        if g.width:
            entries[g.ratio] = build_c128a_topk_indices(
                positions, g.ratio, token_to_req, g.block_table, g.entries, is_valid, g.width
            )
    return StepIndices(slots, *swa, compressed, entries)


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    M: int,
    N: int,
    is_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins selected compressed entries and the sliding window into one row of workspace indices per query.

    The workspace is ``[c, M, dim]`` seen as ``[c * M, dim]``: request ``b`` keeps its compressed entries from row
    ``b * M`` and the last ``gather_lens[b]`` tokens of its window from row ``b * M + N``.

    Args:
        topk_indices: ``[T, K >= topk]`` integers, compressed entries local to the request, in any order.
        query_start_loc: ``[c + 1]`` cumulative query lengths; may be a slice of a longer one, only differences count.
        seq_lens: ``[c]`` tokens of the request after this step.
        gather_lens: ``[c]`` window tokens in the workspace, at least ``query_len + min(prefix_len, window - 1)``.
        window: tokens a query sees, itself included.
        ratio: tokens per compressed entry; 0 for layers with the window only.
        topk: compressed entries per query; 0 for layers with the window only.
        M: workspace rows per request.
        N: first window row of a request.
        is_valid: bool ``[T]``, or None for all valid.

    Returns:
        ``(indices, lens)``: int32 ``[T, round_up(topk + window, 128)]`` and int32 ``[T]``. A row holds ``n_c`` entries,
        then ``n_w`` window rows in ascending order without a gap, then -1; ``lens = n_c + n_w``.

    Notes:
        ``n_c = min((pos + 1) // ratio, topk)`` follows from the position alone: the first ``n_c`` columns of a
        ``topk_indices`` row are taken to be the valid ones, later columns are never read. A negative entry among the
        first ``n_c`` stays a hole (-1) and still counts in ``lens``. Invalid rows, and those past the last query, get
        -1 and length 0.

    Raises:
        ValueError: shapes disagree, or workspace indices would not fit in int32.
    """
    T, K = topk_indices.shape
    c = seq_lens.shape[0]
    check_combine(T, K, c, query_start_loc, gather_lens, window, ratio, topk, M)
    width = -(-(topk + window) // 128) * 128
    device = topk_indices.device
    if T == 0:
        return torch.empty(0, width, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)
    starts = query_start_loc.long() - query_start_loc[:1].long()
    token = torch.arange(T, device=device)
    owner = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    req = owner.clamp(max=c - 1)
    pos = seq_lens.long()[req] - starts[req + 1] + token
    first = (pos - window + 1).clamp(min=0)
    n_c = ((pos + 1) // ratio).clamp(0, topk) if ratio > 0 else torch.zeros_like(pos)
    lens = _zero_invalid(torch.where(owner < c, n_c + pos - first + 1, 0), is_valid)
    window_base = req * M + N + first - (seq_lens.long() - gather_lens.long())[req]

    column = torch.arange(width, dtype=torch.int32, device=device)
    entries = F.pad(topk_indices[:, :topk].int(), (0, width - topk), value=-1)
    entries = torch.where(entries >= 0, entries + (req * M).int()[:, None], -1)
    n_c, window_base = n_c.int()[:, None], window_base.int()[:, None]
    indices = torch.where(column < n_c, entries, window_base + (column - n_c))
    return indices.masked_fill_(column >= lens[:, None], -1), lens.int()


def check_combine(
    T: int,
    K: int,
    c: int,
    query_start_loc: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    M: int,
) -> None:
    """Raises ValueError when arguments of `combine_topk_swa_indices` disagree."""
    if query_start_loc.shape != (c + 1,) or gather_lens.shape != (c,):
        raise ValueError(
            f"query_start_loc must be [c + 1] and gather_lens [c] for seq_lens [c]: got {tuple(query_start_loc.shape)} "
            f"and {tuple(gather_lens.shape)} for c = {c}"
        )
    if T > 0 and c == 0:
        raise ValueError(f"{T} query rows but no request: seq_lens is empty")
    if window < 1 or ratio < 0 or topk < 0:
        raise ValueError(f"need window >= 1, ratio >= 0, topk >= 0: got window={window}, ratio={ratio}, topk={topk}")
    if topk > K:
        raise ValueError(f"topk_indices has {K} columns but topk = {topk}: pad the rows with -1")
    if c * M > INT32_MAX:
        raise ValueError(f"{c} requests x {M} workspace rows do not fit in int32 indices: use smaller chunks")


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Turns request-local compressed entries into cache slots.

    Args:
        topk_indices: ``[T, K]`` entries local to the request, -1 for none.
        token_to_req: ``[T]`` row of ``block_table`` per token.
        block_table: ``[B, pages]`` page ids.
        block_size: entries per page.
        is_valid: bool ``[T]``, or None for all valid.

    Returns:
        ``(slots, lens)``: int32 ``[T, K]``, -1 where the entry is negative or beyond the table; int32 ``[T]`` number of
        slots, 0 for invalid tokens (whose slots are still filled).

    Notes:
        Rows are not compacted: ``lens`` is a prefix length only if valid entries come first.
    """
    slots = _entry_slots(topk_indices.long(), token_to_req, block_table, block_size)
    lens = (slots >= 0).sum(1)
    return slots.int(), _zero_invalid(lens, is_valid).int()


def compute_swa_indices_and_lens(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int,
    is_valid: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Slots of the sliding window of each token: positions ``max(pos - window + 1, 0) .. pos``, ascending, then -1.

    Args:
        positions: int64 ``[T]``.
        token_to_req, block_table, is_valid: as in `compute_global_topk_indices_and_lens`.
        block_size: tokens per page.
        window: tokens a query sees, itself included.

    Returns:
        ``(slots, lens)``: int32 ``[T, window]`` and int32 ``[T]``; invalid tokens get -1 everywhere and length 0.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    positions = positions.long()
    lens = _zero_invalid((positions + 1).clamp(0, window), is_valid)
    first = (positions - window + 1).clamp(min=0)
    column = torch.arange(window, device=positions.device)
    entries = torch.where(column < lens[:, None], first[:, None] + column, -1)
    return _entry_slots(entries, token_to_req, block_table, block_size).int(), lens.int()


def build_c128a_topk_indices(
    positions: Tensor,
    ratio: int,
    token_to_req: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
    is_valid: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor]:
    """All closed compressed entries of each token: entries ``0 .. (pos + 1) // ratio - 1``, then -1.

    Args:
        positions: int64 ``[T]``.
        ratio: tokens per compressed entry, any positive number.
        token_to_req, block_table, is_valid: as in `compute_global_topk_indices_and_lens`; without a block table the
            result is the entries themselves, local to the request (prefill).
        block_size: entries per page.
        width: columns of the result; longer rows are cut.

    Returns:
        ``(indices, lens)``: int32 ``[T, width]`` and int32 ``[T]``; invalid tokens get -1 everywhere and length 0.
    """
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    lens = _zero_invalid(((positions.long() + 1) // ratio).clamp(0, width), is_valid)
    column = torch.arange(width, device=positions.device)
    entries = torch.where(column < lens[:, None], column, -1)
    if block_table is not None:
        if token_to_req is None:
            raise ValueError("token_to_req is needed with a block table")
        entries = _entry_slots(entries, token_to_req, block_table, block_size)
    return entries.int(), lens.int()


def get_compressed_slot_mapping(
    positions: Tensor,
    slot_mapping: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    entries_per_block: int,
    ratio: int,
) -> Tensor:
    """Slot where each token writes its compressed entry: only the last token of a group of ``ratio`` writes one.

    Args:
        positions: int64 ``[T]``.
        slot_mapping: int64 ``[T]`` slots of the tokens themselves; negative for padding, which writes nothing.
        token_to_req, block_table: as in `compute_global_topk_indices_and_lens`.
        entries_per_block: compressed entries per page.
        ratio: tokens per compressed entry.

    Returns:
        int64 ``[T]``: slot of entry ``pos // ratio``, or -1.
    """
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    positions = positions.long()
    writes = ((positions + 1) % ratio == 0) & (positions >= 0) & (slot_mapping >= 0)
    entries = torch.where(writes, positions // ratio, -1)
    return _entry_slots(entries[:, None], token_to_req, block_table, entries_per_block)[:, 0]


def slot_mapping_from_positions(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int
) -> Tensor:
    """Slot of each token, int64 ``[T]``; -1 for negative positions and for positions beyond the block table."""
    return _entry_slots(positions.long()[:, None], token_to_req, block_table, block_size)[:, 0]


def _zero_invalid(lens: Tensor, is_valid: Tensor | None) -> Tensor:
    return lens if is_valid is None else lens.masked_fill(~is_valid.bool(), 0)


def _entry_slots(entries: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Slots of int64 ``entries [T, K]`` of the token's request; -1 if negative, beyond the table or on no page."""
    if entries.shape[0] != token_to_req.shape[0] or block_table.dim() != 2 or block_size < 1:
        raise ValueError(
            f"need one request per row, a 2-D block table and block_size >= 1: got {entries.shape[0]} rows, "
            f"token_to_req {tuple(token_to_req.shape)}, block_table {tuple(block_table.shape)}, block_size {block_size}"
        )
    if block_table.numel() == 0 or entries.numel() == 0:
        return torch.full_like(entries, -1)
    requests, pages = block_table.shape
    request = token_to_req.long()[:, None]
    block = entries // block_size
    usable = (entries >= 0) & (block < pages) & (request >= 0) & (request < requests)
    page = block_table[request.clamp(0, requests - 1), block.clamp(0, pages - 1)].long()
    return torch.where(usable & (page >= 0), page * block_size + entries % block_size, -1)
