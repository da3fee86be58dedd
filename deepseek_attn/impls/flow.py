"""The flow that impls share: decode rows read the pages, prefill rows read keys gathered into the workspace."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepseek_attn.cache.pools import Pool
from deepseek_attn.impls.base import DeepseekV4SparseMLAAttentionImpl
from deepseek_attn.kernels.attention.gather_reference import dequantize_and_gather_k_cache
from deepseek_attn.kernels.indices.reference import combine_topk_swa_indices, compute_global_topk_indices_and_lens

if TYPE_CHECKING:
    from deepseek_attn.attention.layer import DeepseekV4MLAAttention


@dataclass(frozen=True)
class PagedKeys:
    """Keys that each of ``T`` queries reads from one pool.

    Attributes:
        indices: int32 ``[T, K]`` slots, -1 for none; lens: int32 ``[T]`` columns to look at.
    """

    pool: Pool
    indices: torch.Tensor
    lens: torch.Tensor

    def as_source(self) -> tuple:
        """``(record, pool, n, indices, lens)``, as `sparse_attention_paged` takes it."""
        return self.pool.record, self.pool.tensor, self.pool.entries, self.indices, self.lens


class SplitAttentionImpl(DeepseekV4SparseMLAAttentionImpl):
    """Splits decode from prefill, chunks prefill to the workspace, merges window and compressed keys.

    A subclass says how to attend: over pages (`attend_pages`) and over gathered rows (`attend_rows`). It may also
    replace the three ops below with faster ones of the same signature. One attending call that covers all rows decides
    where the result lies; several write to rows of one tensor.
    """

    gather = staticmethod(dequantize_and_gather_k_cache)
    merge_indices = staticmethod(combine_topk_swa_indices)
    global_indices = staticmethod(compute_global_topk_indices_and_lens)

    @classmethod
    @abstractmethod
    def attend_pages(
        cls, layer: DeepseekV4MLAAttention, q: torch.Tensor, sources: list[PagedKeys], output: torch.Tensor | None
    ) -> torch.Tensor:
        """One softmax, with the layer's sinks, over the keys of all ``sources``: the window, then compressed entries.

        Args:
            q, output: ``[T, padded_heads, head_dim]`` with ``T`` at least 1. A query without any key gets zeros.

        Returns:
            ``output``, or if that is None a tensor like it.
        """

    @classmethod
    @abstractmethod
    def attend_rows(
        cls,
        layer: DeepseekV4MLAAttention,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        lens: torch.Tensor,
        output: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same over rows of ``kv [N, head_dim]``: ``indices`` int32 ``[T, K]`` of which ``lens [T]`` count.

        Indices past a row's length are -1; rows that no valid index names hold anything.
        """

    @classmethod
    def forward_mqa(cls, layer, q, kv, positions, output=None) -> torch.Tensor:
        if output is not None and (output.shape != q.shape or output.dtype != q.dtype):
            raise ValueError(
                f"output must be like q, {tuple(q.shape)} {q.dtype}: got {tuple(output.shape)} {output.dtype}"
            )
        if layer.step is None:
            cls._reserve(layer, q.dtype)
            return torch.zeros_like(q) if output is None else output.zero_()
        swa = layer.step.swa
        decode, prefill = swa.num_decode_tokens, swa.num_prefill_tokens
        if not prefill and decode:
            return cls._forward_decode(layer, q, output)
        if not decode and prefill:
            return cls._forward_prefill(layer, q, output)
        output = torch.empty_like(q) if output is None else output
        if prefill:
            cls._forward_prefill(layer, q[decode:], output[decode:])
            cls._forward_decode(layer, q[:decode], output[:decode])
        return output

    @classmethod
    def _reserve(cls, layer: DeepseekV4MLAAttention, dtype: torch.dtype) -> None:
        """Warm-up: the largest workspace any step of this layer can need."""
        layer.workspace.get(((cls.PREFILL_CHUNK_SIZE, layer.workspace_rows(), layer.head_dim), dtype))

    @classmethod
    def _forward_decode(
        cls, layer: DeepseekV4MLAAttention, q: torch.Tensor, output: torch.Tensor | None
    ) -> torch.Tensor:
        """One softmax over the window's pages and the compressed pages, straight from the pools."""
        swa = layer.step.swa
        sources = [PagedKeys(layer.swa_cache, swa.decode_swa_indices.squeeze(1), swa.decode_swa_lens)]
        if layer.compress_ratio:
            sources.append(PagedKeys(layer.kv_cache, *cls._decode_topk(layer)))
        return cls.attend_pages(layer, q, sources, output)

    @classmethod
    def _decode_topk(cls, layer: DeepseekV4MLAAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots ``[Dt, K]`` and counts ``[Dt]`` of the compressed entries that decode queries read."""
        swa, meta = layer.step.swa, layer.step.sparse[layer.compress_ratio]
        if layer.indexer is None:
            return meta.c128a_global_decode_topk_indices.squeeze(1), meta.c128a_decode_topk_lens
        tokens = swa.num_decode_tokens
        if layer.decode_topk_slots is not None:
            return layer.decode_topk_slots, layer.step.selected_of(layer.compress_ratio, layer.indexer.topk)[:tokens]
        return cls.global_indices(
            layer.topk_indices_buffer[:tokens],
            swa.token_to_req_indices[:tokens],
            meta.block_table,
            meta.block_size,
            swa.is_valid_token[:tokens],
        )

    @classmethod
    def _forward_prefill(
        cls, layer: DeepseekV4MLAAttention, q: torch.Tensor, output: torch.Tensor | None
    ) -> torch.Tensor:
        """Gathers keys into the workspace, as many requests at once as fit, and attends over their rows."""
        swa = layer.step.swa
        capacity = cls.PREFILL_CHUNK_SIZE * layer.workspace_rows()
        chunks = plan_prefill_chunks(
            swa.prefill_seq_lens_cpu, swa.prefill_gather_lens_cpu, layer.compress_ratio, capacity
        )
        starts = (swa.query_start_loc_cpu[swa.num_decodes :] - swa.num_decode_tokens).tolist()
        if output is None and len(chunks) > 1:
            output = torch.empty_like(q)
        for chunk in chunks:
            rows = slice(starts[chunk.first], starts[chunk.last])
            if rows.start == rows.stop:
                continue
            shape = (chunk.last - chunk.first, chunk.N + chunk.window_rows, layer.head_dim)
            (kv,) = layer.workspace.get((shape, q.dtype))
            cls._gather(layer, kv, chunk)
            indices, lens = cls._merged(layer, chunk, rows)
            kv = kv.view(-1, layer.head_dim)
            if output is None:
                return cls.attend_rows(layer, q, kv, indices, lens, None)
            cls.attend_rows(layer, q[rows], kv, indices, lens, output[rows])
        return output

    @classmethod
    def _merged(
        cls, layer: DeepseekV4MLAAttention, chunk: PrefillChunk, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Workspace rows that the queries ``rows`` read: ``[T, K]``, -1 where there is none, and how many ``[T]``.

        What an indexer has not chosen is the same for all layers of a ratio, and is kept in the step's metadata.
        """
        swa, ratio, key = layer.step.swa, layer.compress_ratio, (layer.compress_ratio, chunk)
        if layer.indexer is None and key in swa.prefill_indices:
            return swa.prefill_indices[key]
        topk, requests = cls._prefill_topk(layer), chunk.requests
        first = swa.num_decodes + requests.start
        merged = cls.merge_indices(
            topk[rows],
            swa.query_start_loc[first : swa.num_decodes + requests.stop + 1],
            swa.prefill_seq_lens[requests],
            swa.prefill_gather_lens[requests],
            layer.window_size,
            ratio,
            topk.shape[1],
            chunk.N + chunk.window_rows,
            chunk.N,
            swa.is_valid_token[swa.num_decode_tokens :][rows],
        )
        if layer.indexer is None:
            swa.prefill_indices[key] = merged
        return merged

    @classmethod
    def _prefill_topk(cls, layer: DeepseekV4MLAAttention) -> torch.Tensor:
        """Entries ``[Rt, K]``, local to their request, that prefill queries read; ``K`` is 0 for window-only layers."""
        swa = layer.step.swa
        if not layer.compress_ratio:
            return torch.empty(swa.num_prefill_tokens, 0, dtype=torch.int32, device=swa.slot_mapping.device)
        if layer.indexer is None:
            return layer.step.sparse[layer.compress_ratio].c128a_prefill_topk_indices
        first = swa.num_decode_tokens
        return layer.topk_indices_buffer[first : first + swa.num_prefill_tokens]

    @classmethod
    def _gather(cls, layer: DeepseekV4MLAAttention, kv: torch.Tensor, chunk: PrefillChunk) -> None:
        """Rows [0, N) of each request: its compressed entries; rows from N on: the end of its window cache."""
        swa, pool, requests = layer.step.swa, layer.swa_cache, chunk.requests
        batch = slice(swa.num_decodes + chunk.first, swa.num_decodes + chunk.last)
        if layer.compress_ratio:
            meta, entries = layer.step.sparse[layer.compress_ratio], layer.kv_cache
            table = meta.block_table[batch]
            lens = meta.prefill_entry_lens[requests]
            cls.gather(kv, entries.record, entries.tensor, lens, None, table, meta.block_size, 0)
        lens, table = (swa.prefill_seq_lens[requests], swa.prefill_gather_lens[requests]), swa.block_table[batch]
        cls.gather(kv, pool.record, pool.tensor, *lens, table, swa.block_size, chunk.N)


@dataclass(frozen=True)
class PrefillChunk:
    """Prefill requests ``first`` to ``last`` (exclusive) share the workspace.

    Attributes:
        N: rows for compressed entries per request; window_rows: rows for window keys behind them.
    """

    first: int
    last: int
    N: int
    window_rows: int

    @property
    def requests(self) -> slice:
        """Its requests, among those that prefill."""
        return slice(self.first, self.last)


def plan_prefill_chunks(
    seq_lens: torch.Tensor, gather_lens: torch.Tensor, ratio: int, capacity: int
) -> list[PrefillChunk]:
    """Groups consecutive requests so that ``requests * (N + window_rows)`` stays within ``capacity`` rows.

    ``N`` and ``window_rows`` are the largest of the group, so short requests are not sized by ``max_model_len``. A
    request alone always fits the reserved workspace.
    """
    chunks: list[PrefillChunk] = []
    for index, (seq_len, gather_len) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)):
        alone = PrefillChunk(index, index + 1, seq_len // ratio if ratio else 0, gather_len)
        if chunks:
            last = chunks[-1]
            merged = PrefillChunk(last.first, index + 1, max(last.N, alone.N), max(last.window_rows, alone.window_rows))
            if (merged.last - merged.first) * (merged.N + merged.window_rows) <= capacity:
                chunks[-1] = merged
                continue
        chunks.append(alone)
    return chunks
