"""Plain torch of the index builders: vectorised on the device of the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.indices.types import DecodeRows, EntryCounts, EntryGroup, IndexRows, StepIndices
from deepseek_attn.utils.tape import recording

INT32_MAX = 2**31 - 1


def decode_rows(starts: Tensor, ends: Tensor, rows_per_request: int, max_len: int, offset: int = 0) -> DecodeRows:
    """See `kernels.indices.decode_rows`."""
    positions = starts[:, None] + offset + torch.arange(rows_per_request, device=starts.device)
    valid, positions = positions < ends[:, None], positions.clamp(max=max_len - 1)
    return DecodeRows(positions.flatten(), valid.flatten(), positions[:, 0].int(), (positions[:, -1] + 1).int())


def entry_counts(positions: Tensor, is_valid: Tensor, ratio: int, topk: int) -> EntryCounts:
    """See `kernels.indices.entry_counts`."""
    check_positive("ratio", ratio)
    visible = _zero_invalid((positions + 1) // ratio, is_valid)
    return EntryCounts(visible, visible.clamp(max=topk).int())


def step_indices(
    positions: Tensor,
    token_to_req: Tensor,
    is_valid: Tensor | None,
    token_table: Tensor,
    token_page: int,
    window: int,
    groups: Sequence[EntryGroup],
    decode_tokens: int | None = None,
) -> StepIndices:
    """See `kernels.indices.step_indices`."""
    check_step(positions, token_to_req, token_table, token_page, window, groups)
    decodes = len(positions) if decode_tokens is None else decode_tokens
    is_valid = None if recording() else is_valid
    slots = slot_mapping_from_positions(positions, token_to_req, token_table, token_page, is_valid)
    (pos, prefill_pos), requests = positions.tensor_split([decodes]), token_to_req[:decodes]
    valid, prefill_valid = (None, None) if is_valid is None else is_valid.tensor_split([decodes])
    swa = None
    if window:
        swa = compute_swa_indices_and_lens(pos, requests, token_table, token_page, window, valid)
    compressed, entries, prefill_entries = {}, {}, {}
    for g in groups:
        table, n, ratio = g.block_table, g.block_size, g.ratio
        compressed[ratio] = get_compressed_slot_mapping(positions, slots, token_to_req, table, n, ratio)
        if g.width:
            entries[ratio] = build_c128a_topk_indices(pos, ratio, requests, table, n, valid, g.width)
        if g.width and len(prefill_pos):
            rows = build_c128a_topk_indices(prefill_pos, ratio, None, None, n, prefill_valid, g.width)
            prefill_entries[ratio] = rows.indices
    return StepIndices(slots, swa, compressed, entries, prefill_entries)


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
) -> IndexRows:
    """See `kernels.indices.combine_topk_swa_indices`."""
    T, K = topk_indices.shape
    c = seq_lens.shape[0]
    check_combine(T, K, c, query_start_loc, gather_lens, window, ratio, topk, M)
    width = -(-(topk + window) // 128) * 128
    device = topk_indices.device
    if T == 0:
        none = torch.empty(0, width, dtype=torch.int32, device=device)
        return IndexRows(none, none[:, 0])
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
    return IndexRows(indices.masked_fill_(column >= lens[:, None], -1), lens.int())


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None
) -> IndexRows:
    """See `kernels.indices.compute_global_topk_indices_and_lens`."""
    slots = _entry_slots(topk_indices.long(), token_to_req, block_table, block_size)
    lens = (slots >= 0).sum(1)
    return IndexRows(slots.int(), _zero_invalid(lens, is_valid).int())


def compute_swa_indices_and_lens(
    positions: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int,
    is_valid: Tensor | None,
) -> IndexRows:
    """Slots of the window of each token: positions ``max(pos - window + 1, 0) .. pos``, ascending, then -1; lengths."""
    check_positive("window", window)
    positions = positions.long()
    lens = _zero_invalid((positions + 1).clamp(0, window), is_valid)
    first = (positions - window + 1).clamp(min=0)
    column = torch.arange(window, device=positions.device)
    entries = torch.where(column < lens[:, None], first[:, None] + column, -1)
    return IndexRows(_entry_slots(entries, token_to_req, block_table, block_size).int(), lens.int())


def build_c128a_topk_indices(
    positions: Tensor,
    ratio: int,
    token_to_req: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
    is_valid: Tensor | None,
    width: int,
) -> IndexRows:
    """All closed entries of each token: ``0 .. (pos + 1) // ratio - 1``, then -1; and lengths, at most ``width``.

    With a block table their slots, without one the entries themselves, local to the request.
    """
    check_positive("ratio", ratio)
    lens = _zero_invalid(((positions.long() + 1) // ratio).clamp(0, width), is_valid)
    column = torch.arange(width, device=positions.device)
    entries = torch.where(column < lens[:, None], column, -1)
    if block_table is not None:
        if token_to_req is None:
            raise ValueError("token_to_req is needed with a block table")
        entries = _entry_slots(entries, token_to_req, block_table, block_size)
    return IndexRows(entries.int(), lens.int())


def get_compressed_slot_mapping(
    positions: Tensor, slot_mapping: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, ratio: int
) -> Tensor:
    """Slot where each token writes its compressed entry: only the last token of a window of ``ratio`` writes one.

    ``slot_mapping``: slots of the tokens themselves; negative for padding, which writes nothing.
    """
    check_positive("ratio", ratio)
    positions = positions.long()
    writes = ((positions + 1) % ratio == 0) & (positions >= 0) & (slot_mapping >= 0)
    entries = torch.where(writes, positions // ratio, -1)
    return _entry_slots(entries[:, None], token_to_req, block_table, block_size)[:, 0]


def slot_mapping_from_positions(
    positions: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor | None = None
) -> Tensor:
    """Slot of each token, int64 ``[T]``; -1 for invalid ones, negative positions and those beyond the block table."""
    slots = _entry_slots(positions.long()[:, None], token_to_req, block_table, block_size)[:, 0]
    return slots if is_valid is None else slots.masked_fill(~is_valid.bool(), -1)


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
    check("query_start_loc", query_start_loc, (c + 1,))
    check("gather_lens", gather_lens, (c,))
    if T > 0 and c == 0:
        raise ValueError(f"{T} query rows but no request: seq_lens is empty")
    if min(window, ratio, topk) < 0 or not window + ratio:
        raise ValueError(
            "need window, ratio and topk >= 0, and a window or a ratio: got "
            f"window={window}, ratio={ratio}, topk={topk}"
        )
    if topk > K:
        raise ValueError(f"topk_indices has {K} columns but topk = {topk}: pad the rows with -1")
    if c * M > INT32_MAX:
        raise ValueError(f"{c} requests x {M} workspace rows do not fit in int32 indices: use smaller chunks")


def check_rows(rows: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int) -> None:
    """Raises ValueError unless there is a request per row, a block table and a page size."""
    if rows.shape[0] != token_to_req.shape[0] or block_table.dim() != 2 or block_size < 1:
        raise ValueError(
            f"need one request per row, a 2-D block table and block_size >= 1: got {rows.shape[0]} rows, "
            f"token_to_req {tuple(token_to_req.shape)}, block_table {tuple(block_table.shape)}, block_size {block_size}"
        )


def check_step(
    positions: Tensor, token_to_req: Tensor, table: Tensor, page: int, window: int, groups: Sequence[EntryGroup]
) -> None:
    """Raises ValueError when arguments of `step_indices` disagree."""
    if window < 0:
        raise ValueError(f"window must be 0 or more, got {window}")
    check_rows(positions, token_to_req, table, page)
    for group in groups:
        check_positive("ratio", group.ratio)
        check_rows(positions, token_to_req, group.block_table, group.block_size)


def check_positive(name: str, value: int) -> None:
    """Raises ValueError when a ratio or a window is below 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _zero_invalid(lens: Tensor, is_valid: Tensor | None) -> Tensor:
    return lens if is_valid is None else lens.masked_fill(~is_valid.bool(), 0)


def _entry_slots(entries: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Slots of int64 ``entries [T, K]`` of the token's request; -1 if negative, beyond the table or on no page."""
    check_rows(entries, token_to_req, block_table, block_size)
    if recording():  # the only request, which has a page for each entry
        page = block_table[0].index_select(0, (entries[0] // block_size).clamp_min(0)).long()
        return torch.where(entries >= 0, page * block_size + entries % block_size, -1)
    if block_table.numel() == 0 or entries.numel() == 0 or (entries.is_cpu and int(entries.max()) < 0):
        return torch.full_like(entries, -1)
    requests, pages = block_table.shape
    request = token_to_req.long()[:, None]
    block = entries // block_size
    usable = (entries >= 0) & (block < pages) & (request >= 0) & (request < requests)
    page = block_table[request.clamp(0, requests - 1), block.clamp(0, pages - 1)].long()
    return torch.where(usable & (page >= 0), page * block_size + entries % block_size, -1)
