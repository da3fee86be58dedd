"""Prefill over gathered keys: when it is used, the size of its workspace, chunks of requests, and index rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.impls.base import AttentionLayer, AttentionSpec, selected_entries
from deepseek_attn.impls.metadata import StepMetadata, without_columns
from deepseek_attn.kernels.attention import RequestEntries, dequantize_and_gather_k_cache
from deepseek_attn.kernels.indices import IndexRows, combine_topk_swa_indices

MIN_HEADS_FOR_BF16_PREFILL = 32
"""With fewer heads per rank, V3.2's prefill reads FP8 pages: the BF16 kernel would compute mostly padding heads."""


def prefill_reads_pages(fp8_mode: str, spec: AttentionSpec) -> bool:
    """Whether prefill queries read cache pages in place, as decode queries do, instead of gathered rows.

    Args:
        fp8_mode: ``mixed``: they do; ``separate``: they do not; ``auto``: V3.2's do if its cache is not FP8 (the
            prefill kernel reads its pages directly as rows) or if there are few heads. V4's do not: many queries read
            each gathered key.
    """
    if fp8_mode != "auto":
        return fp8_mode == "mixed"
    if spec.qk_nope_head_dim is None:
        return False
    return spec.kv_record == "plain" or spec.num_heads < MIN_HEADS_FOR_BF16_PREFILL


def workspace_rows_per_request(ratios: Iterable[int], layout: CacheLayout) -> int:
    """Rows of gathered keys that one request of any length can need: its entries, its window and its new tokens."""
    entries = max(-(-layout.max_model_len // ratio) if ratio else 0 for ratio in ratios)
    return entries + (layout.window + layout.max_num_batched_tokens if layout.window else 0)


@dataclass(frozen=True)
class PrefillChunk:
    """Prefill requests ``first`` to ``last`` (exclusive) that share the workspace.

    Attributes:
        N: workspace rows for entries per request; window_rows: rows for the window keys after them.
    """

    first: int
    last: int
    N: int
    window_rows: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def requests(self) -> slice:
        """Slice of its requests among the prefill requests."""
        return slice(self.first, self.last)

    @property
    def rows_per_request(self) -> int:
        return self.N + self.window_rows


def plan_prefill_chunks(seq_lens: Tensor, gather_lens: Tensor, ratio: int, capacity: int) -> list[PrefillChunk]:
    """Groups consecutive requests so that ``requests * rows_per_request`` stays within ``capacity`` rows.

    ``N`` and ``window_rows`` are the maxima of the group, so short requests do not take rows for ``max_model_len``. A
    single request always fits the reserved workspace.
    """
    chunks: list[PrefillChunk] = []
    for index, (seq_len, gather_len) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)):
        alone = PrefillChunk(index, index + 1, seq_len // ratio if ratio else 0, gather_len)
        if chunks:
            last = chunks[-1]
            merged = PrefillChunk(last.first, index + 1, max(last.N, alone.N), max(last.window_rows, alone.window_rows))
            if len(merged) * merged.rows_per_request <= capacity:
                chunks[-1] = merged
                continue
        chunks.append(alone)
    return chunks


def gather_keys(layer: AttentionLayer, step: StepMetadata, chunk: PrefillChunk, kv: Tensor) -> None:
    """Fills ``kv [requests, rows_per_request, head_dim]``: entries from row 0, the window from row ``N``."""
    requests, batch = chunk.requests, slice(step.num_decodes + chunk.first, step.num_decodes + chunk.last)
    if (pool := layer.kv_cache) is not None:
        sparse, lens = step.sparse[layer.compress_ratio], step.prefill_entry_lens[layer.compress_ratio][requests]
        entries = RequestEntries(pool.record, pool.tensor, sparse.block_size, sparse.block_table[batch], lens, None)
        dequantize_and_gather_k_cache(kv, entries, 0)
    if (pool := layer.swa_cache) is not None and (swa := step.swa) is not None:
        lens, window_lens = step.prefill_seq_lens[requests], step.prefill_gather_lens[requests]
        window = RequestEntries(pool.record, pool.tensor, swa.block_size, swa.block_table[batch], lens, window_lens)
        dequantize_and_gather_k_cache(kv, window, chunk.N)


def merged_indices(
    layer: AttentionLayer, step: StepMetadata, chunk: PrefillChunk, tokens: slice
) -> tuple[Tensor, Tensor]:
    """Workspace rows ``[T, K]`` that the prefill tokens ``tokens`` read (-1: no row), and their number ``[T]``.

    Without an indexer they are equal for all layers of a ratio: the first layer computes them for all.
    """
    ratio, first = layer.compress_ratio, step.num_decodes

    def merge() -> tuple[Tensor, Tensor]:
        topk, requests = _prefill_topk(layer, step), chunk.requests
        starts = step.query_start_loc[first + chunk.first : first + chunk.last + 1]
        lens, window_lens = step.prefill_seq_lens[requests], step.prefill_gather_lens[requests]
        valid = step.is_valid_token[step.num_decode_tokens :][tokens]
        sizes = (layer.window_size, ratio, topk.shape[1], chunk.rows_per_request, chunk.N)
        rows = combine_topk_swa_indices(topk[tokens], starts, lens, window_lens, *sizes, valid)
        return rows if step.window_starts is None else _without_missing(rows, layer, step, tokens, topk.shape[1])

    return merge() if layer.index_topk is not None else step.results.prefill_rows.once((ratio, chunk), merge)


def _without_missing(
    rows: IndexRows, layer: AttentionLayer, step: StepMetadata, tokens: slice, width: int
) -> tuple[Tensor, Tensor]:
    """Rows of `merged_indices` without window keys that were not computed: the first ones after ``width`` entries."""
    prefill, ratio = slice(step.num_decode_tokens, None), layer.compress_ratio
    entries = (step.positions[prefill][tokens] + 1) // max(ratio, 1) * (ratio > 0)
    missing = step.missing_keys(layer.window_size)[prefill][tokens]
    return without_columns(rows.indices, entries.clamp(max=width), missing), rows.lens


def _prefill_topk(layer: AttentionLayer, step: StepMetadata) -> Tensor:
    """Entries ``[Rt, K]``, local to their request, that prefill tokens read; ``K`` is 0 for window-only layers."""
    if not layer.compress_ratio:
        return torch.empty(step.num_prefill_tokens, 0, dtype=torch.int32, device=step.positions.device)
    if layer.index_topk is None:
        return step.sparse[layer.compress_ratio].prefill_entries
    return selected_entries(layer, step.num_decode_tokens, len(step.positions))
