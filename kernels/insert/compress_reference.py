"""Windows of tokens become one compressed entry each, stored in a paged pool.

Every token contributes a value and a score per channel. When a window of ``ratio`` tokens closes, its values are
pooled with a softmax of the scores over the tokens, channel by channel. With overlap an entry pools two windows: the
first half of a token's channels feeds the *next* window's entry, the second half its own. Tokens of windows that are
still open wait in a ring of rows per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at, rms_norm
from deepseek_attn.kernels.common.quant import hadamard


@dataclass
class CompressBatch:
    """What a step's tokens are to the compressors of one (ratio, overlap). All tensors are on the device.

    Attributes:
        ratio: tokens of a window; overlap: an entry also pools the window before its own.
        rows: rows of a request's ring, at least the ``coff * ratio`` that an entry pools.
        positions: int64 ``[T]``; token_to_req: int32 ``[T]``. Tokens of a request are consecutive.
        query_start_loc: int32 ``[B + 1]`` first row of each request; rows of padding count as its tokens.
        prefix_lens: int32 ``[B]`` length of each request before the step.
        ring_pages: int32 ``[B]`` page of each request's ring in the state pools.
        slots: int64 ``[T]`` compressed slot of the entry that a token completes, -1 for none.
        valid: bool ``[T]``; rows that are padding complete nothing and are not kept.
        max_query_len: new tokens of a request at most, on the host.
    """

    ratio: int
    overlap: bool
    rows: int
    positions: Tensor
    token_to_req: Tensor
    query_start_loc: Tensor
    prefix_lens: Tensor
    ring_pages: Tensor
    slots: Tensor
    valid: Tensor
    max_query_len: int

    @property
    def pooled_tokens(self) -> int:
        """Tokens that an entry pools."""
        return (2 if self.overlap else 1) * self.ratio

    @cached_property
    def windows(self) -> ClosingWindows:
        """Index tensors of the closing windows: waits for the device, once per batch."""
        return _closing_windows(self)


@dataclass(frozen=True)
class ClosingWindows:
    """Which windows close in a step and where their tokens' projections are.

    Attributes:
        phase: int64 ``[T]``, position within the window (row of ``ape``).
        flight: int64 ``[E, G]``, row of each of the ``G`` slots of the ``E`` closing windows among this step's tokens.
        from_state: int64 ``[C, 2]``, (window, slot) pairs whose token came in an earlier step, and
        state_source: int64 ``[C]``, their rows in the flattened state pool.
        absent: bool ``[E, G]``, slots before the first token (the older half of window 0).
        entry_slots: int64 ``[E]`` compressed slots; entry_positions: int64 ``[E]`` rotary positions (first token).
        keep, keep_rows: int64 ``[S]``, tokens of this step to carry over and their rows in the state pool.
    """

    phase: Tensor
    flight: Tensor
    from_state: Tensor
    state_source: Tensor
    absent: Tensor
    entry_slots: Tensor
    entry_positions: Tensor
    keep: Tensor
    keep_rows: Tensor


@dataclass(frozen=True)
class CompressPart:
    """One compressor of a layer: its projections of the step's tokens, and where its entries go.

    Attributes:
        kv, score: float32 ``[T, coff * d]``, values and scores without ``ape``.
        ape: float32 ``[ratio, coff * d]``, added to the scores by position within the window.
        state: float32 ``[pages, rows, 2 * coff * d]``, rings of (value, score with ``ape``) rows.
        norm_weight: float32 ``[d]``; eps: of the entry's norm.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines.
        record, pool, page_entries: layout of an entry, uint8 ``[pages, page bytes]``, entries per page.
        dtype: what an entry is rounded to after pooling, after the norm and after the rotation.
        hadamard: rotate the entry by a Hadamard matrix before it is stored.
    """

    kv: Tensor
    score: Tensor
    ape: Tensor
    state: Tensor
    norm_weight: Tensor
    eps: float
    cos_sin: Tensor
    record: Any
    pool: Tensor
    page_entries: int
    dtype: torch.dtype
    hadamard: bool = False

    @property
    def dim(self) -> int:
        return self.norm_weight.shape[0]


def compress_and_insert(parts: Sequence[CompressPart], batch: CompressBatch) -> None:
    """Stores the entries of windows that close in this step, and keeps what open windows need.

    Args:
        parts: the compressors of a layer (its own, and its indexer's), all over the same ``batch``.

    Raises:
        ValueError: shapes that disagree.

    Notes:
        A ring keeps the last ``rows`` tokens of its request, so that up to ``rows - coff * ratio`` of them can be taken
        back. Entries of different steps are the same bits however tokens are cut into steps.
    """
    for part in parts:
        check_part(part, batch)
    windows = batch.windows
    for part in parts:
        score = part.score + part.ape[windows.phase]
        state = part.state.view(-1, 2, part.kv.shape[1])
        if len(windows.entry_slots):
            entries = _finished(part, _pooled(part, score, state, windows), windows.entry_positions)
            part.record.insert(part.pool, part.page_entries, windows.entry_slots, entries)
        # after pooling: a ring row may still hold a token that a window closing in this step reads
        state[windows.keep_rows] = torch.stack([part.kv[windows.keep], score[windows.keep]], dim=1)


def check_part(part: CompressPart, batch: CompressBatch) -> None:
    """Raises ValueError when the shapes of a compressor do not fit the batch."""
    width = batch.pooled_tokens // batch.ratio * part.dim
    tokens = len(batch.positions)
    wanted = {
        "kv": (part.kv, (tokens, width)),
        "score": (part.score, (tokens, width)),
        "ape": (part.ape, (batch.ratio, width)),
        "state": (part.state, (part.state.shape[0], batch.rows, 2 * width)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} of a compressor of ratio {batch.ratio}, {part.dim} channels and rings of {batch.rows} rows "
                f"must be float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
    if part.record.dim != part.dim:
        raise ValueError(f"entries have {part.dim} channels, and the record holds {part.record.dim}")


def _closing_windows(batch: CompressBatch) -> ClosingWindows:
    positions, rows, slots = batch.positions, batch.rows, batch.pooled_tokens
    token_to_req, prefix_lens = batch.token_to_req.long(), batch.prefix_lens.long()
    ring = batch.ring_pages.long() * rows
    closing = (batch.slots >= 0).nonzero().flatten()
    offsets = torch.arange(slots, device=positions.device) - slots + 1
    request = token_to_req[closing].unsqueeze(1)
    wanted = positions[closing].unsqueeze(1) + offsets
    earlier = (wanted >= 0) & (wanted < prefix_lens[request])
    # the last rows of each request's new tokens stay for windows that are still open, or reopened by a rollback
    last = batch.query_start_loc.long()[1:][token_to_req]
    token = torch.arange(len(last), device=positions.device)
    keep = ((token >= last - rows) & batch.valid).nonzero().flatten()
    return ClosingWindows(
        phase=positions % batch.ratio,
        flight=(closing.unsqueeze(1) + offsets).clamp(min=0),
        from_state=earlier.nonzero(),
        state_source=(ring[request] + wanted % rows)[earlier],
        absent=wanted < 0,
        entry_slots=batch.slots[closing],
        entry_positions=positions[closing] // batch.ratio * batch.ratio,
        keep=keep,
        keep_rows=ring[token_to_req[keep]] + positions[keep] % rows,
    )


def _pooled(part: CompressPart, score: Tensor, state: Tensor, windows: ClosingWindows) -> Tensor:
    """Softmax-weighted sums, float32 ``[E, d]``, of the windows that close in this step."""
    count, slots = windows.flight.shape
    parts = []
    # an 8K-token chunk would otherwise gather 134 MB per layer
    for start, end in row_blocks(count, rows_per_block(slots * part.dim * 4 * 4)):
        rows = slice(start, end)
        mine = (windows.from_state[:, 0] >= start) & (windows.from_state[:, 0] < end)
        window, slot = (windows.from_state[mine] - torch.tensor([start, 0], device=score.device)).unbind(1)
        earlier = state[windows.state_source[mine]]
        values = _gather_slots(part, part.kv, windows.flight[rows], window, slot, earlier[:, 0])
        scores = _gather_slots(part, score, windows.flight[rows], window, slot, earlier[:, 1])
        absent = windows.absent[rows].unsqueeze(-1)
        weights = scores.masked_fill(absent, float("-inf")).softmax(dim=1)
        parts.append((weights * values.masked_fill(absent, 0.0)).sum(dim=1))
    return torch.cat(parts)


def _gather_slots(
    part: CompressPart, flight: Tensor, index: Tensor, window: Tensor, slot: Tensor, earlier: Tensor
) -> Tensor:
    """``[windows, slots, d]``: rows of this step, patched with rows of earlier steps, each its own half."""
    dim = part.dim
    if flight.shape[1] == dim:
        gathered = flight[index]
    else:
        older, newer = index.chunk(2, dim=1)
        gathered = torch.cat([flight[:, :dim][older], flight[:, dim:][newer]], dim=1)
        own = (slot >= older.shape[1]).unsqueeze(-1)
        earlier = torch.where(own, earlier[:, dim:], earlier[:, :dim])
    gathered[window, slot] = earlier
    return gathered


def _finished(part: CompressPart, pooled: Tensor, positions: Tensor) -> Tensor:
    """Norm, rotation at the window's first position and, for indexer keys, the Hadamard rotation."""
    entry = rms_norm(pooled.to(part.dtype), part.eps, part.norm_weight)
    entry = apply_rope(entry, freqs_cis_at(part.cos_sin, positions))
    return hadamard(entry) if part.hadamard else entry
