"""Plain torch of the ops of this family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.common.norm_rope import apply_rope, apply_rope_half_split, freqs_cis_at, rms_norm, rotate_
from deepseek_attn.kernels.common.quant import QuantizedRows, hadamard, quantize_fp8
from deepseek_attn.kernels.common.raw_queries import RawQueries, normed_queries
from deepseek_attn.kernels.insert.types import (
    CacheRows,
    CompressBatch,
    CompressPart,
    IndexKeyRows,
    LatentAndKey,
    TokenRows,
)
from deepseek_attn.utils.tape import recording, when


@dataclass(frozen=True)
class ClosingWindows:
    """Windows that close in a step, and where the projections of their tokens are.

    Attributes:
        phase: int64 ``[T]``, position of each token within its window (row of ``ape``).
        flight: int64 ``[E, G]``, row among this step's tokens of each of the ``G`` tokens of the ``E`` closing windows.
        from_state: int64 ``[C, 2]``, (window, place in it) of tokens of earlier steps, and
        state_source: int64 ``[C]``, their rows in the flattened state pool.
        absent: bool ``[E, G]``, places before the first token (the older half of window 0).
        entry_slots: int64 ``[E]`` compressed slots; entry_positions: int64 ``[E]`` rotary positions (first token).
        keep, keep_rows: int64 ``[S]``, tokens of this step to store in the rings and their rows in the state pool.
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


_windows: WeakKeyDictionary[CompressBatch, ClosingWindows] = WeakKeyDictionary()


def closing_windows(batch: CompressBatch) -> ClosingWindows:
    """Index tensors of the windows that close in a step. Synchronises, once per batch."""
    if (windows := _windows.get(batch)) is None:
        windows = _windows.setdefault(batch, _closing_windows(batch))
    return windows


def _closing_windows(batch: CompressBatch) -> ClosingWindows:
    positions, rows, pooled, kept_tokens = batch.positions, batch.rows, batch.pooled_tokens, batch.valid
    token_to_req, ring = batch.token_to_req.long(), batch.ring_pages.long() * batch.rows
    # the last rows of each request's new tokens stay for windows that are still open, or reopened by a rollback
    if batch.max_query_len > rows:
        last = batch.query_start_loc.long()[1:][token_to_req]
        kept_tokens = kept_tokens & (torch.arange(len(last), device=positions.device) >= last - rows)
    keep = kept_tokens.nonzero().flatten()
    kept = {"keep": keep, "keep_rows": ring[token_to_req[keep]] + positions[keep] % rows}
    phase, closing = positions % batch.ratio, (batch.slots >= 0).nonzero().flatten()
    if closing.device.type == "cpu" and not len(closing):  # most decode steps
        none = closing.new_empty(0, pooled)
        pairs, absent = closing.new_empty(0, 2), torch.empty(0, pooled, dtype=torch.bool, device="cpu")
        return ClosingWindows(phase, none, pairs, closing, absent, closing, closing, **kept)
    offsets = torch.arange(pooled, device=positions.device) - pooled + 1
    request, prefix_lens = token_to_req[closing].unsqueeze(1), batch.prefix_lens.long()
    wanted = positions[closing].unsqueeze(1) + offsets
    earlier = (wanted >= 0) & (wanted < prefix_lens[request])
    return ClosingWindows(
        phase=phase,
        flight=(closing.unsqueeze(1) + offsets).clamp(min=0),
        from_state=earlier.nonzero(),
        state_source=(ring[request] + wanted % rows)[earlier],
        absent=wanted < 0,
        entry_slots=batch.slots[closing],
        entry_positions=positions[closing] // batch.ratio * batch.ratio,
        **kept,
    )


def insert_tokens(tokens: TokenRows, compressors: Sequence[CompressPart], batch: CompressBatch | None) -> LatentAndKey:
    """See `kernels.insert.insert_tokens`."""
    qr = rms_norm(tokens.qr, tokens.eps, tokens.q_weight)
    kv = rms_norm(tokens.kv, tokens.eps, tokens.kv_weight)
    kv = rotate_(kv, freqs_cis_at(tokens.cos_sin, tokens.positions))
    cache = tokens.cache
    cache.record.insert(cache.pool, cache.page_entries, cache.slots, kv)
    _store_quantized(qr, tokens.qr_fp8)
    if batch is not None:
        compress_and_insert(compressors, batch)
    return LatentAndKey(qr, kv)


def insert_latents(tokens: TokenRows, index: IndexKeyRows | None = None) -> Tensor:
    """See `kernels.insert.insert_latents`."""
    freqs_cis, cache = freqs_cis_at(tokens.cos_sin, tokens.positions), tokens.cache
    qr = rms_norm(tokens.qr, tokens.eps, tokens.q_weight)
    rank = len(tokens.kv_weight)
    latent = rms_norm(tokens.kv[:, :rank], tokens.eps, tokens.kv_weight)
    rows = torch.cat([latent, apply_rope(tokens.kv[:, rank:], freqs_cis)], dim=-1)
    cache.record.insert(cache.pool, cache.page_entries, cache.slots, rows)
    if index is not None:
        k = torch.nn.functional.layer_norm(index.k.float(), index.weight.shape, index.weight, index.bias, index.eps)
        k = apply_rope_half_split(k.to(index.k.dtype), freqs_cis)
        k = hadamard(k) if index.hadamard else k
        index.cache.record.insert(index.cache.pool, index.cache.page_entries, index.cache.slots, k)
    _store_quantized(qr, tokens.qr_fp8)
    return qr


def _store_quantized(rows: Tensor, buffers: QuantizedRows | None) -> None:
    if buffers is not None:
        values, scale = quantize_fp8(rows, buffers.group, pow2=buffers.pow2_scales)
        buffers.values.copy_(values)
        buffers.scale.copy_(scale)


def query_norm_rope(raw_q: RawQueries) -> Tensor:
    """See `kernels.insert.query_norm_rope`."""
    q = normed_queries(raw_q)
    padding = raw_q.padded_heads - raw_q.num_heads
    return torch.nn.functional.pad(q, (0, 0, 0, padding)) if padding else q


def compress_and_insert(compressors: Sequence[CompressPart], batch: CompressBatch) -> None:
    """The compressors' part of `insert_tokens`."""
    for part in compressors:
        check_part(part, batch)
    if recording():
        return _compress_one(compressors, batch)
    windows = closing_windows(batch)
    for part in compressors:
        pooled = _pool_and_keep(part, windows)
        if len(pooled):
            entries = _finished(part, pooled, windows.entry_positions)
            part.record.insert(part.pool, part.page_entries, windows.entry_slots, entries)


def _compress_one(compressors: Sequence[CompressPart], batch: CompressBatch) -> None:
    """`compress_and_insert` of one token: its window is read only if the token closes it."""
    phase = batch.positions % batch.ratio
    row = batch.ring_pages.long() * batch.rows + batch.positions % batch.rows
    for part in compressors:
        score = part.score + part.ape.index_select(0, phase)
        part.state.view(-1, 2, part.kv.shape[1]).index_copy_(0, row, torch.stack([part.kv, score], dim=1))
    when(batch.slots >= 0, lambda: _insert_closed(compressors, batch))


def _insert_closed(compressors: Sequence[CompressPart], batch: CompressBatch) -> None:
    """Inserts the entries of a token that closes a window; a ring holds all tokens of a window."""
    places = torch.arange(1 - batch.pooled_tokens, 1, dtype=torch.int64, device="cpu") + batch.positions
    rows, absent = places % batch.rows + batch.ring_pages.long() * batch.rows, (places < 0).unsqueeze(1)
    position = batch.positions // batch.ratio * batch.ratio
    for part in compressors:
        found = part.state.view(-1, 2, part.kv.shape[1]).index_select(0, rows)
        if batch.overlap:  # the half of a row that the entry pools
            older, newer = found.chunk(2)
            found = torch.cat([older[..., : part.dim], newer[..., part.dim :]])
        entry = _finished(part, pool_windows(found[:, 0], found[:, 1], absent).unsqueeze(0), position)
        part.record.insert(part.pool, part.page_entries, batch.slots, entry)


def compress_latents(part: CompressPart, batch: CompressBatch) -> Tensor:
    """See `kernels.insert.compress_latents`."""
    check_part(part, batch)
    pooled = _pool_and_keep(part, closing_windows(batch))
    latents = torch.zeros(len(batch.positions), part.dim, dtype=part.dtype, device=part.kv.device)
    latents[batch.slots >= 0] = rms_norm(pooled.to(part.dtype), part.eps, part.norm_weight)
    return latents


def rope_insert(rows: Tensor, positions: Tensor, cos_sin: Tensor, cache: CacheRows) -> None:
    """See `kernels.insert.rope_insert`."""
    rotated = apply_rope(rows, freqs_cis_at(cos_sin, positions))
    cache.record.insert(cache.pool, cache.page_entries, cache.slots, rotated)


def _pool_and_keep(part: CompressPart, windows: ClosingWindows) -> Tensor:
    """Pooled rows, float32 ``[E, d]``, of the windows that close; then stores the rows that open windows need."""
    score = part.score + part.ape.index_select(0, windows.phase)
    state = part.state.view(-1, 2, part.kv.shape[1])
    pooled = _pooled(part, score, state, windows) if len(windows.entry_slots) else part.kv.new_empty(0, part.dim)
    # after pooling: a ring row may still hold a token that a window closing in this step reads
    values = part.kv
    if len(windows.keep) < len(values):
        values, score = values.index_select(0, windows.keep), score.index_select(0, windows.keep)
    state.index_copy_(0, windows.keep_rows, torch.stack([values, score], dim=1))
    return pooled


def check_part(part: CompressPart, batch: CompressBatch) -> None:
    """Raises ValueError when a compressor's tensors do not fit the batch or each other."""
    dim, ratio, tokens, state = part.dim, batch.ratio, len(batch.positions), part.state
    width = 2 * dim if batch.overlap else dim
    try:
        check("kv", part.kv, (tokens, width), torch.float32, rows=True)
        check("score", part.score, (tokens, width), torch.float32, rows=True)
        check("ape", part.ape, (ratio, width), torch.float32, contiguous=True)
        check("state", state, ("pages", batch.rows, 2 * width), torch.float32)
        check("a ring of state", state[:1], (None, *state.shape[1:]), contiguous=True)
    except ValueError as error:  # every layer of a step is checked: words are put together here
        raise ValueError(
            f"a compressor of ratio {ratio}, {dim} channels, rings of {batch.rows} rows: {error}"
        ) from None
    if part.record.dim != dim:
        raise ValueError(f"entries have {dim} channels, and the record holds {part.record.dim}")


def _pooled(part: CompressPart, score: Tensor, state: Tensor, windows: ClosingWindows) -> Tensor:
    """Softmax-weighted sums, float32 ``[E, d]``, of the windows that close in this step."""
    count, slots = windows.flight.shape
    parts = []
    # an 8K-token chunk would otherwise gather 134 MB per layer
    for start, end in row_blocks(count, rows_per_block(slots * part.dim * 4 * 4)):
        rows = slice(start, end)
        mine = (windows.from_state[:, 0] >= start) & (windows.from_state[:, 0] < end)
        window, slot = (
            windows.from_state[mine] - torch.tensor([start, 0], device=score.device, dtype=torch.int64)
        ).unbind(1)
        earlier = state[windows.state_source[mine]]
        values = _gather_slots(part, part.kv, windows.flight[rows], window, slot, earlier[:, 0])
        scores = _gather_slots(part, score, windows.flight[rows], window, slot, earlier[:, 1])
        absent = windows.absent[rows].unsqueeze(-1)
        parts.append(pool_windows(values, scores, absent))
    return torch.cat(parts)


def pool_windows(values: Tensor, scores: Tensor, absent: Tensor) -> Tensor:
    """Sums of ``values [..., G, d]`` over the ``G`` tokens of each window, weighed by softmax of ``scores`` over them.

    Args:
        absent: bool ``[..., G, 1]``, tokens that do not exist.
    """
    weights = scores.masked_fill(absent, float("-inf")).softmax(dim=-2)
    return (weights * values.masked_fill(absent, 0.0)).sum(dim=-2)


def _gather_slots(
    part: CompressPart, flight: Tensor, index: Tensor, window: Tensor, slot: Tensor, earlier: Tensor
) -> Tensor:
    """``[windows, slots, d]``: rows of this step, then of earlier steps; of each row the half that the entry pools."""
    dim = part.dim
    if flight.shape[1] == dim:
        gathered = _rows_at(flight, index)
    else:
        older, newer = index.chunk(2, dim=1)
        gathered = torch.cat([_rows_at(flight[:, :dim], older), _rows_at(flight[:, dim:], newer)], dim=1)
        newer_half = (slot >= older.shape[1]).unsqueeze(-1)
        earlier = torch.where(newer_half, earlier[:, dim:], earlier[:, :dim])
    gathered[window, slot] = earlier
    return gathered


def _rows_at(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` of whole rows: on a CPU, indexing takes five times as long."""
    return table.index_select(0, index.flatten()).view(*index.shape, table.shape[1])


def _finished(part: CompressPart, pooled: Tensor, positions: Tensor) -> Tensor:
    """Norm, rotation at the window's first position and, for indexer keys, the Hadamard transform."""
    entry = rms_norm(pooled.to(part.dtype), part.eps, part.norm_weight)
    entry = rotate_(entry, freqs_cis_at(part.cos_sin, positions))
    return hadamard(entry) if part.hadamard else entry
