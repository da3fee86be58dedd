"""Chunks of prefill requests: how many share the workspace, their keys in it, and the rows that queries read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.impls.base import AttentionLayer
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.attention import dequantize_and_gather_k_cache
from deepseek_attn.kernels.indices import combine_topk_swa_indices


@dataclass(frozen=True)
class PrefillChunk:
    """Prefill requests ``first`` to ``last`` (exclusive) that share the workspace.

    Attributes:
        N: workspace rows for compressed entries per request; window_rows: rows for window keys behind them.
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

    ``N`` and ``window_rows`` are the largest of the group, so short requests are not sized by ``max_model_len``. A
    request alone always fits the reserved workspace.
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
    """Fills ``kv [requests, rows_per_request, head_dim]``: compressed entries from row 0, the window from row ``N``."""
    swa, requests = step.swa, chunk.requests
    batch = slice(swa.num_decodes + chunk.first, swa.num_decodes + chunk.last)
    if layer.kv_cache is not None:
        sparse, pool = step.sparse[layer.compress_ratio], layer.kv_cache
        lens, table = sparse.prefill_entry_lens[requests], sparse.block_table[batch]
        dequantize_and_gather_k_cache(kv, pool.record, pool.tensor, lens, None, table, sparse.block_size, 0)
    pool, table = layer.swa_cache, swa.block_table[batch]
    lens, window_lens = swa.prefill_seq_lens[requests], swa.prefill_gather_lens[requests]
    dequantize_and_gather_k_cache(kv, pool.record, pool.tensor, lens, window_lens, table, swa.block_size, chunk.N)


def merged_indices(
    layer: AttentionLayer, step: StepMetadata, chunk: PrefillChunk, tokens: slice
) -> tuple[Tensor, Tensor]:
    """Workspace rows ``[T, K]`` that the prefill tokens ``tokens`` read, -1 for none, and their counts ``[T]``.

    Without an indexer they are equal for all layers of a ratio, and are kept in the step's metadata.
    """
    swa, ratio = step.swa, layer.compress_ratio
    shared = swa.prefill_indices.get((ratio, chunk))
    if layer.index_topk is None and shared is not None:
        return shared
    topk, requests = _prefill_topk(layer, step), chunk.requests
    merged = combine_topk_swa_indices(
        topk[tokens],
        swa.query_start_loc[swa.num_decodes + chunk.first : swa.num_decodes + chunk.last + 1],
        swa.prefill_seq_lens[requests],
        swa.prefill_gather_lens[requests],
        layer.window_size,
        ratio,
        topk.shape[1],
        chunk.rows_per_request,
        chunk.N,
        swa.is_valid_token[swa.num_decode_tokens :][tokens],
    )
    if layer.index_topk is None:
        swa.prefill_indices[ratio, chunk] = merged
    return merged


def _prefill_topk(layer: AttentionLayer, step: StepMetadata) -> Tensor:
    """Entries ``[Rt, K]``, local to their request, that prefill tokens read; ``K`` is 0 for window-only layers."""
    swa = step.swa
    if not layer.compress_ratio:
        return torch.empty(swa.num_prefill_tokens, 0, dtype=torch.int32, device=swa.slot_mapping.device)
    if layer.index_topk is None:
        return step.sparse[layer.compress_ratio].c128a_prefill_topk_indices
    return layer.topk_indices_buffer[swa.num_decode_tokens :][: swa.num_prefill_tokens]
