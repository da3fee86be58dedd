"""Attention weights of a step, in blocks of queries, from a layer's queries, keys and selection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.impls.attention_call import AttentionCall
from deepseek_attn.impls.base import selected_entries
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.indexer import IndexQueries, PagedIndexKeys, paged_index_scores
from deepseek_attn.v32.attention import DeepseekV32MLAAttention

Layer = DeepseekV4MLAAttention | DeepseekV32MLAAttention

BLOCK_BYTES = 32 << 20
"""Of the logits of one block of queries. A few tensors of this size exist at a time."""


class AttentionWeights(NamedTuple):
    """Float32 softmax weights: ``keys [n, heads, K]``, 0 where a key was not read, and ``sink [n, heads]``."""

    keys: Tensor
    sink: Tensor


def softmax_with_sink(logits: Tensor, allowed: Tensor, sink: Tensor | None) -> AttentionWeights:
    """Softmax of ``logits [n, heads, K]`` over the keys ``allowed [n, K]``, and the sink's logit ``[heads]``."""
    logits = logits.masked_fill(~allowed.unsqueeze(1), float("-inf"))
    if sink is None:
        return AttentionWeights(logits.softmax(-1), logits.new_zeros(logits.shape[:2]))
    joined = torch.cat([logits, sink[:, None].expand(len(logits), -1, 1)], dim=-1).softmax(-1)
    return AttentionWeights(joined[..., :-1], joined[..., -1])


@dataclass(frozen=True)
class QueryBlock:
    """``n`` consecutive queries of a step and their logits: for ``W`` tokens of the window, then for ``E`` entries.

    Without a window (V3.2) ``W`` is 0; a layer of ratio 0 has no entries.

    Attributes:
        rows: of the step; positions: int64 ``[n]``; first_token: position of the first of the ``W`` tokens.
        queries: float32 ``[n, heads, head_dim]``, scaled; keys: float32 ``[W + E, head_dim]``.
        logits: float32 ``[n, heads, W + E]``; sink: float32 ``[heads]``, or None for a model without sinks.
        in_window: bool ``[n, W]``, tokens in the window of each query.
        visible: bool ``[n, E]``, entries that each query may read.
        read: bool ``[n, E]``, entries that it read.
    """

    rows: slice
    positions: Tensor
    first_token: int
    queries: Tensor
    keys: Tensor
    logits: Tensor
    sink: Tensor | None
    in_window: Tensor
    visible: Tensor
    read: Tensor

    @property
    def window_keys(self) -> int:
        """``W``: the keys before the first entry."""
        return self.in_window.shape[1]

    def weights(self) -> AttentionWeights:
        """Weights of the keys that were read."""
        return softmax_with_sink(self.logits, torch.cat([self.in_window, self.read], 1), self.sink)


def query_blocks(layer: Layer, call: AttentionCall, more_keys: int = 0) -> Iterator[QueryBlock]:
    """Yields the queries of a call in blocks of at most `BLOCK_BYTES`; a block has at least one query.

    Args:
        layer: the layer that made the call, in a step of one sequence without padding.
        more_keys: number of further keys that the caller computes logits for.
    """
    step, heads = _step(layer), layer.num_heads
    first, end = int(step.positions[0]), int(step.positions[-1]) + 1
    window, ratio = layer.window_size, layer.spec.ratio
    oldest = max(0, first - window + 1) if window else end
    dtype = call.q.dtype  # represents the values of every cache record exactly
    tokens, entries = call.q.new_empty(2, 0, layer.head_dim, dtype=torch.float32)
    if window and isinstance(layer, DeepseekV4MLAAttention):
        tokens = _window_keys(layer, step, oldest, end, dtype).float()
    if ratio and layer.kv_cache is not None:
        table = step.sparse[ratio].block_table[0]
        entries = layer.kv_cache.gather_request(table, end // ratio, dtype).float()
    selected = selected_entries(layer, 0, end - first) if layer.index_topk is not None else None
    sink = None if layer.attn_sink is None else layer.attn_sink.float()
    keys_of_one = window + len(entries) + more_keys
    # the window's keys grow with the block, by at most one key per query
    block = min(rows_per_block(8 * heads * keys_of_one, BLOCK_BYTES), keys_of_one)
    for start, stop in row_blocks(end - first, block):
        rows, positions = slice(start, stop), step.positions[start:stop]
        at, left = positions.unsqueeze(1), max(0, first + start - window + 1) if window else first + stop
        near = tokens[left - oldest : first + stop - oldest]
        far = entries[: (first + stop) // ratio] if ratio else entries
        keys, queries = torch.cat([near, far]), call.q[rows, :heads].float() * layer.scale
        position = torch.arange(left, left + len(near), device=keys.device)
        visible = torch.arange(len(far), device=keys.device) < (at + 1) // max(ratio, 1)
        yield QueryBlock(
            rows=rows,
            positions=positions,
            first_token=left,
            queries=queries,
            keys=keys,
            logits=torch.einsum("thd,kd->thk", queries, keys),
            sink=sink,
            in_window=(position <= at) & (at - position < window),
            visible=visible,
            read=visible if selected is None else visible & _chosen(selected[rows], len(far)),
        )


class SelectionQuality(NamedTuple):
    """Selections of an indexer compared with dense attention, for the ``m`` queries of a block with unread entries.

    Attributes:
        rows: int64 ``[m]``, these queries; dense: float32 ``[m, E]``, their weights if every visible entry had been
            read, the mean of the heads.
        recall: part of the ``topk`` entries with the largest of these weights that were selected, ``[m]``; chance: the
            same for a random selection.
        kept: part of these weights that falls on the selected entries, ``[m]``.
    """

    rows: Tensor
    dense: Tensor
    recall: Tensor
    chance: Tensor
    kept: Tensor


def selection_quality(block: QueryBlock, topk: int | None) -> SelectionQuality | None:
    """Quality of the ``topk`` entries that each query of a block read; None if every query read all visible entries.

    Args:
        topk: of the layer; None without an indexer.
    """
    if topk is None:
        return None
    rows = (block.visible.sum(1) > topk).nonzero().flatten()
    if not len(rows):
        return None
    both = torch.cat([block.in_window, block.visible], 1)[rows]
    weights = softmax_with_sink(block.logits[rows], both, block.sink).keys[:, :, block.window_keys :].mean(1)
    read, visible = block.read[rows], block.visible[rows]
    best = torch.zeros_like(read).scatter_(1, weights.masked_fill(~visible, -1.0).topk(topk, dim=1).indices, True)
    return SelectionQuality(
        rows=rows,
        dense=weights,
        recall=(best & read).sum(1) / topk,
        chance=topk / visible.sum(1),
        kept=(weights * read).sum(1) / weights.sum(1).clamp(min=1e-30),
    )


def index_scores(layer: Layer, call: AttentionCall, rows: list[int]) -> Tensor:
    """The indexer's scores for the queries ``rows`` of a call that read only some visible entries, float32 ``[m, E]``.

    Columns of invisible entries are undefined.
    """
    step, indexer = _step(layer), layer.indexer
    assert indexer is not None
    assert isinstance(call.index_queries, IndexQueries)
    visible, meta, pool = (
        step.entry_counts(indexer.ratio, indexer.topk).visible[rows],
        step.sparse[indexer.ratio],
        indexer.pool,
    )
    requests = step.token_to_req_indices[rows]
    keys = PagedIndexKeys(pool.record, pool.tensor, pool.entries, meta.block_table, requests)
    queries = call.index_queries.of(rows)
    return paged_index_scores(queries, keys, visible, int(visible.max()))


def _step(layer: Layer) -> StepMetadata:
    step = layer.step
    if step is None or len(step.seq_lens) != 1:
        raise ValueError("weights are computed for steps of one sequence")
    return step


def _window_keys(layer: DeepseekV4MLAAttention, step: StepMetadata, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Window keys of tokens ``start`` to ``end``, read from pages that the step still holds."""
    pool, position = layer.swa_cache, torch.arange(start, end, device=step.positions.device)
    pages = step.window.block_table[0].long()[position // pool.entries]
    return pool.gather(pages * pool.entries + position % pool.entries, dtype)


def _chosen(selected: Tensor, count: int) -> Tensor:
    """Bool ``[n, count]`` of the entries in ``selected [n, k]``; negative entries are padding."""
    chosen = torch.zeros(len(selected), count + 1, dtype=torch.bool, device=selected.device)
    chosen.scatter_(1, torch.where(selected < 0, count, selected).long(), True)
    return chosen[:, :count]
